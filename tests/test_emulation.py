"""The emulator's parts: recipes, state, quantizers, the layer, the twin. Parity with TE: test_emulation_traces.py."""

import copy
import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers import emulation
from helpers.emulation import (
    DelayedScaling,
    EmulatedLayerNorm,
    EmulatedLinear,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScalingState,
    autocast,
    emulate,
    unscaled,
)
from helpers.emulation_blocks import (
    quantize_fp8_blocks,
    quantize_mxfp8,
    quantize_nvfp4,
    random_hadamard_transform,
    scale_from_amax,
    stochastic_round,
)
from helpers.formats import E2M1, E4M3, E5M2, quantize, values
from helpers.models import PRESETS, MiniGPT

RECIPES = [
    DelayedScaling(amax_history_len=4),
    DelayedScaling(fp8_format=Format.E4M3, amax_history_len=4, margin=1),
    Float8CurrentScaling(),
    Float8CurrentScaling(use_power_2_scales=True),
    Float8BlockScaling(),
    Float8BlockScaling(fp8_format=Format.HYBRID, use_f32_scales=True),
    Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    MXFP8BlockScaling(),
    MXFP8BlockScaling(fp8_format=Format.HYBRID),
    NVFP4BlockScaling(),
    NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
]


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def make_layer(in_features=128, out_features=128, seed=0, **kwargs):
    layer = EmulatedLinear(in_features, out_features, **kwargs)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=rng(seed)) / in_features**0.5)
        if layer.bias is not None:
            layer.bias.copy_(torch.randn(out_features, generator=rng(seed + 1)))
    return layer


def step(layer, recipe, x, dy=None):
    """One training step of one layer under BF16 autocast: (y, dx)."""
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), autocast(recipe=recipe, generator=rng()):
        y = layer(x)
    y.backward(torch.ones_like(y) if dy is None else dy)
    return y.detach(), x.grad


def snapshot(layer):
    return {
        (key, name): getattr(state, name).clone()
        for key, state in layer.fp8_meta.items()
        for name in ("scale", "amax_history")
    }


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# --- Recipes ---


def test_defaults_are_those_of_te():
    assert vars(DelayedScaling()) == {
        "fp8_format": Format.HYBRID,
        "margin": 0,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
    }
    assert Float8CurrentScaling().fp8_format is Format.HYBRID
    assert not Float8CurrentScaling().use_power_2_scales
    block = Float8BlockScaling()
    assert (block.x_block_scaling_dim, block.w_block_scaling_dim, block.grad_block_scaling_dim) == (1, 2, 1)
    assert block.fp8_format is MXFP8BlockScaling().fp8_format is NVFP4BlockScaling().fp8_format is Format.E4M3
    assert not block.use_f32_scales
    assert not NVFP4BlockScaling().disable_rht


@pytest.mark.parametrize(
    "recipe", [DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling]
)
def test_pure_e5m2_is_refused(recipe):
    with pytest.raises(ValueError, match=r"Pure E5M2 training is not supported.*HYBRID"):
        recipe(fp8_format=Format.E5M2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DelayedScaling(amax_compute_algo="mean"), "'mean'; use 'max', 'most_recent'"),
        (lambda: DelayedScaling(amax_history_len=0), "amax_history_len=0"),
        (lambda: Float8BlockScaling(x_block_scaling_dim=3), r"\(3, 2, 1\); each is 1 or 2"),
        (lambda: Float8BlockScaling(x_block_scaling_dim=2), r"no GEMM takes two operands in 2-D blocks"),
        (lambda: autocast(recipe="delayed"), "got a recipe of type str"),
        (lambda: autocast(recipe=NVFP4BlockScaling()), r"autocast\(generator=torch.Generator"),
    ],
)
def test_bad_recipes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_recipes_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DelayedScaling().margin = 1


# --- Delayed scaling's state ---


