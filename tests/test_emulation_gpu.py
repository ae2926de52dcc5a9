"""The emulator held against the real thing: te.Linear and EmulatedLinear side by side, fresh random inputs, on the GPU.

Twice: with sums in float32, as the notebooks train, and with sums as a tensor core makes them (helpers/tensor_core.py).
The bounds hold for the second at any length. Sums in float32 miss them in the forward pass of long sums, where the hardware's
fast accumulation is what is imprecise. All that was measured goes to artifacts/results/<gpu>/emulation.json.
"""

import importlib

import pytest
import torch

from helpers import emulation, formats, precision, results, tensor_core

pytestmark = pytest.mark.gpu
TOKENS, OUT, STEPS = 128, 128, 3
RECIPES = {
    "delayed HYBRID": ("delayed", {}),
    "delayed E4M3": ("delayed", {"fp8_format": "E4M3"}),
    "current HYBRID": ("current", {}),
    "block E4M3": ("block", {}),
}
LARGEST_ERROR = {"bf16": 1e-3, "fp32": 4e-3}
LEAST_IDENTICAL = 0.90
LARGEST_ERROR_FP32_SUMS = 5e-3
SMALLEST_NORMAL = 2.0**-126
SPECIAL = ("zeros", "outlier", "denormals", "inf", "nan")
CASES = [(k, "random") for k in (128, 2048, 16384)] + [(k, kind) for k in (128, 2048) for kind in SPECIAL]
# cuBLAS cuts so long a sum for so small a result into parts that it adds up afterwards; see test_long_sums for whole ones.
LONGEST_WHOLE_SUM = 2048


