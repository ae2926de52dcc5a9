"""The emulator replayed against what Transformer Engine 2.20.2 computed on an H200, recorded in tests/data.

Every replay starts from an empty state; recorded scales and histories are compared with, never fed in.
`pytest --traces DIR` replays other recordings of the same form. Printed with -s: how close each row came.
"""

import functools
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file

from helpers import emulation
from helpers.emulation import (
    DelayedScaling,
    EmulatedLinear,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    autocast,
    emulate,
)
from helpers.emulation_blocks import quantize_mxfp8, quantize_nvfp4, random_hadamard_transform
from helpers.formats import E2M1, E4M3, E8M0, encode
from helpers.models import GPTConfig, MiniGPT, load_plain_state

LINEAR_RUNS = {
    "delayed_hybrid_h4_max": DelayedScaling(amax_history_len=4),
    "delayed_hybrid_h4_recent": DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"),
    "delayed_hybrid_h16_margin1": DelayedScaling(amax_history_len=16, margin=1),
    "delayed_e4m3_h16_max": DelayedScaling(amax_history_len=16, fp8_format=Format.E4M3),
    "delayed_hybrid_h1_max": DelayedScaling(amax_history_len=1),
    "current_hybrid": Float8CurrentScaling(),
    "block_e4m3": Float8BlockScaling(),
}
TRAINING_RUNS = {
    "te_delayed_hybrid_h16": DelayedScaling(amax_history_len=16),
    "te_delayed_hybrid_h1024": DelayedScaling(amax_history_len=1024),
    "te_delayed_e4m3_h16": DelayedScaling(amax_history_len=16, fp8_format=Format.E4M3),
    "te_current_hybrid": Float8CurrentScaling(),
    "te_block": Float8BlockScaling(),
}
DIRECTIONS = ("scaling_fwd", "scaling_bwd")


# --- One te.Linear ---


@pytest.fixture(scope="module")
def linear(traces):
    return load_file(traces / "linear.safetensors")


def relative_error(a, b) -> float:
    """|a - b| / |b|; where b is all zero, |a|."""
    a, b = a.double(), b.double()
    return ((a - b).norm() / (b.norm() if b.any() else 1)).item()


def replay(linear, run: str, params: str, recipe) -> list[dict]:
    """The recorded steps of one te.Linear under `recipe` (None: BF16), each with its results and state, and TE's."""
    prefix = f"linear.{run}.{params}."
    weight = linear[prefix + "weight"]
    layer = EmulatedLinear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    layer.load_state_dict({"weight": weight, "bias": linear[prefix + "bias"]})
    generator = torch.Generator().manual_seed(0)
    steps = []
    for step in range(7):
        recorded = {
            k.removeprefix(f"{prefix}step{step}."): v for k, v in linear.items() if k.startswith(f"{prefix}step{step}.")
        }
        if not recorded:  # block scaling was recorded at steps 0, 3 and 6
            continue
        x = recorded["x"].clone().requires_grad_()
        layer.zero_grad()
        with (
            torch.autocast("cpu", torch.bfloat16),
            autocast(enabled=recipe is not None, recipe=recipe, generator=generator),
        ):
            y = layer(x)
        y.backward(recorded["dy"])
        found = {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad}
        for direction, state in layer.fp8_meta.items():
            found |= {
                f"{direction}.scale": state.scale.clone(),
                f"{direction}.amax_history": state.amax_history.clone(),
            }
        steps.append({"step": step, "found": found, "recorded": recorded})
    return steps


def agrees(steps: list[dict], params: str) -> bool:
    """The bounds on y, dx and dw."""
    for name in ("y", "dx", "dw"):
        for s in steps:
            found, recorded = s["found"][name], s["recorded"][name]
            if relative_error(found, recorded) > {"bf16": 1e-3, "fp32": 4e-3}[params]:
                return False
            if params == "bf16" and (found == recorded).double().mean() < 0.90:
                return False
    return True


