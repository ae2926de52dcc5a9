"""One variant in a process of its own, told by pipe what to do and when. benchmarks/training_step.py starts it.

    python -m benchmarks.worker CASE VARIANT

Reads one command a line on stdin ("losses 10", "time 6", "memory", "kernels", "ceiling") and answers each with one line of JSON.
A process of its own, since a rival may recompile, fragment memory or fail without harm to the others.
"""

import gc
import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks import variants
from helpers.hardware import import_te

CATEGORIES = (  # the first whose pattern is in a kernel's name; names as seen on an H200
    ("FP8 GEMM", r"nvjet_qq|e4m3.*gemm|e5m2.*gemm|gemm.*e4m3|f8f8|_scaled_mm"),
    ("attention", r"flash|fmha|attention|cudnn_generated|sdpa"),
    ("GEMM", r"nvjet|gemm|cutlass|cublas"),
    ("optimizer", r"adam|multi_tensor"),
    ("casts, transposes", r"cast|transpose|quantize|amax|scale_update"),
    ("LayerNorm", r"ln_|norm"),
    ("copies", r"memcpy|memset|copy"),
)


class Worker:
    def __init__(self, case: str, variant: str):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.case = variants.CASES[case]
        import_te()  # before anything touches cuDNN: see helpers/hardware.py
        self.batches = self.case.batches(self.device)
        self.step = variants.build(variant, case, self.device)
        self.taken = 0

    def take(self) -> torch.Tensor:
        self.taken += 1
        return self.step(*next(self.batches))

    def losses(self, n: int) -> list[float]:
        losses = []
        for _ in range(n):
            losses.append(self.take().item())
            if losses[-1] != losses[-1] or abs(losses[-1]) == float("inf"):
                raise FloatingPointError(f"the loss of step {self.taken} is {losses[-1]}")
        return losses

    def time(self, n: int) -> list[float]:
        """Milliseconds of n steps in a row. The first of a turn is taken before, untimed: the GPU was someone else's."""
        batches = [next(self.batches) for _ in range(n + 1)]  # data are not part of the step
        if self.device == "cpu":
            self.step(*batches[0])
            marks = [time.perf_counter()]
            for batch in batches[1:]:
                self.step(*batch)
                marks.append(time.perf_counter())
            return [1000 * (b - a) for a, b in pairwise(marks)]
        self.step(*batches[0])
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
        events[0].record()
        for batch, event in zip(batches[1:], events[1:], strict=True):
            self.step(*batch)
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(events)]

    def memory(self) -> dict:
        """Peaks since the process started, in GB of 10^9 bytes. What a CUDA graph holds shows in the reserved memory only."""
        if self.device == "cpu":
            return {"allocated_gb": None, "reserved_gb": None}
        return {
            "allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
            "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        }

    def kernels(self) -> dict:
        """From the profiler's trace of 3 steps: kernels and busy ms a step, ms by category, the ten longest by name."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            for _ in range(3):
                self.take()
            if self.device == "cuda":
                torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        by_name, by_category, count = defaultdict(float), defaultdict(float), 0
        for event in events:
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
                ms, name = event["dur"] / 3000, event["name"]
                by_name[name[:100]] += ms
                by_category[next((c for c, p in CATEGORIES if re.search(p, name.lower())), "other")] += ms
                count += 1
        longest = sorted(by_name.items(), key=lambda item: -item[1])[:10]
        return {
            "kernels": count / 3,
            "gpu_busy_ms": sum(by_name.values()),
            "ms_by_category": dict(by_category),
            "longest_kernels_ms": dict(longest),
        }


def ceiling(case: str) -> dict:
    """TFLOP/s of the largest GEMM of the model, alone: {"bf16": …, "fp8": …}, best of ten medians of five."""
    it = variants.CASES[case]
    m, k, n = it.tokens, it.config.d_model, 4 * it.config.d_model
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = (torch.randn(rows, k, device=device).bfloat16() for rows in (m, n))
    gemms = {"bf16": lambda: a @ b.t()}
    if device == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
        one = torch.ones((), device=device)
        a8, b8 = (t.to(torch.float8_e4m3fn) for t in (a, b))
        gemms["fp8"] = lambda: torch._scaled_mm(
            a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    found = {}
    for name, gemm in gemms.items():
        for _ in range(3):
            gemm()
        best = float("inf")
        for _ in range(5):
            if device == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(20):
                    gemm()
                end.record()
                end.synchronize()
                best = min(best, start.elapsed_time(end) / 20)
            else:
                started = time.perf_counter()
                gemm()
                best = min(best, 1000 * (time.perf_counter() - started))
        found[name] = 2 * m * n * k / best / 1e9
    return found


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    case, variant = sys.argv[1:]
    worker = None
    try:
        if variant == "ceiling":
            print(json.dumps({"ok": ceiling(case)}), file=answers)
            return
        worker = Worker(case, variant)
        gc.collect()
        print(json.dumps({"ok": "ready"}), file=answers)
        for line in sys.stdin:
            command, *arguments = line.split()
            print(json.dumps({"ok": getattr(worker, command)(*map(int, arguments))}), file=answers)
    except torch.OutOfMemoryError as error:
        print(json.dumps({"error": f"out of memory: {str(error).splitlines()[0]}"}), file=answers)
    except Exception as error:
        message = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        print(json.dumps({"error": message[:300]}), file=answers)


if __name__ == "__main__":
    main()