def make_inputs(kind: str, k: int, generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, dy), both BF16: random, with something special in them."""
    x = torch.randn(TOKENS, k, generator=generator)
    dy = torch.randn(TOKENS, OUT, generator=generator) * 1e-3
    if kind == "zeros":
        x.zero_()
    elif kind == "outlier":
        x[3, 5] = 3e4
    elif kind == "denormals":
        x *= 1e-39
        dy *= 1e-36
    elif kind == "inf":
        x[3, 5] = float("inf")
    elif kind == "nan":
        x[3, 5] = float("nan")
    return x.to("cuda", torch.bfloat16), dy.to("cuda", torch.bfloat16)


def compare(a: torch.Tensor, b: torch.Tensor) -> dict:
    """Where TE's result `b` is finite: relative error and share of identical elements; and whether the rest agrees.

    Results below the smallest normal number have no relative precision: there the error is relative to that number.
    """
    finite = b.isfinite()
    same_special = bool(torch.equal(a.isfinite(), finite) and torch.equal(a.isnan(), b.isnan()))
    x, y = a[finite].double(), b[finite].double()
    size = max(y.norm().item(), SMALLEST_NORMAL * max(y.numel(), 1) ** 0.5)
    identical = (x == y).double().mean().item() if y.numel() else 1.0
    return {
        "relative_error": (x - y).norm().item() / size,
        "identical": identical,
        "special_agrees": same_special,
        "finite": finite.double().mean().item(),
    }


def emulated_recipe(real):
    """The emulator's recipe of the same name and fields as TE's."""
    fields = {"fp8_format": emulation.Format[real.fp8_format.name]}
    if type(real).__name__ == "DelayedScaling":
        fields |= {"amax_history_len": real.amax_history_len, "amax_compute_algo": real.amax_compute_algo}
    return getattr(emulation, type(real).__name__)(**fields)


def one_step(module, x, dy, context) -> dict[str, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    module.weight.grad = module.bias.grad = None
    with torch.autocast("cuda", torch.bfloat16), context:
        y = module(leaf)
    y.backward(dy)
    return {"y": y.detach(), "dx": leaf.grad, "dw": module.weight.grad}


def run_pair(name: str, fields: dict, params: str, kind: str, k: int, hardware) -> list[dict]:
    """Rows: for each kind of sum and each tensor the worst of the steps; for delayed scaling whether its state is equal."""
    te = importlib.import_module("transformer_engine.pytorch")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[params]
    real = precision.choose("fp8", hardware, name, **fields).recipe
    imitation = emulated_recipe(real)
    layer = te.Linear(k, OUT, bias=True, params_dtype=dtype, device="cuda")
    twins = {
        sums: emulation.EmulatedLinear(k, OUT, bias=True, device="cuda", dtype=dtype)
        for sums in ("fp32", "tensor core")
    }
    for twin in twins.values():
        twin.load_state_dict({"weight": layer.weight.detach(), "bias": layer.bias.detach()})
    generator, found = torch.Generator().manual_seed(k), {}
    for _ in range(STEPS):
        x, dy = make_inputs(kind, k, generator)
        expected = one_step(layer, x, dy, te.autocast(enabled=True, recipe=real))
        for sums, twin in twins.items():
            context = emulation.autocast(recipe=imitation, hopper_sums=sums == "tensor core")
            for tensor, value in one_step(twin, x, dy, context).items():
                found.setdefault((sums, tensor), []).append(compare(value, expected[tensor]))
    case = {"recipe": f"{name} {real.fp8_format.name}", "params": params, "inputs": kind, "k": k, "kind": "emulated"}
    rows = [
        case
        | {"sums": sums, "tensor": tensor}
        | {
            "relative_error": max(step["relative_error"] for step in steps),
            "identical": min(step["identical"] for step in steps),
            "special_agrees": all(step["special_agrees"] for step in steps),
            "finite": min(step["finite"] for step in steps),
        }
        for (sums, tensor), steps in found.items()
    ]
    if name == "delayed":
        for direction in ("scaling_fwd", "scaling_bwd"):
            for field in ("scale", "amax_history"):
                a, b = (getattr(module.fp8_meta[direction], field) for module in (twins["fp32"], layer))
                equal = bool(torch.equal(a.nan_to_num(nan=-1.0), b.nan_to_num(nan=-1.0)))
                rows.append(case | {"tensor": f"{direction}.{field}", "equal": equal})
    return rows


def misses(row: dict) -> bool:
    if "equal" in row:
        return not row["equal"]
    if not row["special_agrees"]:
        return True
    if row["sums"] == "fp32" or (row["tensor"] == "y" and row["k"] > LONGEST_WHOLE_SUM):
        return row["relative_error"] > LARGEST_ERROR_FP32_SUMS
    too_few = row["params"] == "bf16" and row["identical"] < LEAST_IDENTICAL
    return too_few or row["relative_error"] > LARGEST_ERROR[row["params"]]


@pytest.fixture(scope="module")
def collected(hardware):
    rows = []
    yield rows
    method = (
        f"te.Linear against EmulatedLinear, {TOKENS} tokens, {OUT} out, {STEPS} steps from an empty state, BF16 inputs under "
        "torch.autocast; a row is the worst of the steps"
    )
    results.save("emulation", hardware, rows, method, command="pytest --gpu tests/test_emulation_gpu.py")


@pytest.mark.parametrize(("k", "kind"), CASES)
@pytest.mark.parametrize("params", ["bf16", "fp32"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_emulated_equals_real(hardware, collected, recipe, params, k, kind):
    name, fields = RECIPES[recipe]
    if hardware.recipes[name]:
        pytest.skip(hardware.recipes[name])
    rows = run_pair(name, fields, params, kind, k, hardware)
    collected += rows
    assert not any(map(misses, rows)), "\n".join(str(row) for row in rows if misses(row))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("k", [2048, 16384])
def test_long_sums(collected, k, fast):
    """A corner of a product that fills the GPU: every bit of it, however long the sum."""
    generator = torch.Generator("cuda").manual_seed(k)
    a, b = (torch.randn(4096, k, device="cuda", generator=generator).mul_(32).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    real = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)[:64, :64]
    a, b = (formats.decode(t[:64].view(torch.uint8), formats.E4M3) for t in (a, b))
    for sums, product in (("tensor core", tensor_core.matmul(a, b.t(), not fast, -6, -6)), ("fp32", a @ b.t())):
        found = compare(product.bfloat16(), real)
        case = {
            "recipe": f"GEMM alone, {'fast' if fast else 'split'} accumulation",
            "params": "bf16",
            "inputs": "random",
        }
        collected.append(case | {"k": k, "kind": "emulated", "sums": sums, "tensor": "y", **found})
        if sums == "tensor core":
            assert found["identical"] >= 0.999, found
