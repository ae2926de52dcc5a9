"""Generation with Transformer Engine's layers, its KV cache and CUDA graphs. Run with `pytest --gpu`."""

import re

import pytest
import torch

from benchmarks.worker import CATEGORIES
from helpers import data, fp8_state, generation, models, precision, training

pytestmark = pytest.mark.gpu
TINY = models.GPTConfig(d_model=64, n_layers=2, n_heads=4, seq_len=64)
COMPACT = models.preset("compact")
FP8_GEMM = dict(CATEGORIES)["FP8 GEMM"]


@pytest.fixture(scope="module")
def trained(hardware):
    """The compact model trained in FP8: it continues the held-out prompts."""
    chosen = precision.choose("fp8", hardware)
    model, generator = chosen.build(COMPACT.config), torch.Generator().manual_seed(3)
    training.train(
        model,
        chosen,
        lambda: data.arithmetic_batch(COMPACT.batch, COMPACT.config.seq_len, generator, "cuda"),
        COMPACT.steps,
        COMPACT.lr,
    )
    return model


def variant(trained, hardware, backend, name):
    """The trained weights in another backend and precision."""
    if name == "fp8":
        return trained, precision.choose("fp8", hardware)
    model = models.MiniGPT(COMPACT.config, backend, "cuda")
    models.transplant(trained, model)
    return model, precision.Precision(name, "real", backend, "cuda")


@pytest.mark.parametrize(
    ("backend", "name"), [("te", "fp8"), ("te", "bf16"), ("te", "fp32"), ("torch", "bf16"), ("torch", "fp32")]
)
def test_all_held_out_prompts_in_every_way(trained, hardware, backend, name):
    model, chosen = variant(trained, hardware, backend, name)
    prompts, truth = data.held_out_prompts()
    tokens = prompts.to("cuda")  # full recomputation; 64 rows, so FP8 takes every length
    for _ in range(24):
        with torch.no_grad(), chosen.autocast():
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    tokens = tokens.cpu()
    assert (tokens[:, 8:] == truth).all(1).sum() >= 63
    ways = [(strategy, False) for strategy in generation.STRATEGIES]
    if name != "fp32" or backend == "torch":  # in FP32 TE's attention is not made for graphs
        ways += [("fixed", True), ("cached", True)]
    for strategy, graph in ways:
        generated = generation.generate(model, prompts, 24, chosen, strategy, graph=graph)
        assert torch.equal(generated, tokens), (strategy, graph)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("strategy", ["fixed", "cached"])
def test_fp8_takes_every_length_and_batch(trained, hardware, strategy, graph):
    chosen = precision.choose("fp8", hardware)
    _, held_out = data.split_pairs()
    sequences = data.sequences(held_out, COMPACT.config.seq_len)
    for batch, lengths in ((1, (1, 2, 8, 9, 100, 255)), (3, (1, 9, 255)), (64, (1, 9, 255))):
        for length in lengths:
            generated = generation.generate(trained, sequences[:batch, :length], 1, chosen, strategy, graph=graph)
            assert generated.shape == (batch, length + 1)
            assert length < 8 or torch.equal(generated, sequences[:batch, : length + 1]), (batch, length)


@pytest.mark.parametrize("backend", ["te", "torch"])
@pytest.mark.parametrize("graph", [False, True])
def test_rows_of_any_lengths_stop_or_slide(trained, hardware, backend, graph):
    model, bf16 = variant(trained, hardware, backend, "bf16")
    _, held_out = data.split_pairs()
    prompts = [row[:length] for row, length in zip(data.sequences(held_out, 256), (8, 250, 256, 100), strict=False)]
    for at_limit in ("stop", "slide"):
        expected = generation.generate(model, prompts, 20, bf16, "fixed", at_limit)
        found = generation.generate(model, prompts, 20, bf16, "cached", at_limit, graph=graph)
        assert [len(row) for row in found] == ([28, 256, 256, 120] if at_limit == "stop" else [28, 270, 276, 120])
        assert [row.tolist() for row in found] == [row.tolist() for row in expected]


def test_training_does_not_notice_generation(hardware):
    fp8 = precision.choose("fp8", hardware)
    losses = []
    for between in (False, True):
        model, generator = fp8.build(TINY), torch.Generator().manual_seed(1)
        optimizer = training.make_optimizer(model, 1e-3)
        losses.append([])
        for _ in range(10):
            loss = training.loss_of(model, *data.arithmetic_batch(8, 64, generator, "cuda"), fp8)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
            before = {k: v.clone() for k, v in fp8_state.delayed_state(model).items()}
            if between:
                for strategy, graph in (("fixed", False), ("cached", False), ("fixed", True), ("cached", True)):
                    generation.generate(model, torch.full((3, 5), 95), 4, fp8, strategy, graph=graph)
            assert model.training
            assert before
            assert all(torch.equal(v, before[k]) for k, v in fp8_state.delayed_state(model).items())
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-3


def test_generation_before_the_first_training_step_leaves_an_empty_state(hardware):
    fp8 = precision.choose("fp8", hardware)
    model = fp8.build(TINY)
    generation.generate(model, torch.full((3, 5), 95), 4, fp8, "cached")
    state = fp8_state.delayed_state(model)
    assert state
    assert all((v == (1 if k.endswith("scale") else 0)).all() for k, v in state.items())


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("strategy", ["fixed", "cached"])
def test_every_fp8_step_multiplies_in_fp8(trained, hardware, strategy, graph):
    """4 matrix products a block, each in FP8; the same step in BF16 has none."""

    def fp8_gemms(model, chosen):
        counts = []
        with generation.decoding(model, list(data.held_out_prompts()[0][:3]), chosen, strategy, graph=graph) as step:
            step()
            for _ in range(3):
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                    step()
                    torch.cuda.synchronize()
                names = [event.name.lower() for event in profiler.events()]
                assert names, "the profiler saw no kernel"
                counts.append(sum(bool(re.search(FP8_GEMM, name)) for name in names))
        return counts

    assert min(fp8_gemms(trained, precision.choose("fp8", hardware))) >= 4 * COMPACT.config.n_layers
    assert max(fp8_gemms(trained, precision.choose("bf16", hardware))) == 0


def test_a_growing_context_is_no_graph(trained, hardware):
    bf16 = precision.choose("bf16", hardware)
    with pytest.raises(ValueError, match="a CUDA graph needs a GPU, and one shape for all steps"):
        generation.generate(trained, torch.zeros(1, 8, dtype=torch.int64), 1, bf16, "growing", graph=True)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fixed", "cached"])
def test_a_compiled_graph_gives_the_same_tokens(trained, hardware, strategy):
    model, bf16 = variant(trained, hardware, "torch", "bf16")
    prompts, _ = data.held_out_prompts()
    expected = generation.generate(model, prompts, 24, bf16, strategy)
    with generation.decoding(model, list(prompts), bf16, strategy, graph=True, compiled=True) as step:
        new = torch.stack([step().clone() for _ in range(24)], 1).cpu()
    assert torch.equal(new, expected[:, 8:])
