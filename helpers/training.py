"""The training loop. It saves itself and goes on from where it was, if it is given a checkpoint."""

import itertools
import math
import time
from collections.abc import Callable

import pandas as pd
import torch
import torch.nn.functional as F
from tqdm.auto import tqdm

from helpers import checkpoints
from helpers.models import MiniGPT
from helpers.precision import Precision


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
    checkpoint: checkpoints.Checkpoint | None = None,
) -> pd.DataFrame:
    """Trains with AdamW behind a progress bar. Returns a DataFrame of step, loss (nats) and ms a step.

    `on_step(step)` is called after each optimizer step. With `checkpoint` the run goes on from that file if it exists, and the
    rows are those of the steps that were left to do; `next_batch` must draw from the checkpoint's generator.

    The loop never waits for the GPU, but to save: losses arrive through pinned memory and times through events, both read
    after the end. Raises FloatingPointError naming the first step whose loss is not finite; that is never saved.
    """
    optimizer = make_optimizer(model, lr)
    first = 0
    if checkpoint and checkpoint.path.exists():
        first = checkpoints.load(checkpoint.path, model, precision, optimizer, checkpoint.generator)
    if first > steps:
        raise ValueError(f"steps={steps} given, but {checkpoint.path} has {first} done; ask for more, or another path")
    cuda = precision.device == "cuda"
    losses = torch.full((steps - first,), math.nan, pin_memory=cuda)
    marks = [now(cuda)]
    model.train()
    with tqdm(
        range(first, steps), initial=first, total=steps, desc=precision.label, unit="step", mininterval=0.5
    ) as bar:
        for i, step in enumerate(bar):
            inputs, targets = next_batch()
            loss = loss_of(model, inputs, targets, precision)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses[i].copy_(loss.detach(), non_blocking=True)
            marks.append(now(cuda))
            if on_step:
                on_step(step)
            if checkpoint and ((step + 1) % checkpoint.every == 0 or step + 1 == steps):
                check_losses(losses[: i + 1], first, precision, lr)
                checkpoints.save(checkpoint.path, model, precision, step + 1, optimizer, checkpoint.generator)
            if step % 10 == 0:
                arrived = losses[: i + 1][losses[: i + 1].isfinite()]
                bar.set_postfix(loss=f"{arrived[-1]:.3f}" if len(arrived) else "…", refresh=False)
    check_losses(losses, first, precision, lr)
    ms = [a.elapsed_time(b) if cuda else 1000 * (b - a) for a, b in itertools.pairwise(marks)]
    return pd.DataFrame({"step": range(first, steps), "loss": losses.tolist(), "ms": ms})


def check_losses(losses: torch.Tensor, first: int, precision: Precision, lr: float) -> None:
    """Waits for the losses of the steps from `first` on, and raises FloatingPointError if one is not finite."""
    if precision.device == "cuda":
        torch.cuda.synchronize()
    bad = (~losses.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise FloatingPointError(
            f"the loss of step {first + bad[0]} is {losses[bad[0]].item()} under {precision.label}; lower lr={lr} or check the scales"
        )


def now(cuda: bool):
    """A point in time: an event in the GPU's queue, or the CPU's clock in seconds."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
