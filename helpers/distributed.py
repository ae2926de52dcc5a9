"""Training in several processes, one a GPU (or a few on the CPU): PyTorch's DDP and FSDP2, Transformer Engine inside.

    torchrun --nproc-per-node 2 -m helpers.distributed --strategy fsdp2 --precision fp8
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id 1 -m helpers.distributed

torchrun starts a process (a rank) for each GPU and ends them all when one fails. Each draws the same global batch and trains on
its own rows of it. Delayed scaling's amaxes are reduced over all ranks, which TE and the emulator both do by default, so
that every rank holds the same scales. The same command again goes on from the newest checkpoint in `--checkpoints`.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist

from helpers import data, distributed_checkpoint, hardware, models, precision, results
from helpers.distributed_training import STRATEGIES, Microbatches, Trainer, joined
from helpers.hardware import Hardware
from helpers.models import GPTConfig
from helpers.precision import Precision
from helpers.torchrun import torchrun
from helpers.watchdog import Watchdog


@dataclass(frozen=True)
class Job:
    """What to train and how; equal on every rank."""

    strategy: str = "ddp"
    precision: str = "fp8"
    recipe: str = "delayed"
    preset: str = "laptop"
    steps: int = 30
    batch: int | None = None  # sequences of a step, over all ranks; None: the preset's
    accumulate: int = 1  # microbatches a step
    recompute: bool = False  # activation checkpointing
    seed: int = 1  # of the data

    @property
    def global_batch(self) -> int:
        return self.batch or models.preset(self.preset).batch

    def check(self, ranks: int, ranks_here: int, hw: Hardware, gpus: int) -> None:
        """Raises ValueError for what cannot work, before anything is built. `ranks_here`: on this machine, with `gpus`."""
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy {self.strategy!r} is not known; choose one of {', '.join(STRATEGIES)}")
        models.preset(self.preset)
        precision.choose(self.precision, hw, self.recipe)
        if ranks < 1 or self.steps < 1 or self.accumulate < 1:
            raise ValueError(
                f"{ranks} ranks, {self.steps} steps, {self.accumulate} microbatches given; each is at least 1"
            )
        if hw.device == "cuda" and ranks_here > gpus:
            raise ValueError(
                f"{ranks_here} ranks on this machine, which has {gpus} GPU{'s' if gpus > 1 else ''}; start at most {gpus}, "
                "or set WORKSHOP_TIER=cpu to train on the CPU"
            )
        parts = ranks * self.accumulate
        if self.global_batch % parts:
            raise ValueError(
                f"a batch of {self.global_batch} does not divide into {ranks} ranks x {self.accumulate} microbatches; "
                f"choose a multiple of {parts}, such as {-(-self.global_batch // parts) * parts}"
            )

    def microbatches(
        self, config: GPTConfig, part: int, parts: int, device: str, first: int = 0
    ) -> Iterator[Microbatches]:
        """Endless: for each step from `first` on, the rows that part `part` of `parts` trains on."""
        generator = torch.Generator().manual_seed(self.seed)
        rows = self.global_batch // parts
        for step in itertools.count():
            batch = data.arithmetic_batch(self.global_batch, config.seq_len, generator)
            if step >= first:
                mine = (t[part * rows : (part + 1) * rows].to(device).chunk(self.accumulate) for t in batch)
                yield list(zip(*mine, strict=True))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m helpers.distributed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Job()
    parser.add_argument("--strategy", default=default.strategy, help=f"{' or '.join(STRATEGIES)} (%(default)s)")
    parser.add_argument("--precision", default=default.precision, help=f"{', '.join(precision.NAMES)} (%(default)s)")
    parser.add_argument("--recipe", default=default.recipe, help=f"of FP8: {', '.join(hardware.RECIPES)} (%(default)s)")
    parser.add_argument("--preset", default=default.preset, help=f"{', '.join(models.PRESETS)} (%(default)s)")
    parser.add_argument("--steps", type=int, default=default.steps, help="optimizer steps (%(default)s)")
    parser.add_argument("--batch", type=int, help="sequences of a step, over all ranks; default: the preset's")
    parser.add_argument("--accumulate", type=int, default=default.accumulate, help="microbatches a step (%(default)s)")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--seed", type=int, default=default.seed, help="of the data (%(default)s)")
    parser.add_argument("--checkpoints", type=Path, help="folder to go on from and to save into")
    parser.add_argument("--save-every", type=int, help="steps; default: at the end only")
    parser.add_argument("--out", type=Path, help="file for losses, times and memory as JSON")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a step may take (%(default)g)")
    return parser


def parse(arguments: list[str]) -> tuple[Job, argparse.Namespace]:
    asked = make_parser().parse_args(arguments)
    return Job(**{name: getattr(asked, name) for name in asdict(Job())}), asked


def run(job: Job, asked: argparse.Namespace, hw: Hardware, watchdog: Watchdog) -> None:
    """What every rank does."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config, lr = models.preset(job.preset).config, models.preset(job.preset).lr
    chosen = precision.choose(job.precision, hw, job.recipe)
    watchdog.expect("building the model", waits=True)
    trainer = Trainer(config, chosen, job.strategy, lr, job.recompute)
    first = 0
    if asked.checkpoints and (newest := distributed_checkpoint.newest(asked.checkpoints)):
        watchdog.expect(f"loading {newest}", waits=True)
        first = distributed_checkpoint.load(newest, trainer.model, chosen, trainer.optimizer)
    if rank == 0:
        where = hw.gpu or "the CPU"
        print(f"{chosen.label}, {job.strategy}, {ranks} ranks on {where}, steps {first + 1} to {job.steps}", flush=True)

    def on_step(step):
        done = step + 1
        if asked.checkpoints and (done == job.steps or (asked.save_every and done % asked.save_every == 0)):
            watchdog.expect(f"saving after step {done}", waits=True)
            distributed_checkpoint.save(asked.checkpoints, trainer.model, chosen, done, trainer.optimizer)

    mine = job.microbatches(config, rank, ranks, hw.device, first)
    history = trainer.train(mine, range(first, job.steps), on_step, watchdog)
    watchdog.expect("collecting what the ranks hold", waits=True)
    everyone = [None] * ranks
    dist.all_gather_object(everyone, trainer.memory())
    if rank == 0:
        report(job, asked, hw, chosen, history, everyone)


