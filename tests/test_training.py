import math

import pytest
import torch

from helpers import data, generation, models, precision, training

TINY = models.GPTConfig(d_model=32, n_layers=1, n_heads=2, seq_len=16)


def batches(seed=1, batch=4, seq=16):
    generator = torch.Generator().manual_seed(seed)
    return lambda: data.arithmetic_batch(batch, seq, generator)


@pytest.mark.parametrize("name", precision.NAMES)
def test_loss_falls_and_runs_repeat_exactly(cpu, name):
    chosen = precision.choose(name, cpu)
    runs = [training.train(chosen.build(TINY), chosen, batches(), 30, lr=3e-3) for _ in range(2)]
    assert runs[0]["loss"].tolist() == runs[1]["loss"].tolist()
    assert abs(runs[0]["loss"][0] - math.log(96)) < 0.2
    assert runs[0]["loss"][29] < runs[0]["loss"][0] - 0.4
    assert (runs[0]["ms"] > 0).all()


@pytest.mark.parametrize("name", precision.NAMES)
def test_the_laptop_preset_learns_to_continue_held_out_prompts(cpu, name):
    """The quality bar: 63 of 64. It proves the wiring; even badly scaled FP8 solves arithmetic."""
    preset = models.preset("laptop")
    chosen = precision.choose(name, cpu)
    model = chosen.build(preset.config)
    history = training.train(model, chosen, batches(3, preset.batch, preset.config.seq_len), preset.steps, preset.lr)
    assert history["loss"].iloc[-1] < math.log(6) / 4
    prompts, truth = data.held_out_prompts()
    generated = generation.generate(model, prompts, 24, chosen)
    assert (generated[:, 8:] == truth).all(1).sum() >= 63


def test_a_loss_that_is_not_finite_names_the_step(cpu):
    chosen = precision.choose("fp32", cpu)
    model = chosen.build(TINY)

    def poison(step):
        if step == 4:
            model.head.weight.data.fill_(math.nan)

    with pytest.raises(FloatingPointError, match="the loss of step 5 is nan"):
        training.train(model, chosen, batches(), 8, lr=1e-3, on_step=poison)