@pytest.mark.parametrize("params", ["bf16", "fp32"])
@pytest.mark.parametrize("run", LINEAR_RUNS)
def test_linear(linear, run, params):
    steps = replay(linear, run, params, LINEAR_RUNS[run])
    for name in ("y", "dx", "dw", "db"):
        errors = [relative_error(s["found"][name], s["recorded"][name]) for s in steps]
        identical = [(s["found"][name] == s["recorded"][name]).double().mean().item() for s in steps]
        print(f"{run} {params} {name}: relative error <= {max(errors):.1e}, >= {min(identical):.1%} identical")
        assert all(s["found"][name].dtype == s["recorded"][name].dtype for s in steps)
        assert max(errors) <= 1e-3  # the requirement for fp32 parameters is 4e-3
        assert min(identical) >= 0.90


@pytest.mark.parametrize("params", ["bf16", "fp32"])
@pytest.mark.parametrize("run", [run for run in LINEAR_RUNS if run.startswith("delayed")])
def test_linear_state(linear, run, params):
    steps = replay(linear, run, params, LINEAR_RUNS[run])
    assert len(steps) == 7
    for s in steps:
        for direction in DIRECTIONS:
            for field in ("scale", "amax_history"):
                found, recorded = (s[side][f"{direction}.{field}"] for side in ("found", "recorded"))
                assert torch.equal(found, recorded), (
                    f"step {s['step']} {direction}.{field}: {found} instead of {recorded}"
                )


# Recipes that give the same results as the recorded one, whatever the steps: a history of length 1 is its newest entry.
SAME_RESULTS = [{"delayed_hybrid_h4_recent", "delayed_hybrid_h1_max"}]
# And in these steps: both scales are powers of two, and with no value of a block near E4M3's limits a power of two only
# moves the exponent.
SAME_RESULTS += [{"block_e4m3", "MXFP8"}]


@pytest.mark.parametrize("params", ["bf16", "fp32"])
@pytest.mark.parametrize("run", LINEAR_RUNS)
def test_only_its_own_recipe_reproduces_a_run(linear, run, params):
    candidates = LINEAR_RUNS | {"MXFP8": MXFP8BlockScaling(), "NVFP4": NVFP4BlockScaling(), "BF16": None}
    reproducing = set()
    for name, recipe in candidates.items():
        shape = linear[f"linear.{run}.{params}.weight"].shape
        if recipe is not None and any(n % recipe.multiple_of for n in shape):
            with pytest.raises(ValueError, match="multiple of"):  # this layer cannot be run under that recipe
                replay(linear, run, params, recipe)
        elif agrees(replay(linear, run, params, recipe), params):
            reproducing.add(name)
    same = next((pair for pair in SAME_RESULTS if run in pair), {run})
    assert run in reproducing
    assert reproducing <= same, f"{run} is also reproduced by {reproducing - same}"


# --- Block formats: codes and scales of reference quantizers ---


def test_mxfp8(traces):
    data = load_file(traces / "mxfp8_reference.safetensors")
    names = sorted({key.split(".")[0] for key in data})
    assert names
    for i in names:
        blocks = quantize_mxfp8(data[f"{i}.x"])
        assert torch.equal(encode(blocks.block_scale, E8M0), data[f"{i}.rceil.scale"])
        assert torch.equal(encode(blocks.values, E4M3), data[f"{i}.rceil.data"])


@pytest.mark.parametrize(
    ("kind", "block", "rht"),
    [("activation_1x16", (1, 16), False), ("weight_16x16", (16, 16), False), ("activation_1x16_rht", (1, 16), True)],
)
def test_nvfp4(traces, kind, block, rht):
    data = load_file(traces / "nvfp4_reference.safetensors")
    names = sorted({key.split(".")[1] for key in data if key.startswith(kind + ".")})
    assert names
    for i in names:
        x = data[f"{kind}.{i}.x"]
        transposed = x.t().contiguous()
        for suffix, which, matrix in (
            ("", "row", x),
            ("_t", "col", random_hadamard_transform(transposed) if rht else transposed),
        ):
            blocks = quantize_nvfp4(matrix, block)
            codes = encode(blocks.values, E2M1)
            assert torch.equal(codes[:, ::2] | codes[:, 1::2] << 4, data[f"{kind}.{i}.data{suffix}"])
            scales = blocks.block_scale.repeat_interleave(block[0], dim=0)  # recorded for every row
            assert torch.equal(scales, data[f"{kind}.{i}.scale{suffix}"].float())
            recorded_amax = data[f"{kind}.{i}.global_amax_{which}"].item()
            assert blocks.tensor_scale.item() == pytest.approx(recorded_amax / (448 * 6), rel=1e-6)