def updated(history, scale=1.0, fp8_max=448.0, **fields) -> ScalingState:
    state = ScalingState(1, len(history), torch.device("cpu"))
    state.amax_history[:, 0] = torch.tensor(history)
    state.scale.fill_(scale)
    state.update(DelayedScaling(amax_history_len=len(history), **fields), fp8_max)
    return state


def test_update_by_hand():
    state = updated([2.0, 7.0, 1.0, 4.0])
    assert state.amax_history[:, 0].tolist() == [0, 1, 4, 2]  # the staged 2 is the newest now, 7 went at the other end
    assert state.scale.item() == 64.0  # 448 / 7: of the history as it was before the shift
    assert updated([2.0, 7.0, 1.0, 4.0], amax_compute_algo="most_recent").scale.item() == 224.0
    assert updated([2.0, 7.0, 1.0, 4.0], margin=3).scale.item() == 8.0
    assert updated([7.0]).amax_history.tolist() == [[0.0]]
    assert updated([2.0, 7.0], amax_compute_algo=lambda history: history.mean(0)).scale.item() == pytest.approx(
        448 / 4.5
    )
    assert updated([2.0, 7.0], scaling_factor_compute_algo=unscaled).scale.item() == 1.0


@pytest.mark.parametrize("fp8_max", [448.0, 57344.0])
def test_the_scale_is_one_correctly_rounded_division(fp8_max):
    amax = torch.rand(4000, generator=rng()) * 10 + 1e-3
    exact = (fp8_max / amax.double()).float()  # float64 has enough digits that rounding twice does no harm
    state = ScalingState(len(amax), 2, torch.device("cpu"))
    state.amax_history[0] = amax
    state.update(DelayedScaling(amax_history_len=2), fp8_max)
    assert torch.equal(state.scale, exact)
    assert torch.equal(scale_from_amax(amax, fp8_max, power_of_two=False), exact)
    assert not torch.equal(fp8_max / amax, exact)  # what torch makes of number / tensor


@pytest.mark.parametrize("history", [[0.0, 0.0], [math.inf, 1.0]])
def test_scale_stays_where_amax_says_nothing(history):
    assert updated(history, scale=5.0).scale.item() == 5.0


def test_scale_of_a_tiny_amax_is_finite():
    assert updated([1e-40, 0.0]).scale.item() == torch.finfo(torch.float32).max


def test_state_is_laid_out_as_in_te():
    layer = make_layer()
    assert layer.fp8_meta == {}
    step(layer, DelayedScaling(amax_history_len=8), torch.randn(16, 128))
    assert layer.fp8_meta["scaling_fwd"].scale.shape == (3,)
    assert layer.fp8_meta["scaling_fwd"].amax_history.shape == (8, 3)
    assert layer.fp8_meta["scaling_bwd"].scale.shape == (2,)
    assert layer.fp8_meta["scaling_bwd"].amax_history.shape == (8, 2)
    assert layer.fp8_meta["scaling_fwd"].scale[2] == layer.fp8_meta["scaling_bwd"].scale[1] == 1  # unused


def test_when_scales_are_updated():
    layer, recipe = make_layer(), DelayedScaling(amax_history_len=4)
    x = torch.randn(16, 128, generator=rng()).requires_grad_()
    with autocast(), autocast(recipe=recipe):
        y = layer(x)
        forward, backward = layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]
        assert forward.amax_history[0, 0] == x.abs().max()  # staged
    assert forward.scale[0] == 448 / x.abs().max()  # at the outermost exit
    assert forward.amax_history[-1, 0] == x.abs().max()
    assert forward.amax_history[0, 0] == 0
    assert backward.scale[0] == 1
    y.backward(torch.full_like(y, 0.5))
    assert backward.scale[0] == 57344 / 0.5
    assert backward.amax_history[-1, 0] == 0.5


