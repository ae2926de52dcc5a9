import pytest
import torch

from helpers import models
from helpers.models import GPTConfig, MiniGPT

TINY = GPTConfig(d_model=32, n_layers=2, n_heads=2, seq_len=16)


def tokens(seed=0, batch=3, seq=16):
    return torch.randint(96, (batch, seq), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", models.PRESETS)
def test_parameters_by_formula_and_by_count(name):
    config = models.preset(name).config
    with torch.device("meta"):
        counted = sum(p.numel() for block in [models.Block(config)] for p in block.parameters()) * config.n_layers
    counted += (2 * config.vocab + config.seq_len + 2) * config.d_model
    assert counted == config.n_params()


def test_whole_model_count():
    assert sum(p.numel() for p in MiniGPT(TINY).parameters()) == TINY.n_params()


def test_flops_formula_counts_what_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        MiniGPT(TINY)(tokens(batch=4)).sum().backward()
    # torch's counter takes attention as a full square and, in its backward, recomputes QK^T; ours counts the causal half.
    gemms = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    attention = TINY.n_layers * 2 * TINY.seq_len * TINY.d_model
    assert gemms == pytest.approx(TINY.flops_per_step(4) - 3 * 4 * TINY.seq_len * attention, rel=0.001)


def test_no_leak_across_the_batch_and_none_from_the_future():
    model, x = MiniGPT(TINY), tokens()
    before = model(x)
    other_row = x.clone()
    other_row[0] = (other_row[0] + 7) % 96
    after = model(other_row)
    assert torch.equal(after[1:], before[1:])
    assert not torch.equal(after[0], before[0])
    late = x.clone()
    late[:, 9] = (late[:, 9] + 7) % 96
    change = (model(late) - before).abs().amax((0, 2))
    assert change[:9].max() == 0
    assert change[9:].min() > 0


def test_same_seed_same_model_other_seed_other_model():
    a, b = MiniGPT(TINY), MiniGPT(TINY)
    c = MiniGPT(TINY, generator=torch.Generator().manual_seed(1))
    assert torch.equal(a(tokens()), b(tokens()))
    assert not torch.equal(a(tokens()), c(tokens()))


def test_transplant_makes_logits_equal():
    a, b = MiniGPT(TINY), MiniGPT(TINY, generator=torch.Generator().manual_seed(1))
    models.transplant(a, b)
    assert torch.equal(a(tokens()), b(tokens()))


def test_weights_of_another_model_are_refused_and_nothing_changes():
    model = MiniGPT(TINY)
    before = models.plain_state(model)
    wrong_shape = dict(before, **{"head.weight": torch.zeros(96, 16)})
    missing = {k: v for k, v in before.items() if k != "ln_f.bias"}
    with pytest.raises(ValueError, match=r"head.weight has shape \(96, 16\), this model needs \(96, 32\)"):
        models.load_plain_state(model, wrong_shape | {"emb.weight": torch.zeros(96, 32)})
    with pytest.raises(ValueError, match=r"missing \['ln_f.bias'\]"):
        models.load_plain_state(model, missing)
    assert all(torch.equal(v, before[k]) for k, v in models.plain_state(model).items())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GPTConfig(d_model=100, n_layers=1, n_heads=3, seq_len=16), "d_model=100 does not divide by n_heads=3"),
        (lambda: GPTConfig(d_model=32, n_layers=0, n_heads=2, seq_len=16), "n_layers=0"),
        (lambda: GPTConfig(d_model=32, n_layers=1, n_heads=2, seq_len=16.0), "seq_len=16.0"),
        (lambda: GPTConfig(d_model=24, n_layers=1, n_heads=2, seq_len=20).check_fp8(), "d_model=24, seq_len=20"),
        (lambda: MiniGPT(TINY, backend="jax"), "'jax' is not known; choose 'torch' or 'te'"),
        (lambda: models.preset("medium"), "'medium' is not known; choose one of laptop, compact, scale_up"),
        (lambda: MiniGPT(TINY)(tokens(seq=17)), "17 tokens given; this model takes at most 16"),
    ],
)
def test_bad_input_says_what_is_allowed(build, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        build()


def test_te_backend_without_te_says_why(hardware):
    if hardware.te:
        pytest.skip("Transformer Engine works here")
    with pytest.raises(ValueError, match=r"backend 'te' is not available here: .*Use backend='torch'"):
        MiniGPT(TINY, backend="te")


def test_residual_stream_is_bf16_under_autocast():
    model = MiniGPT(TINY)
    seen = []
    model.blocks[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    model(tokens())
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens())
    assert seen == [torch.float32, torch.bfloat16]
    assert logits.dtype == torch.float32