# --- 60 training steps ---
#
# Training in FP8 is chaotic: a value on the edge between two E4M3 numbers falls to the other side for a difference in
# the last bit, and AdamW's first steps make a whole step of a gradient's sign. Emulated runs that differ in nothing but
# the last bits of their GEMMs drift apart as far as they drift from TE. So TE's run is compared with what several such
# runs span: how far it lies outside is what must be within the bounds. The plain run alone must keep the losses' bounds
# over all steps, too; those of the first steps and of the scales it misses about every other time, and by little.

FIRST_STEPS = 6  # where the bounds are tightest, and short runs will do
# (runs to the end, short ones)
MEMBERS = {True: (3, 5), False: (2, 2)}  # is it delayed scaling, whose scales are compared, too?


def with_tensor_core_noise(monkeypatch, seed: int):
    """Lets the emulator's GEMMs differ from the exact ones by about as much as a tensor core's do.

    2^-14 of a result's root mean square moves 3 to 4 % of the BF16 results to their neighbour, as many as in test_linear.
    """
    exact, generator = emulation.multiply, torch.Generator().manual_seed(seed)
    pool = torch.randn(2**20, generator=generator) * 2**-14  # drawing afresh each time would take longer than the GEMMs

    def noisy(a, b, add, dtype, bias=None):
        product = exact(a, b, add, torch.float32, None if bias is None else bias.to(dtype))
        start = torch.randint(len(pool) - product.numel(), (), generator=generator)
        noise = pool[start : start + product.numel()].view_as(product)
        return torch.addcmul(product, noise, product.square().mean().sqrt()).to(dtype)

    monkeypatch.setattr(emulation, "multiply", noisy)


# TE's module -> the layers of ours that it holds, in the order of its columns
TE_MODULES = {
    "self_attention.layernorm_qkv": ("qkv",),
    "self_attention.proj": ("proj",),
    "layernorm_mlp": ("fc1", "fc2"),
}


def te_state(model, field: str) -> dict[str, torch.Tensor]:
    """The emulated model's scales or amax histories under TE's names, columns joined as in TE."""
    return {
        f"blocks.{i}.{module}.{direction}.{field}": torch.cat([getattr(getattr(block, name).fp8_meta[direction], field) for name in names], -1)
        for i, block in enumerate(model.blocks)
        for module, names in TE_MODULES.items()
        for direction in DIRECTIONS
    }  # fmt: skip


def train(data: dict, config: dict, recipe, steps: int) -> tuple[torch.Tensor, list[dict]]:
    """Loss of every step, and after each the scales (and for step 0 the amaxes) of every tensor."""
    model = MiniGPT(GPTConfig(config["D"], config["L"], config["H"], config["SEQ"], config["vocab"]))
    load_plain_state(
        model, {key.removeprefix("init."): value for key, value in data.items() if key.startswith("init.")}
    )
    model = emulate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    losses, states = [], []
    for tokens in data["tokens"][:steps].long():
        with torch.autocast("cpu", torch.bfloat16), autocast(recipe=recipe):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if isinstance(recipe, DelayedScaling):
            states.append(te_state(model, "scale"))
            if len(states) == 1:
                states[0] |= {key: history[-1] for key, history in te_state(model, "amax_history").items()}
            states[-1] = {key: value.clone() for key, value in states[-1].items()}
    return torch.tensor(losses), states


@pytest.fixture(scope="module")
def minigpt(traces):
    path = traces / "minigpt.safetensors"
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["info"])["config"]
    return load_file(path), config