def test_inner_region_does_not_update():
    layer = make_layer()
    with autocast():
        with autocast(recipe=DelayedScaling(amax_history_len=4)):
            layer(torch.randn(16, 128))
        assert layer.fp8_meta["scaling_fwd"].scale[0] == 1
    assert layer.fp8_meta["scaling_fwd"].scale[0] != 1


def test_evaluation_leaves_the_state_alone():
    layer, recipe = make_layer(), DelayedScaling(amax_history_len=4)
    step(layer, recipe, torch.randn(16, 128, generator=rng()))
    before = snapshot(layer)
    with torch.no_grad(), autocast(recipe=recipe):
        layer(torch.randn(16, 128) * 1000)
    assert equal(snapshot(layer), before)
    layer.eval()  # which alone changes nothing, as in TE
    with autocast(recipe=recipe):
        layer(torch.randn(16, 128) * 1000)
    assert not equal(snapshot(layer), before)


def test_history_follows_the_recipes_length():
    layer = make_layer()
    for length in (4, 6, 2):
        step(layer, DelayedScaling(amax_history_len=length), torch.randn(16, 128))
        assert layer.fp8_meta["scaling_fwd"].amax_history.shape == (length, 3)


def test_unscaled_training_keeps_scale_1():
    layer, recipe = make_layer(), DelayedScaling(amax_history_len=4, scaling_factor_compute_algo=unscaled)
    _, dx = step(layer, recipe, torch.randn(16, 128), torch.full((16, 128), 1e-7, dtype=torch.bfloat16))
    assert all((state.scale == 1).all() for state in layer.fp8_meta.values())
    assert (dx == 0).all()  # 1e-7 is below half of E5M2's smallest number


# --- The layer ---


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_is_close_to_a_linear(recipe, dtype):
    layer, x, dy = (
        make_layer(128, 256, dtype=dtype),
        torch.randn(2, 64, 128, generator=rng(1)),
        torch.randn(2, 64, 256, generator=rng(2)) * 1e-3,
    )
    x, dy = x.to(torch.bfloat16), dy.to(torch.bfloat16)
    step(layer, recipe, x, dy)  # delayed scaling finds its scales
    layer.zero_grad()
    y, dx = step(layer, recipe, x, dy)
    assert y.dtype == dx.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == dtype
    w, x2, dy2 = layer.weight.double(), x.double().flatten(0, 1), dy.double().flatten(0, 1)
    bound = 0.25 if isinstance(recipe, NVFP4BlockScaling) else 0.07
    for found, exact in (
        (y, x.double() @ w.t() + layer.bias.double()),
        (dx, dy.double() @ w),
        (layer.weight.grad, dy2.t() @ x2),
    ):
        assert found.shape == exact.shape
        error = (found.double() - exact).norm() / exact.norm()
        assert 0.002 < error < bound  # neither exact nor far off
    assert torch.allclose(layer.bias.grad.double(), dy2.sum(0), rtol=1e-2, atol=1e-5)  # of the unquantized gradient


def test_outside_of_a_region_it_is_a_linear():
    layer, x = make_layer(in_features=20, out_features=7), torch.randn(3, 20)  # any shape will do
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), expected)
    with autocast(enabled=False):
        assert torch.equal(layer(x), expected)
    with autocast(recipe=Float8CurrentScaling()), autocast(enabled=False):
        assert torch.equal(layer(x), expected)
    assert layer.fp8_meta == {}


def test_default_recipe_is_delayed_scaling():
    layer = make_layer()
    with autocast():
        layer(torch.randn(16, 128))
    assert layer.fp8_meta["scaling_fwd"].amax_history.shape == (1024, 3)


def test_output_dtype():
    layer, recipe = make_layer(dtype=torch.bfloat16), Float8CurrentScaling()
    with autocast(recipe=recipe):
        assert layer(torch.randn(16, 128, dtype=torch.bfloat16)).dtype == torch.bfloat16
        assert make_layer()(torch.randn(16, 128)).dtype == torch.float32  # no torch.autocast: the input's
        with torch.autocast("cpu", torch.bfloat16):
            assert make_layer(bias=False)(torch.randn(16, 128)).dtype == torch.bfloat16


