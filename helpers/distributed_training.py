"""One rank of a job: the model under DDP or FSDP2, a training step, the loop; and joining and leaving the job."""

import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta

import pandas as pd
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from helpers import training
from helpers.models import GPTConfig, MiniGPT
from helpers.precision import Precision
from helpers.recompute import recompute_blocks
from helpers.watchdog import GRACE_S, Watchdog

STRATEGIES = ("ddp", "fsdp2")
Microbatches = list[tuple[torch.Tensor, torch.Tensor]]  # one rank's part of a batch: (inputs, targets), …


class Trainer:
    """One rank's model, wrapped for its strategy, and its optimizer. Needs an initialized process group.

    `model` is the MiniGPT itself; `parallel` is what to call. Under FSDP2 the two are one, and its parameters are DTensors,
    of which a rank holds its rows. Weights, gradients and optimizer states are FP32, as in helpers/training.py. Without a
    strategy nothing is communicated but the loss: for one rank, as a baseline.
    """

    def __init__(
        self,
        config: GPTConfig,
        chosen: Precision,
        strategy: str | None,
        lr: float,
        recompute: bool = False,
        generator: torch.Generator | None = None,
    ):
        self.precision, self.lr = chosen, lr
        self.first_microbatch: bool | None = None  # None: no weight is kept in FP8 from one microbatch to the next
        # FSDP2 takes a model from the host's memory to the GPU piece by piece: the whole need not fit there.
        place = "cpu" if strategy == "fsdp2" else chosen.device
        self.model = replace(chosen, device=place).build(config, generator)
        if chosen.backend == "te":
            for block in self.model.blocks:
                block.register_forward_pre_hook(self._tell_microbatch, with_kwargs=True)
        if recompute:
            recompute_blocks(self.model, chosen)
        self.parallel = self.model
        if strategy == "fsdp2":
            shard(self.model, chosen)
        elif strategy == "ddp":
            with warnings.catch_warnings():  # torch 2.13 renames broadcast_buffers; 2.11 knows no other name
                warnings.simplefilter("ignore", FutureWarning)
                # The only buffers count NaN, each rank its own.
                self.parallel = DistributedDataParallel(
                    self.model, broadcast_buffers=False, gradient_as_bucket_view=True
                )
        self.optimizer = training.make_optimizer(self.model, lr)

    def _tell_microbatch(self, block, args, kwargs):
        return args, kwargs | {"is_first_microbatch": self.first_microbatch}

    def step(self, microbatches: Microbatches) -> torch.Tensor:
        """One optimizer step. Returns the mean loss (nats) over all ranks, on the device.

        With several microbatches TE quantizes a weight in the first only (not under FSDP2, which frees the weights), and DDP
        communicates in the last only; FSDP2 communicates in each, so that no rank holds whole gradients.
        """
        self.optimizer.zero_grad(set_to_none=True)
        total, n = 0.0, len(microbatches)
        for i, (inputs, targets) in enumerate(microbatches):
            self.first_microbatch = i == 0 if n > 1 else None
            wait = self.parallel is not self.model and i < n - 1
            with self.parallel.no_sync() if wait else nullcontext():
                loss = training.loss_of(self.parallel, inputs, targets, self.precision) / n
                loss.backward()
            total = total + loss.detach()
        self.first_microbatch = None
        self.optimizer.step()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    def train(
        self,
        microbatches: Iterator[Microbatches],
        steps: range,
        on_step: Callable[[int], None] | None = None,
        watchdog: Watchdog | None = None,
        progress: bool = True,
    ) -> pd.DataFrame:
        """Trains `steps`. Returns step, loss (nats, over all ranks) and this rank's ms. Rank 0 prints how far it is.

        `on_step(step)` follows each step; `watchdog` is told what comes next. Raises FloatingPointError, on every rank,
        naming the first step whose loss is not finite.
        """
        cuda = self.precision.device == "cuda"
        expect = watchdog.expect if watchdog else lambda *_, **__: None
        losses, marks = [], [training.now(cuda)]
        every = max(1, len(steps) // 5)
        self.model.train()
        for done, step in enumerate(steps, 1):
            expect(f"the batch of step {step + 1}")
            batch = next(microbatches)
            expect(f"step {step + 1}", waits=True)
            losses.append(self.step(batch))
            marks.append(training.now(cuda))
            expect(f"what follows step {step + 1}")
            if on_step:
                on_step(step)
            if progress and dist.get_rank() == 0 and done % every == 0:
                print(f"step {step + 1} of {steps.stop}: loss {losses[-1].item():.3f}", flush=True)
        values = torch.stack(losses) if losses else torch.empty(0)
        training.check_losses(values, steps.start, self.precision, self.lr)
        ms = [a.elapsed_time(b) if cuda else 1000 * (b - a) for a, b in itertools.pairwise(marks)]
        return pd.DataFrame({"step": steps, "loss": values.tolist(), "ms": ms})

    def memory(self) -> dict[str, float | None]:
        """What this rank holds, in GB (1e9 bytes): parameters, gradients, optimizer states; and the GPU's peak."""

        def gb(tensors) -> float:
            return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors) / 1e9

        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return {
            "parameters_gb": gb(self.model.parameters()),
            "gradients_gb": gb(p.grad for p in self.model.parameters() if p.grad is not None),
            "optimizer_gb": gb(t for t in states if isinstance(t, torch.Tensor)),
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if self.precision.device == "cuda" else None,
        }


def shard(model: MiniGPT, chosen: Precision) -> None:
    """FSDP2: every block a group of its own, gathered before it runs and freed afterwards; the rest is another group.

    A rank keeps its rows of each parameter in FP32. In BF16 and FP8 the blocks' weights are gathered as BF16, which is
    what they would be cast to; gradients are summed up in FP32.
    """
    mesh = init_device_mesh(chosen.device, (dist.get_world_size(),))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy() if chosen.name == "fp32" else low)
    fully_shard(model, mesh=mesh)


@contextmanager
def joined(device: str, limit_s: float = 300) -> Iterator[Watchdog]:
    """What is inside runs as a rank of the job that torchrun started, under a watchdog; then the process ends.

    It ends with status 0 when all ranks are through; after an error with 1, the error printed and handed to torchrun. It does
    so without Python's teardown, in which gloo can wait for a thread that waits for Python (pytorch issues 75097, 190489).
    """
    watchdog = Watchdog(limit_s)
    try:
        watchdog.expect("joining the other ranks", waits=True)
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else None
        if own:
            torch.cuda.set_device(own)
        backend, timeout = ("nccl" if own else "gloo"), timedelta(seconds=2 * limit_s)
        dist.init_process_group(backend, timeout=timeout, device_id=own)
        yield watchdog
        watchdog.expect("waiting for the other ranks to end", waits=True)
        dist.barrier()
        status = 0
    except BaseException as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            time.sleep(GRACE_S)  # most likely another rank is gone: torchrun is to see that one first
        get_error_handler().record_exception(error)
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