@pytest.fixture(scope="module")
def runs(minigpt):
    """The emulated runs to compare a recorded one with, each (losses, states); the first is the plain one. Trained once."""

    @functools.cache
    def train_all(name: str):
        data, config = minigpt
        recipe = TRAINING_RUNS[name]
        long, short = MEMBERS[isinstance(recipe, DelayedScaling)]
        members = []
        for seed, steps in enumerate([config["STEPS"]] * long + [FIRST_STEPS] * short):
            with pytest.MonkeyPatch.context() as monkeypatch:
                if seed > 0:
                    with_tensor_core_noise(monkeypatch, seed)
                members.append(train(data, config, recipe, steps))
        return members

    return train_all


def outside(x, members):
    """How far `x` lies outside of what the members span, element by element; 0 inside."""
    return torch.maximum(members.amin(0) - x, x - members.amax(0)).clamp(min=0)


@pytest.mark.parametrize("run", TRAINING_RUNS)
def test_training_losses(minigpt, runs, run):
    recorded = minigpt[0][f"{run}.loss"]
    losses = [loss for loss, _ in runs(run)]
    first = outside(recorded[:FIRST_STEPS], torch.stack([loss[:FIRST_STEPS] for loss in losses]))
    every = outside(recorded, torch.stack([loss for loss in losses if len(loss) == len(recorded)]))
    alone = (losses[0] - recorded).abs()
    print(
        f"{run} loss: steps 0-5 {first.max():.4f}, all {every.max():.4f}, mean {every.mean():.4f} outside of the runs' span;"
    )
    print(f"    the plain run alone: {alone[:FIRST_STEPS].max():.4f}, {alone.max():.4f}, {alone.mean():.4f}")
    assert first.max() <= 0.006
    assert every.max() <= 0.025
    assert every.mean() <= 0.008
    assert alone.max() <= 0.025
    assert alone.mean() <= 0.008


@pytest.mark.parametrize("run", [run for run in TRAINING_RUNS if "delayed" in run])
def test_training_scales(minigpt, runs, run):
    data, config = minigpt
    worst = {}
    for step in range(config["STEPS"]):
        members = [states[step] for _, states in runs(run) if step < len(states)]
        for key in members[0]:
            if f"{run}.step{step}.{key}" in data and key.endswith("scale"):
                recorded = data[f"{run}.step{step}.{key}"].log()
                found = torch.stack([state[key] for state in members]).log()
                distances = outside(recorded, found).max(), (found[0] - recorded).abs().max()
                group = "steps 0-2" if step < 3 else "later", "forward" if "scaling_fwd" in key else "backward"
                worst[group] = torch.maximum(worst.get(group, torch.zeros(2)), torch.stack(distances).expm1())
    assert len(worst) == 4
    for group, (distance, alone) in worst.items():
        print(
            f"{run} scale, {' '.join(group)}: {distance:.1%} outside of the runs' span; the plain run alone: {alone:.1%}"
        )
    assert worst["steps 0-2", "forward"][0] <= 0.02
    assert worst["steps 0-2", "backward"][0] <= 0.08
    assert worst["later", "forward"][0] <= 0.05
    assert worst["later", "backward"][0] <= 0.20


@pytest.mark.parametrize("run", [run for run in TRAINING_RUNS if "delayed" in run])
def test_first_training_step(minigpt, runs, run):
    """Before chaos sets in: the amaxes of all weights, and of what the first FP8 layer sees.

    And whether an amax is a BF16 number, which tells where TE rounds on the way into FP8: not after a LayerNorm or a
    GELU or its backward, and not weights, but what comes out of a GEMM or of attention.
    """
    data, _ = minigpt
    _, states = runs(run)[0]
    for key, found in states[0].items():
        if key.endswith("amax_history"):
            recorded = data[f"{run}.step0.{key}"][-1]
            is_bf16 = [torch.equal(x, x.bfloat16().float()) for amaxes in (found, recorded) for x in amaxes]
            assert is_bf16[: len(found)] == is_bf16[len(found) :], f"{key}: {found}, recorded {recorded}"
            if "scaling_fwd" in key:
                assert torch.equal(found[1::3], recorded[1::3]), (
                    f"{key}: weights {found[1::3]}, recorded {recorded[1::3]}"
                )
            if key == "blocks.0.self_attention.layernorm_qkv.scaling_fwd.amax_history":
                assert found[0].item() == pytest.approx(recorded[0].item(), rel=1e-6)