def test_results_are_rounded_once():
    """BF16 of the float32 sum: not of a sum that was BF16 before the scale or the bias came in."""
    layer, x = make_layer(), torch.randn(64, 128, generator=rng(3)).bfloat16()
    y, _ = step(layer, Float8CurrentScaling(), x)
    sx, sw = (torch.tensor(448.0) / t.detach().abs().max().float() for t in (x, layer.weight))
    xq, wq = (
        quantize(x.float() * sx, E4M3).double() / sx.double(),
        quantize(layer.weight.detach() * sw, E4M3).double() / sw.double(),
    )
    exact = (xq @ wq.t() + layer.bias.detach().bfloat16().double()).float().bfloat16()
    assert (y == exact).double().mean() > 0.999


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_gradients_only_where_wanted(recipe):
    layer = make_layer()
    layer.weight.requires_grad_(False)
    _, dx = step(layer, recipe, torch.randn(128, 128))
    assert layer.weight.grad is None
    assert dx.abs().sum() > 0
    layer = make_layer()
    with autocast(recipe=recipe, generator=rng()):
        layer(torch.randn(128, 128)).sum().backward()
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_nan_goes_through_and_is_counted(recipe):
    layer, x, dy = make_layer(), torch.randn(128, 128, generator=rng()), torch.randn(128, 128, generator=rng(1))
    x[3, 5], dy[7, 9] = math.nan, math.nan
    y, dx = step(layer, recipe, x, dy)
    assert y[3].isnan().all()
    assert dx[7].isnan().all()
    assert layer.weight.grad[:, 5].isnan().all()
    assert layer.weight.grad[9].isnan().all()
    assert layer.nan_count.tolist() == [1, 0, 1]
    # In the rows of other blocks everything is as if the NaN were a zero: it does not reach an amax.
    clean = make_layer()
    y_clean, dx_clean = step(clean, recipe, x.nan_to_num(0), dy.nan_to_num(0))
    assert torch.equal(y[64:], y_clean[64:])
    if not isinstance(recipe, NVFP4BlockScaling):  # whose generator draws for every element alike, but rounds x anew
        assert torch.equal(dx[64:], dx_clean[64:])
    for key, state in layer.fp8_meta.items():
        assert torch.equal(state.amax_history, clean.fp8_meta[key].amax_history)


def test_inf_saturates_and_leaves_the_scale():
    layer, recipe = make_layer(bias=False), DelayedScaling(amax_history_len=2)
    x = torch.randn(16, 128, generator=rng())
    step(layer, recipe, x)
    scale = layer.fp8_meta["scaling_fwd"].scale[0].clone()
    x[0, 0] = math.inf
    y, _ = step(layer, recipe, x)
    assert y.isfinite().all()
    assert layer.fp8_meta["scaling_fwd"].amax_history[-1, 0] == math.inf
    assert layer.fp8_meta["scaling_fwd"].scale[0] == scale


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int8])
def test_other_dtypes_are_refused(dtype):
    with autocast(), pytest.raises(ValueError, match=f"{dtype}.*allowed are float32"):
        make_layer()(torch.ones(16, 128, dtype=dtype))


