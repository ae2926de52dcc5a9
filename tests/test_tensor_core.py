"""The accumulator model against what te.Linear computed on an H200: every bit of it."""

import pytest
import torch
from safetensors.torch import load_file

from helpers import emulation, formats, tensor_core
from helpers.emulation_blocks import quantize_fp8_blocks


@pytest.fixture(scope="module")
def recorded(traces):
    return load_file(traces / "linear.safetensors")


def share_identical(product, scale, bias, reference):
    return ((product * scale + bias).to(reference.dtype) == reference).double().mean().item()


def per_tensor_gemms(recorded, run, step, gradient_format):
    """The three GEMMs of a step under delayed scaling: (what matmul takes, scale, bias, recorded result)."""
    key = f"linear.{run}.bf16"
    x, dy, y, dx, dw = (recorded[f"{key}.step{step}.{name}"] for name in ("x", "dy", "y", "dx", "dw"))
    forward, backward = (recorded[f"{key}.step{step - 1}.scaling_{d}.scale"] for d in ("fwd", "bwd"))
    qx = formats.quantize(x.float() * forward[0], formats.E4M3)
    qw = formats.quantize(recorded[f"{key}.weight"].float() * forward[1], formats.E4M3)
    qdy = formats.quantize(dy.float() * backward[0], gradient_format)
    bias = recorded[f"{key}.bias"].float()
    lowest = -6 if gradient_format is formats.E4M3 else -14
    yield (qx, qw.t(), False, -6, -6), 1 / forward[0] * (1 / forward[1]), bias, y
    yield (qdy, qw, True, lowest, -6), 1 / backward[0] * (1 / forward[1]), 0.0, dx
    yield (qdy.t(), qx, True, lowest, -6), 1 / backward[0] * (1 / forward[0]), 0.0, dw


@pytest.mark.parametrize(
    ("run", "gradient_format"),
    [
        ("delayed_hybrid_h4_max", formats.E5M2),
        ("delayed_hybrid_h16_margin1", formats.E5M2),
        ("delayed_e4m3_h16_max", formats.E4M3),
    ],
)
def test_every_bit_of_delayed_scalings_gemms(recorded, run, gradient_format):
    plain = []
    for step in (1, 3, 6):  # step 6 of the first run has a sum that subnormal numbers decide
        for operands, scale, bias, reference in per_tensor_gemms(recorded, run, step, gradient_format):
            assert share_identical(tensor_core.matmul(*operands), scale, bias, reference) == 1
            plain.append(share_identical(operands[0] @ operands[1], scale, bias, reference))
    assert min(plain) < 0.99, "adding in FP32 should not give every bit: the comparison would prove nothing"


def test_every_bit_of_block_scalings_gemms(recorded):
    def quantized(x, block):
        values, scale = quantize_fp8_blocks(x.float(), formats.E4M3, block, True).scaled()
        return values * scale

    for step in (0, 3, 6):
        key = "linear.block_e4m3.bf16"
        x, dy, y, dx, dw = (recorded[f"{key}.step{step}.{name}"] for name in ("x", "dy", "y", "dx", "dw"))
        weight = quantized(recorded[f"{key}.weight"], (128, 128))
        bias = recorded[f"{key}.bias"].float()
        assert share_identical(tensor_core.matmul(quantized(x, (1, 128)), weight.t(), True), 1, bias, y) == 1
        assert share_identical(tensor_core.matmul(quantized(dy, (1, 128)), weight, True), 1, 0.0, dx) == 1
        assert (
            share_identical(tensor_core.matmul(quantized(dy, (128, 1)).t(), quantized(x, (128, 1)), True), 1, 0.0, dw)
            == 1
        )


def test_fast_accumulation_loses_more_than_split_the_longer_the_sum():
    generator = torch.Generator().manual_seed(0)
    errors = {}
    for k in (128, 4096):
        a, b = (formats.quantize(torch.rand(shape, generator=generator), formats.E4M3) for shape in ((8, k), (k, 8)))
        exact = a.double() @ b.double()
        for split in (False, True):
            errors[k, split] = ((tensor_core.matmul(a, b, split) - exact).norm() / exact.norm()).item()
    assert errors[4096, False] > 5 * errors[4096, True]
    assert errors[4096, False] > errors[128, False]


def test_small_integers_are_added_exactly():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, shape, generator=generator).float() for shape in ((4, 96), (96, 4)))
    assert torch.equal(tensor_core.matmul(a, b, False), a @ b)


@pytest.mark.parametrize(
    ("run", "recipe"),
    [
        ("delayed_hybrid_h4_recent", emulation.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")),
        ("current_hybrid", emulation.Float8CurrentScaling()),
        ("block_e4m3", emulation.Float8BlockScaling()),
    ],
)
def test_the_emulated_layer_gives_every_bit(recorded, run, recipe):
    """A whole layer, replayed from an empty state: what is left of the distance to the H200 is nothing."""
    key = f"linear.{run}.bf16"
    weight = recorded[f"{key}.weight"]
    layer = emulation.EmulatedLinear(weight.shape[1], weight.shape[0], dtype=torch.bfloat16)
    layer.load_state_dict({"weight": weight, "bias": recorded[f"{key}.bias"]})
    steps = (0, 3, 6) if run == "block_e4m3" else range(7)
    for step in steps:
        x = recorded[f"{key}.step{step}.x"].clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), emulation.autocast(recipe=recipe, hopper_sums=True):
            y = layer(x)
        layer.weight.grad = layer.bias.grad = None
        y.backward(recorded[f"{key}.step{step}.dy"])
        for name, found in (("y", y), ("dx", x.grad), ("dw", layer.weight.grad)):
            expected = recorded[f"{key}.step{step}.{name}"]
            assert torch.equal(found, expected), f"{name} of step {step}"


def test_hopper_sums_are_refused_for_blackwells_recipes():
    with pytest.raises(ValueError, match="hopper_sums=True with MXFP8BlockScaling, which Hopper GPUs do not have"):
        emulation.autocast(recipe=emulation.MXFP8BlockScaling(), hopper_sums=True)
