"""Fair timing: rivals in alternation, after warm-up, by CUDA events; medians with their spread, and peak memory."""

import statistics
import time
from collections.abc import Callable

import pandas as pd
import torch


def quartiles(samples: list[float]) -> tuple[float, float]:
    """(median, interquartile range)."""
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return median, q3 - q1


def paired_speedup(
    reference: list[list[float]], rival: list[list[float]], resamples: int = 2000
) -> tuple[float, float, float]:
    """How many times faster than the reference: (ratio of the medians, both ends of its 95 % bootstrap interval).

    Both are lists of turns, each a list of ms; turn i of one stood beside turn i of the other. Whole turns are drawn, with
    replacement, the same ones for both, so that what disturbed a turn of both cancels. An interval that holds 1.0 is noise.
    """
    if len(reference) != len(rival) or len(rival) < 2:
        raise ValueError(f"{len(reference)} and {len(rival)} turns given; equally many and at least 2 are needed")
    turns = len(rival)
    draws = torch.randint(turns, (resamples, turns), generator=torch.Generator().manual_seed(0))

    def medians(samples):
        return torch.tensor(samples, dtype=torch.float64)[draws].flatten(1).quantile(0.5, dim=1)

    def median(samples):
        return statistics.median(ms for turn in samples for ms in turn)

    low, high = (
        (medians(reference) / medians(rival)).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    )
    return median(reference) / median(rival), low, high


def time_once(step: Callable[[], object], device: str) -> float:
    """Milliseconds of one call, the GPU's work included."""
    if device != "cuda":
        start = time.perf_counter()
        step()
        return 1000 * (time.perf_counter() - start)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def time_in_turns(
    rivals: dict[str, Callable[[], object]], device: str, warmup: int = 5, repeats: int = 20
) -> pd.DataFrame:
    """Times each rival `repeats` times, taking turns (a b a b …), so that a drifting clock hits all alike.

    One row a rival: variant, median_ms, iqr_ms, samples (ms).
    """
    if len(rivals) == 0 or repeats < 2:
        raise ValueError(f"{len(rivals)} rivals and {repeats} repeats given; at least 1 and 2 are needed")
    for step in rivals.values():
        for _ in range(warmup):
            step()
    samples = {name: [] for name in rivals}
    for _ in range(repeats):
        for name, step in rivals.items():
            samples[name].append(time_once(step, device))
    rows = []
    for name, ms in samples.items():
        median, iqr = quartiles(ms)
        rows.append({"variant": name, "median_ms": median, "iqr_ms": iqr, "samples": ms})
    return pd.DataFrame(rows)


def peak_memory_gb(build_and_step: Callable[[], object]) -> float | None:
    """Peak GPU memory (GB, 1e9 bytes) above what was allocated before; None without CUDA.

    Call it with a function that builds a model and runs a few steps: optimizer states appear at the first step.
    """
    if not torch.cuda.is_available():
        build_and_step()
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    build_and_step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9