@pytest.mark.parametrize(
    ("recipe", "weight", "x", "message"),
    [
        (DelayedScaling(), (128, 100), (16, 100), r"DelayedScaling needs .* input has shape \(16, 100\)"),
        (DelayedScaling(), (100, 128), (16, 128), r"weight has shape \(100, 128\)"),
        (DelayedScaling(), (128, 128), (3, 3, 128), r"a multiple of 16 .* input has shape \(3, 3, 128\) \(product 9"),
        (DelayedScaling(), (128, 128), (8, 128), r"shape \(8, 128\)"),  # forward would do, the weight gradient not
        (DelayedScaling(), (128, 128), (0, 128), r"shape \(0, 128\)"),
        (DelayedScaling(), (128, 128), (16, 64), "64 features .* the layer takes 128"),
        (MXFP8BlockScaling(), (128, 48), (32, 48), r"multiple of 32.*shape \(32, 48\)"),
        (MXFP8BlockScaling(), (128, 64), (16, 64), r"multiple of 32.*shape \(16, 64\)"),
        (Float8BlockScaling(), (128, 192), (128, 192), r"multiple of 128.*shape \(128, 192\)"),
        (Float8BlockScaling(), (128, 128), (64, 128), r"multiple of 128.*shape \(64, 128\)"),
    ],
)
def test_shapes_that_a_recipe_cannot_take(recipe, weight, x, message):
    layer = make_layer(weight[1], weight[0])
    with autocast(recipe=recipe), pytest.raises(ValueError, match=message):
        layer(torch.ones(x))


def test_inference_takes_8_tokens():
    with torch.no_grad(), autocast():
        assert make_layer()(torch.randn(8, 128)).shape == (8, 128)
        with pytest.raises(ValueError, match=r"multiple of 8 .* \(9, 128\)"):
            make_layer()(torch.randn(9, 128))
    with (
        torch.no_grad(),
        autocast(recipe=MXFP8BlockScaling()),
        pytest.raises(ValueError, match=r"multiple of 32 .* \(8, 128\)"),
    ):
        make_layer()(torch.randn(8, 128))


def test_a_failing_layer_does_not_leave_the_region_open():
    with pytest.raises(ValueError, match="multiple"), autocast():
        make_layer()(torch.ones(3, 128))
    assert emulation.active_region() is None


# --- The twin ---


@pytest.fixture(scope="module")
def model():
    return MiniGPT(PRESETS["laptop"].config)


