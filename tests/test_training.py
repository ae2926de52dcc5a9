import math
import os

import pytest
import torch

from helpers import data, fp8_state, generation, models, precision, training

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


@pytest.fixture
def saved(cpu, tmp_path):
    chosen = precision.choose("fp8", cpu)
    model = chosen.build(TINY)
    training.train(model, chosen, batches(), 5, lr=1e-3)
    path = tmp_path / "deep" / "model.safetensors"
    training.save_checkpoint(path, model, 5)
    return chosen, model, path


def test_checkpoint_brings_back_weights_and_fp8_state(saved):
    chosen, model, path = saved
    other = chosen.build(TINY, torch.Generator().manual_seed(9))
    assert training.load_checkpoint(path, other, chosen) == 5
    for name, tensor in fp8_state.delayed_state(model).items():
        assert torch.equal(tensor, fp8_state.delayed_state(other)[name]), name
    prompts, _ = data.held_out_prompts()
    assert torch.equal(*(generation.generate(m, prompts[:4, :4], 8, chosen) for m in (model, other)))
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]


def test_an_fp8_checkpoint_loads_into_bf16(cpu, saved):
    _, model, path = saved
    bf16 = precision.choose("bf16", cpu)
    other = bf16.build(TINY, torch.Generator().manual_seed(9))
    training.load_checkpoint(path, other, bf16)
    assert torch.equal(other.blocks[0].fc1.weight, model.blocks[0].fc1.weight)


def break_file(path, how):
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "text":
        path.write_text("not a checkpoint at all")
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "foreign":
        from safetensors.torch import save_file

        save_file({"a": torch.zeros(2)}, path)


@pytest.mark.parametrize("how", ["truncated", "text", "empty", "foreign"])
def test_a_broken_checkpoint_is_refused_by_name_and_left_alone(saved, how):
    chosen, _, path = saved
    break_file(path, how)
    before = path.read_bytes()
    other = chosen.build(TINY, torch.Generator().manual_seed(9))
    weights = models.plain_state(other)
    with pytest.raises(ValueError, match=r"model.safetensors .*delete it to train anew"):
        training.load_checkpoint(path, other, chosen)
    assert path.read_bytes() == before
    assert all(torch.equal(v, weights[k]) for k, v in models.plain_state(other).items())


def test_another_config_or_history_length_is_refused(cpu, saved):
    chosen, _, path = saved
    wider = models.GPTConfig(d_model=64, n_layers=1, n_heads=2, seq_len=16)
    with pytest.raises(ValueError, match=r"model.safetensors holds a model of .*'d_model': 32"):
        training.load_checkpoint(path, chosen.build(wider), chosen)
    longer = precision.choose("fp8", cpu, amax_history_len=32)
    model = longer.build(TINY, torch.Generator().manual_seed(9))
    weights = models.plain_state(model)
    with pytest.raises(
        ValueError, match=r"model.safetensors: .*amax_history has shape \(16, 3\), this model needs \(32, 3\)"
    ):
        training.load_checkpoint(path, model, longer)
    assert all(torch.equal(v, weights[k]) for k, v in models.plain_state(model).items())


def test_missing_checkpoint(cpu, tmp_path):
    chosen = precision.choose("fp32", cpu)
    with pytest.raises(FileNotFoundError, match=r"nowhere.safetensors does not exist; train a model"):
        training.load_checkpoint(tmp_path / "nowhere.safetensors", chosen.build(TINY), chosen)


def test_a_save_that_fails_keeps_the_old_checkpoint(saved, monkeypatch):
    _, model, path = saved
    before = path.read_bytes()

    def disk_full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", disk_full)
    with pytest.raises(OSError, match="No space left"):
        training.save_checkpoint(path, model, 6)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]