def report(job: Job, asked, hw: Hardware, chosen: Precision, history: pd.DataFrame, memory: list[dict]) -> None:
    """Prints what the job came to; writes it as JSON if asked to."""
    ranks, config = len(memory), models.preset(job.preset).config
    steady = history["ms"].iloc[min(5, len(history) // 2) :].median()  # the first steps also set things up
    tokens_per_s = 1000 * job.global_batch * config.seq_len / steady if len(history) else None
    if len(history):
        print(f"{steady:.1f} ms a step, {tokens_per_s:,.0f} tokens/s; last loss {history['loss'].iloc[-1]:.4f}")
    for i, held in enumerate(memory):
        print(
            f"rank {i}: " + ", ".join(f"{k.removesuffix('_gb')} {v:.4f} GB" for k, v in held.items() if v is not None)
        )
    if asked.out:
        content = asdict(job) | {"ranks": ranks, "machine": hw.gpu or "CPU", "label": chosen.label, "kind": chosen.kind}
        content |= history.to_dict("list") | {"tokens_per_s": tokens_per_s, "memory": memory}
        results.write(asked.out, content)


def launch(ranks: int, *arguments: str, port: int | None = None) -> dict:
    """Runs this module under torchrun with `ranks` processes on this machine; returns what `--out` writes.

    Raises ValueError for what cannot work, before any process starts, and RuntimeError with the first failed rank's error.
    """
    job, _ = parse(list(arguments))
    job.check(ranks, ranks, hardware.detect(), torch.cuda.device_count())
    with tempfile.TemporaryDirectory(prefix="fp8-workshop-") as folder:
        out = Path(folder) / "job.json"
        torchrun(ranks, ["-m", "helpers.distributed", *arguments, "--out", str(out)], port)
        return json.loads(out.read_text())


def main() -> None:
    if "LOCAL_RANK" not in os.environ:
        sys.exit(
            "distributed: start it with torchrun --nproc-per-node N -m helpers.distributed, N being the number of ranks"
        )
    job, asked = parse(sys.argv[1:])
    try:
        hw = hardware.detect()
        job.check(int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"]), hw, torch.cuda.device_count())
    except ValueError as error:
        sys.exit(f"distributed: {error}")
    with joined(hw.device, asked.limit) as watchdog:
        run(job, asked, hw, watchdog)


if __name__ == "__main__":
    main()
