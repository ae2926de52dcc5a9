"""Weak scaling on this machine's GPUs: the same batch for each, one GPU against all, DDP against FSDP2, BF16 against FP8.

    python -m benchmarks.scaling [--cases scale_up_1024 wide_2b] [--ranks 2] [--steps 20]

Each row is a job of its own under torchrun: `one-…` on one GPU without a strategy, `ddp-…` and `fsdp2-…` on all. A job also
times its communication alone, moving what the strategy moves. From these, rows of kind "modelled" say what more GPUs
would give. Writes artifacts/results/<gpu>-x<ranks>/scaling.json after every row. NVLink multicast stays off in its jobs
(NCCL_NVLS_ENABLE=0), which some hosts cannot set up.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import median

import pandas as pd
import torch
import torch.distributed as dist

from benchmarks import variants
from benchmarks.variants import Case
from helpers import hardware, precision, results
from helpers.benchmark import quartiles
from helpers.distributed_training import Trainer, joined
from helpers.models import GPTConfig
from helpers.torchrun import torchrun

CASES = {
    "tiny": variants.CASES["tiny"],  # for a try on a CPU
    "scale_up_1024": variants.CASES["scale_up_1024"],
    "wide_2b": Case(GPTConfig(d_model=4096, n_layers=12, n_heads=32, seq_len=2048), 4),  # 2.4 billion parameters
}
STRATEGIES = {"one": None, "ddp": "ddp", "fsdp2": "fsdp2"}
VARIANTS = [f"{strategy}-{name}" for name in ("bf16", "fp8") for strategy in STRATEGIES]
WARMUP = 8
BUCKET_BYTES = 25 * 2**20  # DDP's
# For the modelled rows: (GPUs, GB/s that a node of 8 sends to others: an adapter of 400 Gb/s a GPU; None: all in one node).
MODELLED = ((8, None), (16, 400.0), (32, 400.0))
# The share of a step without communication that can hide it: DDP reduces during backward, two thirds of the FLOPs; FSDP2
# gathers and reduces all along.
HIDING = {"ddp": 2 / 3, "fsdp2": 1.0}


# ------------------------------------------------------------------------------------------------ one job


def work(case: Case, variant: str, steps: int, watchdog) -> dict:
    """What every rank of a job does: trains and times `steps`, then times its communication alone."""
    strategy, name = variant.split("-")
    hw = hardware.detect()
    cuda = hw.device == "cuda"
    # torch 2.13 renames the collectives that FSDP2 uses; 2.11 knows no other names.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    watchdog.expect("building the model", waits=True)
    generator = torch.Generator(hw.device).manual_seed(0)
    trainer = Trainer(case.config, precision.choose(name, hw), STRATEGIES[strategy], case.lr, generator=generator)
    if cuda:
        torch.cuda.empty_cache()  # the whole model was drawn on the GPU
        torch.cuda.reset_peak_memory_stats()
    stream = case.batches(hw.device, seed=1 + dist.get_rank())
    batches = ([next(stream)] for _ in range(WARMUP + steps))
    history = trainer.train(batches, range(WARMUP + steps), watchdog=watchdog, progress=False)
    memory = trainer.memory()
    watchdog.expect("timing the communication", waits=True)
    samples = history["ms"].iloc[WARMUP:].tolist()
    return {
        "label": trainer.precision.label,
        "kind": "emulated" if trainer.precision.kind == "emulated" else "measured",
        "samples": samples,
        "losses": [history["loss"].iloc[0], history["loss"].iloc[-1]],
        "memory": memory,
        "communication_ms": communication_ms(trainer, STRATEGIES[strategy], cuda) if dist.get_world_size() > 1 else 0.0,
    }


def communication_ms(trainer: Trainer, strategy: str, cuda: bool) -> float:
    """Median time of what a step communicates, alone: DDP's all-reduces, or FSDP2's two gathers and one scatter a block."""
    device, ranks = trainer.precision.device, dist.get_world_size()
    sizes = [p.numel() for p in trainer.model.parameters()]
    if strategy == "ddp":
        bucket = torch.zeros(BUCKET_BYTES // 4, device=device)
        whole, rest = divmod(sum(sizes), bucket.numel())

        def communicate():
            for size in [bucket.numel()] * whole + [rest] * (rest > 0):
                dist.all_reduce(bucket[:size])
    else:
        groups = [sum(p.numel() for p in block.parameters()) for block in trainer.model.blocks]
        padded = -(-max(groups) // ranks) * ranks
        low, full = (torch.zeros(padded, device=device, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))

        def communicate():
            for size in groups:
                own = -(-size // ranks)
                for _ in range(2):
                    dist.all_gather_into_tensor(low[: own * ranks], low[:own])
                dist.reduce_scatter_tensor(full[:own], full[: own * ranks])

    times = []
    for _ in range(3 + 10):
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        started = time.perf_counter()
        communicate()
        if cuda:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - started))
    return median(times[3:])


# ------------------------------------------------------------------------------------------------ the table


def row_of(case_name: str, variant: str, ranks: int, found: dict, one: dict | None) -> dict:
    """A row; `one` is the row of the same precision on one GPU."""
    case = CASES[case_name]
    ms, iqr = quartiles(found["samples"])
    tokens_per_s = 1000 * ranks * case.tokens / ms
    memory = found["memory"]
    return {
        "case": case_name,
        "variant": variant,
        "gpus": ranks,
        "kind": found["kind"],
        "label": found["label"],
        "params": case.config.n_params(),
        "batch_per_gpu": case.batch,
        "median_ms": ms,
        "iqr_ms": iqr,
        "tokens_per_s": tokens_per_s,
        "efficiency": tokens_per_s / (ranks * one["tokens_per_s"]) if one else 1.0,
        "gb_per_gpu": memory["peak_gb"],
        "parameters_and_optimizer_gb": memory["parameters_gb"] + memory["optimizer_gb"],
        "communication_ms": found["communication_ms"],
        "losses": found["losses"],
        "samples": found["samples"],
    }


def modelled(measured: dict, one: dict, gpus: int, network_gb_s: float | None) -> dict:
    """The row for more GPUs, from a measured one and its baseline.

    A ring moves 2 (n - 1)/n of the data through each GPU (half of that for a gather or a scatter), at the bandwidth seen here; and
    as much out of each node, at the network's. The slower of the two counts. The share of it that a step hid here it hides
    there, as far as there is something to hide it behind. What a step took longer here than even all of its
    communication explains, it takes longer there.
    """
    ranks, strategy = measured["gpus"], measured["variant"].split("-")[0]
    here, alone_ms = measured["communication_ms"], one["median_ms"]
    longer = max(0.0, measured["median_ms"] - alone_ms)
    shown = min(1.0, longer / here)
    there = here * ((gpus - 1) / gpus) / ((ranks - 1) / ranks)
    if network_gb_s:
        # Bytes a parameter: DDP all-reduces 4; FSDP2 gathers 2 twice and scatters 4, each of which is half an all-reduce.
        there = max(there, 2 * (gpus - 1) / gpus * 4 * measured["params"] / network_gb_s / 1e6)
    step_ms = alone_ms + max(0.0, longer - here) + max(shown * there, there - HIDING[strategy] * alone_ms)
    return {
        "case": measured["case"],
        "variant": measured["variant"],
        "gpus": gpus,
        "kind": "modelled",
        "params": measured["params"],
        "batch_per_gpu": measured["batch_per_gpu"],
        "network_gb_s": network_gb_s,
        "median_ms": step_ms,
        "tokens_per_s": one["tokens_per_s"] * gpus * alone_ms / step_ms,
        "efficiency": alone_ms / step_ms,
        "communication_ms": there,
        "communication_share_exposed": shown,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", default=VARIANTS)
    parser.add_argument("--ranks", type=int, help="GPUs of the jobs with a strategy; default: all, two ranks on a CPU")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (%(default)s)")
    parser.add_argument("--job", nargs=3, metavar=("CASE", "VARIANT", "OUT"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.job:
        case, variant, out = asked.job
        with joined(hardware.detect().device) as watchdog:
            found = work(CASES[case], variant, asked.steps, watchdog)
            if dist.get_rank() == 0:
                Path(out).write_text(json.dumps(found))
        return
    hw = hardware.detect()
    gpus = torch.cuda.device_count() if hw.device == "cuda" else 0
    ranks = asked.ranks or gpus or 2
    if ranks < 2 or (gpus and ranks > gpus):
        sys.exit(f"scaling: {ranks} ranks, but {gpus} GPUs; at least 2 of each are needed")
    machine = replace(hw, gpu=f"{hw.gpu or 'cpu'} x{ranks}")
    cases = asked.cases or ([case for case in CASES if case != "tiny"] if gpus else ["tiny"])
    method = (
        f"a job a row; {WARMUP} steps of warm-up, {asked.steps} timed by CUDA events, batch and loss included; rank 0's median; "
        "efficiency: tokens/s over GPUs times the tokens/s of one-<precision>; communication alone: median of 10; modelled "
        "rows: see benchmarks.scaling.modelled"
    )
    rows = []
    for case in cases:
        one = {}  # precision -> the baseline's row
        for variant in asked.variants:
            strategy, name = variant.split("-")
            n = 1 if strategy == "one" else ranks
            with tempfile.TemporaryDirectory() as folder:
                out = os.path.join(folder, "job.json")
                told = ["-m", "benchmarks.scaling", "--job", case, variant, out, "--steps", str(asked.steps)]
                try:
                    torchrun(n, told, NCCL_NVLS_ENABLE="0")
                except RuntimeError as error:
                    print(f"{case} {variant}: {error}", flush=True)
                    continue
                found = json.loads(Path(out).read_text())
            new = [row_of(case, variant, n, found, one.get(name))]
            if strategy == "one":
                one[name] = new[0]
            elif name in one:
                new += [modelled(new[0], one[name], *target) for target in MODELLED]
            else:
                new[0]["efficiency"] = None  # its baseline failed or was not asked for
            rows += new
            results.merge("scaling", machine, new, method, keys=("case", "variant", "gpus", "kind", "network_gb_s"))
            print(f"{case} {variant}: {new[0]['median_ms']:.1f} ms, {new[0]['tokens_per_s']:,.0f} tokens/s", flush=True)
    if rows:
        shown = ["case", "variant", "gpus", "kind", "median_ms", "tokens_per_s", "efficiency", "gb_per_gpu"]
        shown += ["parameters_and_optimizer_gb", "communication_ms"]
        with pd.option_context("display.width", 200):
            print(pd.DataFrame(rows).reindex(columns=shown).round(3).to_string(index=False))


if __name__ == "__main__":
    main()