def test_twin_has_the_same_weights_and_names(model):
    twin = emulate(model)
    assert equal(model.state_dict(), twin.state_dict())
    assert not any(isinstance(m, EmulatedLinear) for m in model.modules())
    assert all(a is not b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    for name in ("qkv", "proj", "fc1", "fc2"):
        assert type(getattr(twin.blocks[1], name)) is EmulatedLinear
    assert type(twin.blocks[1].ln1) is type(twin.blocks[1].ln2) is EmulatedLayerNorm
    assert type(twin.head) is nn.Linear
    assert type(twin.ln_f) is nn.LayerNorm  # feeds the head, not a quantizer
    assert [name for name, m in twin.named_modules() if getattr(m, "before_gelu", False)] == [
        "blocks.0.fc1",
        "blocks.1.fc1",
    ]


def test_twin_computes_the_same_outside_of_a_region(model):
    tokens = torch.randint(96, (2, 64), generator=rng())
    assert torch.equal(emulate(model)(tokens), model(tokens))


def test_twin_follows_to_another_device_and_copy(model):
    twin, recipe = emulate(model), DelayedScaling(amax_history_len=4)
    tokens = torch.randint(96, (2, 64), generator=rng())
    with torch.autocast("cpu", torch.bfloat16), autocast(recipe=recipe):
        twin(tokens).sum().backward()
    layer = twin.blocks[0].qkv
    before = snapshot(layer)
    other = copy.deepcopy(twin).blocks[0].qkv
    assert equal(snapshot(other), before)
    assert other.fp8_meta["scaling_fwd"] is not layer.fp8_meta["scaling_fwd"]
    twin.to(torch.bfloat16)
    assert equal(snapshot(layer), before)  # the state stays float32
    twin.to("meta")
    assert layer.fp8_meta["scaling_bwd"].scale.is_meta


def test_layer_norm_hands_on_float32():
    norm = EmulatedLayerNorm(64)
    x = torch.randn(4, 64, generator=rng()).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(1 + torch.rand(64, generator=rng()) * 1e-3)
    with torch.autocast("cpu", torch.bfloat16), autocast():
        y = norm(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, nn.functional.layer_norm(x.float(), (64,)))  # in BF16 this gamma is 1
    assert torch.equal(
        EmulatedLayerNorm(64, elementwise_affine=False)(x.float()), nn.functional.layer_norm(x.float(), (64,))
    )


def test_before_gelu_is_for_delayed_scaling():
    layer = make_layer(before_gelu=True)
    with torch.autocast("cpu", torch.bfloat16):
        with autocast(recipe=DelayedScaling()):
            y = layer(torch.randn(16, 128))
        assert y.dtype == torch.float32
        assert torch.equal(y, y.bfloat16().float())
        with autocast(recipe=Float8CurrentScaling()):
            assert layer(torch.randn(16, 128)).dtype == torch.bfloat16
    y.backward(torch.full_like(y, 1 + 2.0**-20))  # what BF16 would round
    assert layer.fp8_meta["scaling_bwd"].amax_history[-1, 0] == 1 + 2.0**-20


def test_nothing_to_emulate():
    with pytest.raises(ValueError, match=r"Sequential has no nn.Linear outside of skip=\('head',\)"):
        emulate(nn.Sequential(nn.LayerNorm(4)))


# --- Blocks ---

BLOCK_QUANTIZERS = {
    "fp8 1x128": lambda x: quantize_fp8_blocks(x, E4M3, (1, 128)),
    "fp8 128x128": lambda x: quantize_fp8_blocks(x, E5M2, (128, 128)),
    "mxfp8": quantize_mxfp8,
    "mxfp8 E5M2": lambda x: quantize_mxfp8(x, E5M2),
    "nvfp4 1x16": quantize_nvfp4,
    "nvfp4 16x16": lambda x: quantize_nvfp4(x, (16, 16)),
}


def dequantized(blocks):
    product, tensor_scale = blocks.scaled()
    return product * tensor_scale


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(BLOCK_QUANTIZERS)),
    exponent=st.integers(-12, 12),
    spread=st.integers(0, 3),
    special=st.sampled_from([0.0, math.inf, math.nan]),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_block_quantizer_properties(name, exponent, spread, special, seed, dtype):
    quantizer = BLOCK_QUANTIZERS[name]
    element = E2M1 if "nvfp4" in name else E5M2 if name in ("fp8 128x128", "mxfp8 E5M2") else E4M3
    generator = rng(seed)
    x = (
        torch.randn(128, 256, generator=generator)
        * 10.0**exponent
        * 10.0 ** (spread * torch.randn(128, 256, generator=generator))
    )
    x = x.clamp(-1e37, 1e37)
    x[seed % 128, seed % 256] = special
    x = x.to(dtype)
    blocks = quantizer(x)
    number = ~x.isnan()
    assert torch.equal(blocks.values.isnan(), x.isnan())
    assert torch.isin(blocks.values[number], values(element)).all()
    assert (blocks.block_scale >= 0).all()
    assert blocks.block_scale.isfinite().all()
    negative = quantizer(-x)
    assert torch.equal(negative.block_scale, blocks.block_scale)
    assert torch.equal(negative.values[number], -blocks.values[number])  # odd
    if special == 0:
        again = dequantized(blocks)
        if "nvfp4" not in name:  # NVFP4's scales are not powers of two: they round
            assert torch.equal(dequantized(quantizer(again)), again)  # idempotent
        assert (again.abs() <= x.float().abs() * 2).all()


