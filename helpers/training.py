"""The training loop, and checkpoints that hold the weights and the FP8 state as plain tensors (no pickle)."""

import itertools
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm

from helpers.fp8_state import delayed_state, load_delayed_state
from helpers.models import GPTConfig, MiniGPT, load_plain_state, plain_state
from helpers.precision import Precision

CHECKPOINT_SCHEMA = "fp8-workshop/checkpoint/1"


def loss_of(model: MiniGPT, inputs: torch.Tensor, targets: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Mean cross-entropy in nats; (batch, seq) tokens in. The forward pass runs in `precision`, the loss in FP32."""
    with precision.autocast():
        logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(model: MiniGPT, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def train(
    model: MiniGPT,
    precision: Precision,
    next_batch: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    lr: float,
    on_step: Callable[[int], None] | None = None,
) -> pd.DataFrame:
    """Trains with AdamW behind a progress bar. Returns a DataFrame of step, loss (nats) and ms a step.

    `on_step(step)` is called after each optimizer step. The loop never waits for the GPU: losses arrive through pinned
    memory and times through events, both read after the end. Raises FloatingPointError naming the first step whose
    loss is not finite.
    """
    optimizer = make_optimizer(model, lr)
    cuda = precision.device == "cuda"
    losses = torch.full((steps,), math.nan, pin_memory=cuda)
    marks = [now(cuda)]
    model.train()
    with tqdm(range(steps), desc=precision.label, unit="step", mininterval=0.5) as bar:
        for step in bar:
            inputs, targets = next_batch()
            loss = loss_of(model, inputs, targets, precision)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses[step].copy_(loss.detach(), non_blocking=True)
            marks.append(now(cuda))
            if on_step:
                on_step(step)
            if step % 10 == 0:
                arrived = losses[: step + 1][losses[: step + 1].isfinite()]
                bar.set_postfix(loss=f"{arrived[-1]:.3f}" if len(arrived) else "…", refresh=False)
    if cuda:
        torch.cuda.synchronize()
    bad = (~losses.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise FloatingPointError(
            f"the loss of step {bad[0]} is {losses[bad[0]].item()} under {precision.label}; lower lr={lr} or check the scales"
        )
    ms = [a.elapsed_time(b) if cuda else 1000 * (b - a) for a, b in itertools.pairwise(marks)]
    return pd.DataFrame({"step": range(steps), "loss": losses.tolist(), "ms": ms})


def now(cuda: bool):
    """A point in time: an event in the GPU's queue, or the CPU's clock in seconds."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def save_checkpoint(path: Path, model: MiniGPT, step: int) -> None:
    """Writes the weights under their plain names and the FP8 state, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = plain_state(model) | {
        f"fp8.{k}": v.detach().to("cpu", copy=True).contiguous() for k, v in delayed_state(model).items()
    }
    header = {"schema": CHECKPOINT_SCHEMA, "config": asdict(model.config), "step": step}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata={"header": json.dumps(header)})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path, model: MiniGPT, precision: Precision) -> int:
    """Loads what `save_checkpoint` wrote, of either backend, into `model`; returns the step it was saved at.

    FP8 state is loaded when `precision` keeps any (delayed scaling) and left out otherwise. Raises FileNotFoundError, or
    ValueError naming the file and what is wrong with it; the model is then as it was.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; train a model and save it there first")
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get("header", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a whole checkpoint ({error}); delete it to train anew") from error
    if header.get("schema") != CHECKPOINT_SCHEMA:
        raise ValueError(
            f"{path} has schema {header.get('schema')!r}, this code reads {CHECKPOINT_SCHEMA!r}; delete it to train anew"
        )
    if GPTConfig(**header["config"]) != model.config:
        raise ValueError(
            f"{path} holds a model of {header['config']}, this one is {asdict(model.config)}; delete it, or choose that preset"
        )
    weights = {k: v for k, v in tensors.items() if not k.startswith("fp8.")}
    fp8 = {k.removeprefix("fp8."): v for k, v in tensors.items() if k.startswith("fp8.")}
    before = plain_state(model)
    try:
        load_plain_state(model, weights)
        if precision.name == "fp8":
            touch(model, precision)
            if delayed_state(model):
                load_delayed_state(model, fp8)
    except ValueError as error:
        load_plain_state(model, before)
        raise ValueError(f"{path}: {error}") from error
    return header["step"]


@torch.no_grad()
def touch(model: MiniGPT, precision: Precision) -> None:
    """One forward, so that the FP8 state exists: TE makes it at the first forward under FP8."""
    with precision.autocast():
        model(torch.zeros(1, model.config.seq_len, dtype=torch.int64, device=precision.device))
