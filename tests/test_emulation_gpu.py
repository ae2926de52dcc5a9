"""The emulator held against the real thing: te.Linear and EmulatedLinear side by side, fresh random inputs, on the GPU.

What was measured goes to artifacts/results/<gpu>/emulation.json, also when a bound is missed.
"""

import importlib

import pytest
import torch

from helpers import emulation, precision, results

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
    """Where TE's result `b` is finite: relative error and share of identical elements; and whether the rest agrees."""
    finite = b.isfinite()
    same_special = bool(torch.equal(a.isfinite(), finite) and torch.equal(a.isnan(), b.isnan()))
    x, y = a[finite].double(), b[finite].double()
    error = (
        ((x - y).norm() / y.norm()).item() if y.numel() and y.norm() > 0 else float(x.norm().item() if x.numel() else 0)
    )
    identical = (x == y).double().mean().item() if y.numel() else 1.0
    return {
        "relative_error": error,
        "identical": identical,
        "special_agrees": same_special,
        "finite": finite.double().mean().item(),
    }


def run_pair(name: str, fields: dict, params: str, kind: str, k: int, hardware) -> list[dict]:
    te = importlib.import_module("transformer_engine.pytorch")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[params]
    real = precision.choose("fp8", hardware, name, **fields).recipe
    twin = getattr(emulation, type(real).__name__)
    chosen = {"fp8_format": emulation.Format[real.fp8_format.name]}
    if name == "delayed":
        chosen |= {"amax_history_len": real.amax_history_len, "amax_compute_algo": real.amax_compute_algo}
    imitation = twin(**chosen)
    generator = torch.Generator().manual_seed(k)
    layer = te.Linear(k, OUT, bias=True, params_dtype=dtype, device="cuda")
    copy = emulation.EmulatedLinear(k, OUT, bias=True, device="cuda", dtype=dtype)
    with torch.no_grad():
        copy.weight.copy_(layer.weight)
        copy.bias.copy_(layer.bias)
    rows = []
    for step in range(STEPS):
        x, dy = make_inputs(kind, k, generator)
        outputs = {}
        for label, module, context in (
            ("real", layer, te.autocast(enabled=True, recipe=real)),
            ("emulated", copy, emulation.autocast(recipe=imitation)),
        ):
            leaf = x.clone().requires_grad_()
            with torch.autocast("cuda", torch.bfloat16), context:
                y = module(leaf)
            y.backward(dy)
            outputs[label] = {"y": y.detach(), "dx": leaf.grad, "dw": module.weight.grad.clone()}
            module.weight.grad = module.bias.grad = None
        for tensor in ("y", "dx", "dw"):
            found = compare(outputs["emulated"][tensor], outputs["real"][tensor])
            rows.append(
                {
                    "recipe": f"{name} {real.fp8_format.name}",
                    "params": params,
                    "inputs": kind,
                    "k": k,
                    "step": step,
                    "tensor": tensor,
                    **found,
                }
            )
    if name == "delayed":
        for direction in ("scaling_fwd", "scaling_bwd"):
            for field in ("scale", "amax_history"):
                a, b = getattr(copy.fp8_meta[direction], field), getattr(layer.fp8_meta[direction], field)
                equal = bool(torch.equal(a.nan_to_num(nan=-1.0), b.nan_to_num(nan=-1.0)))
                rows.append(
                    {
                        "recipe": f"{name} {real.fp8_format.name}",
                        "params": params,
                        "inputs": kind,
                        "k": k,
                        "step": STEPS - 1,
                        "tensor": f"{direction}.{field}",
                        "equal": equal,
                    }
                )
    return rows


@pytest.fixture(scope="module")
def collected(hardware):
    rows = []
    yield rows
    method = f"te.Linear against EmulatedLinear, {TOKENS} tokens, {OUT} out, {STEPS} steps from an empty state, BF16 inputs under torch.autocast"
    results.save(
        "emulation",
        hardware,
        [r | {"kind": "emulated"} for r in rows],
        method,
        command="pytest --gpu tests/test_emulation_gpu.py",
    )


@pytest.mark.parametrize("kind", ["random", "zeros", "outlier", "denormals", "inf", "nan"])
@pytest.mark.parametrize("k", [128, 2048, 16384])
@pytest.mark.parametrize("params", ["bf16", "fp32"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_emulated_equals_real(hardware, collected, recipe, params, k, kind):
    name, fields = RECIPES[recipe]
    if hardware.recipes[name]:
        pytest.skip(hardware.recipes[name])
    rows = run_pair(name, fields, params, kind, k, hardware)
    collected += rows
    misses = [
        r for r in rows
        if not r.get("equal", True) or not r.get("special_agrees", True) or r.get("relative_error", 0) > LARGEST_ERROR[params] or (params == "bf16" and r.get("identical", 1) < LEAST_IDENTICAL)
    ]  # fmt: skip
    assert not misses, "\n".join(map(str, misses))