@pytest.mark.parametrize(
    ("recipe", "shrink"),
    # E4M3 spans 2^17, E2M1 only 2^4: what shares a block with something so much larger is flushed to zero
    [(Float8BlockScaling(w_block_scaling_dim=1), 2.0**-20), (MXFP8BlockScaling(), 2.0**-20), (NVFP4BlockScaling(disable_rht=True), 2.0**-8)],
    ids=["block", "mxfp8", "nvfp4"],
)  # fmt: skip
def test_blocks_lie_along_the_dimension_that_is_summed_over(recipe, shrink):
    """Small tokens keep their digits beside large ones in forward and dgrad, small features in the weight gradient."""
    small, layer = slice(1, None, 2), make_layer(bias=False)
    weight = layer.weight.detach().double()

    def error(found, exact):
        return ((found.double() - exact).norm() / exact.norm()).item()

    def data():
        return torch.randn(128, 128, generator=rng()), torch.randn(128, 128, generator=rng(1))

    x, dy = data()
    x[small] *= shrink
    dy[small] *= shrink
    y, dx = step(layer, recipe, x, dy)
    assert error(y[small], x[small].double() @ weight.t()) < 0.3
    assert error(dx[small], dy[small].double() @ weight) < 0.3
    layer.zero_grad()
    x, dy = data()
    x[:, small] *= shrink
    dy[:, small] *= shrink
    step(layer, recipe, x, dy)
    assert error(layer.weight.grad[small, small], dy[:, small].double().t() @ x[:, small].double()) < 0.3


@pytest.mark.parametrize("name", BLOCK_QUANTIZERS)
def test_an_outlier_costs_only_its_block(name):
    x = torch.randn(256, 256, generator=rng())
    outlier = x.clone()
    outlier[0, 0] = 1e4
    far = slice(128, None)
    a, b = dequantized(BLOCK_QUANTIZERS[name](x)), dequantized(BLOCK_QUANTIZERS[name](outlier))
    if "nvfp4" in name:  # the tensor's scale moves with the outlier, so that block scales round a little differently
        assert (a[far] - b[far]).norm() / a[far].norm() < 0.15
    else:
        assert torch.equal(a[far, far], b[far, far])


@pytest.mark.parametrize(
    "quantizer",
    [lambda x: quantize_fp8_blocks(x, E4M3, (128, 128)), quantize_mxfp8, quantize_nvfp4, random_hadamard_transform],
)
def test_blocks_that_do_not_divide(quantizer):
    with pytest.raises(ValueError, match=r"do not divide a matrix of shape \(130, 72\)"):
        quantizer(torch.ones(130, 72))


def test_zeros_stay_zeros():
    for quantizer in BLOCK_QUANTIZERS.values():
        assert (dequantized(quantizer(torch.zeros(128, 128))) == 0).all()


def test_hadamard_transform_is_orthogonal_and_spreads():
    a, b = torch.randn(8, 64, generator=rng()), torch.randn(5, 64, generator=rng(1))
    product = random_hadamard_transform(a) @ random_hadamard_transform(b).t()
    assert torch.allclose(product, a @ b.t(), atol=1e-5)
    one = torch.zeros(1, 16)
    one[0, 3] = 4.0
    assert torch.equal(random_hadamard_transform(one).abs(), torch.ones(1, 16))


def test_stochastic_rounding_is_right_on_average():
    x = torch.tensor([0.1, 0.6, -1.2, 1.9, 2.3, -3.3, 5.5]).repeat(20000, 1)
    rounded = stochastic_round(x, E2M1, rng())
    assert torch.isin(rounded, values(E2M1)).all()
    assert torch.allclose(rounded.mean(0), x[0], atol=0.03)
    assert torch.equal(rounded, stochastic_round(x, E2M1, rng()))  # the generator decides
    assert not torch.equal(rounded, stochastic_round(x, E2M1, rng(1)))
    exact = values(E2M1)
    assert torch.equal(stochastic_round(exact, E2M1, rng()), exact)
    assert stochastic_round(torch.tensor([9.0, -math.inf]), E2M1, rng()).tolist() == [6.0, -6.0]
