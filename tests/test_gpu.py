"""What only a GPU with Transformer Engine can show. Run with `pytest --gpu`."""

import importlib

import pytest
import torch

from helpers import checkpoints, data, fp8_state, generation, models, precision, training

pytestmark = pytest.mark.gpu
TINY = models.GPTConfig(d_model=64, n_layers=2, n_heads=4, seq_len=32)
COMPACT = models.preset("compact")


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def tokens(batch=4, seq=32, seed=0):
    return torch.randint(96, (batch, seq), generator=torch.Generator().manual_seed(seed)).to("cuda")


def batches(config=TINY, batch=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return lambda: data.arithmetic_batch(batch, config.seq_len, generator, "cuda")


def leaks(model, chosen):
    """(across the batch, from the future, whether the past reaches later tokens)."""
    x = tokens()
    row, first, last = x.clone(), x.clone(), x.clone()
    row[0] = (row[0] + 7) % 96
    first[:, 0] = (first[:, 0] + 7) % 96
    last[:, -1] = (last[:, -1] + 7) % 96
    with torch.no_grad(), chosen.autocast():
        base, by_row, by_first, by_last = (model(t) for t in (x, row, first, last))
    across = (by_row[1:] - base[1:]).abs().max().item()
    future = (by_last[:, :-1] - base[:, :-1]).abs().max().item()
    context = (by_first[:, 1:] - base[:, 1:]).abs().amax(-1).min().item()
    return across, future, context


@pytest.mark.parametrize("backend", ["torch", "te"])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_no_leak(hardware, backend, name):
    chosen = precision.choose(name, hardware)
    across, future, context = leaks(models.MiniGPT(TINY, backend, "cuda"), chosen)
    assert (across, future) == (0, 0)
    assert context > 0


def test_the_default_layout_leaks_and_the_test_sees_it(hardware):
    te = importlib.import_module("transformer_engine.pytorch")
    model = models.MiniGPT(TINY, "te", "cuda")
    for i in range(TINY.n_layers):
        model.blocks[i] = te.TransformerLayer(
            64, 256, 4, self_attn_mask_type="causal", hidden_dropout=0.0, attention_dropout=0.0, device="cuda"
        )
    across, _, context = leaks(model, precision.choose("fp32", hardware))
    assert across > 0
    assert context == 0


@pytest.mark.parametrize(("name", "tolerance"), [("fp32", 2e-3), ("bf16", 2e-2)])
def test_transplanted_backends_compute_the_same(hardware, name, tolerance):
    chosen = precision.choose(name, hardware)
    te = models.MiniGPT(COMPACT.config, "te", "cuda")
    plain = models.MiniGPT(COMPACT.config, "torch", "cuda", torch.Generator().manual_seed(5))
    models.transplant(plain, te)
    x = tokens(4, 256)
    with torch.no_grad(), chosen.autocast():
        assert relative(te(x), plain(x)) < tolerance


def test_both_backends_start_alike():
    te, plain = models.MiniGPT(TINY, "te", "cuda"), models.MiniGPT(TINY)
    a, b = models.plain_state(te), models.plain_state(plain)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("name", precision.NAMES)
def test_compact_learns_to_continue_held_out_prompts(hardware, name):
    chosen = precision.choose(name, hardware)
    model = chosen.build(COMPACT.config)
    training.train(model, chosen, batches(COMPACT.config, COMPACT.batch, 3), COMPACT.steps, COMPACT.lr)
    prompts, truth = data.held_out_prompts()
    assert (generation.generate(model, prompts, 24, chosen)[:, 8:] == truth).all(1).sum() >= 63


def test_fp8_is_real_here(hardware):
    chosen = precision.choose("fp8", hardware)
    assert (chosen.kind, chosen.backend) == ("real", "te")
    model = chosen.build(TINY)
    x = tokens()
    bf16 = precision.choose("bf16", hardware)
    with torch.no_grad():
        with bf16.autocast():
            reference = model(x)
        with chosen.autocast():
            quantized = model(x)
    assert 1e-3 < relative(quantized, reference) < 0.2


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_every_recipe_trains(hardware, recipe):
    if hardware.recipes[recipe]:
        pytest.skip(hardware.recipes[recipe])
    chosen = precision.choose("fp8", hardware, recipe=recipe)
    config = models.GPTConfig(d_model=128, n_layers=2, n_heads=4, seq_len=64)
    history = training.train(chosen.build(config), chosen, batches(config, 16), 60, 1e-3)
    assert history["loss"].iloc[-1] < 2


def test_length_nine_stops_fp8_and_padding_mends_it(hardware):
    chosen = precision.choose("fp8", hardware)
    model = chosen.build(TINY)
    with pytest.raises((ValueError, AssertionError, RuntimeError)), torch.no_grad(), chosen.autocast():
        model(tokens(1, 9))
    for length in range(1, 32):
        assert generation.generate(model, tokens(1, length).cpu(), 1, chosen).shape == (1, length + 1)


def test_fp8_state_is_read_and_brought_back(hardware, tmp_path):
    chosen = precision.choose("fp8", hardware)
    model = chosen.build(TINY)
    training.train(model, chosen, batches(), 5, 1e-3)
    table = fp8_state.fp8_state(model)
    assert len(table) == TINY.n_layers * 4 * 3
    assert (table["amax newest"] > 0).all()
    assert (table["amax staged"] == 0).all()
    assert (table["scale"] != 1).all()
    checkpoints.save(tmp_path / "m.safetensors", model, chosen, 5)
    other = chosen.build(TINY, torch.Generator().manual_seed(9))
    checkpoints.load(tmp_path / "m.safetensors", other, chosen)
    before, after = fp8_state.delayed_state(model), fp8_state.delayed_state(other)
    assert all(torch.equal(before[k], after[k]) for k in before)
    x = tokens()
    with torch.no_grad(), chosen.autocast():
        assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("tier", ["cpu", "fp32", "bf16"])
def test_lower_tiers_are_shown(monkeypatch, tier):
    from helpers.hardware import detect

    monkeypatch.setenv("WORKSHOP_TIER", tier)
    hw = detect()
    assert hw.tier == tier
    assert not hw.fp8
    chosen = precision.choose("fp8", hw)
    assert chosen.kind == "emulated"
    history = training.train(
        chosen.build(TINY),
        chosen,
        lambda: data.arithmetic_batch(8, 32, torch.Generator().manual_seed(1), hw.device),
        3,
        1e-3,
    )
    assert history["loss"].notna().all()
