"""What a linear layer's GEMMs take in BF16 and in FP8, casts included, over tokens M, inputs K and outputs N.

    python -m benchmarks.gemm_sweep [--tokens 512 2048 8192 32768] [--widths 512 1024 2048 4096 8192]

Training a linear layer takes three GEMMs: y = x Wᵀ (M, K, N), dx = dy W (M, N, K) and dW = dyᵀ x (N, M, K). In FP8 each of
x, W and dy is cast first, once, to rows and to columns, as a Hopper GEMM needs both. Everything is timed inside CUDA graphs,
so that no launch counts, on operands that rotate through more memory than the L2 cache holds. Writes gemm_sweep.json.
"""

import argparse
import importlib
import statistics
from collections.abc import Callable
from itertools import product

import pandas as pd
import torch

from helpers import hardware, results
from helpers.benchmark import quartiles

CALLS, REPLAYS = 12, 7
ROTATE_BYTES = 128e6  # an H200's L2 cache holds 50 MB


def time_graphed(call: Callable[[int], object], copies: int) -> tuple[float, float]:
    """Milliseconds of one `call(i)`: (median, interquartile range) over replays of a graph of CALLS calls; i < copies."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(2):
            call(i % copies)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i % copies)
    graph.replay()
    samples = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / CALLS)
    return quartiles(samples)


def random_copies(rows: int, columns: int) -> list[torch.Tensor]:
    """BF16 matrices of random numbers (zeros would draw less power and run faster), enough of them to miss the cache."""
    copies = max(1, min(CALLS, round(ROTATE_BYTES / (2 * rows * columns))))
    return [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]


def gemm_times(m: int, n: int, k: int, dtypes: tuple, fast: bool) -> dict:
    """a (m, k) times b (n, k) transposed, in BF16 and in FP8 of `dtypes`: ms and TFLOP/s."""
    a, b = random_copies(m, k), random_copies(n, k)
    copies = min(len(a), len(b))
    one = torch.ones((), device="cuda")
    a8, b8 = ([t.to(dtype) for t in tensors] for tensors, dtype in zip((a, b), dtypes, strict=True))
    calls = {
        "bf16": lambda i: a[i] @ b[i].t(),
        "fp8": lambda i: torch._scaled_mm(
            a8[i], b8[i].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
        ),
    }
    found = {}
    for name, call in calls.items():
        found[f"{name}_ms"], found[f"{name}_iqr_ms"] = time_graphed(call, copies)
        found[f"{name}_tflops"] = 2 * m * n * k / found[f"{name}_ms"] / 1e9
    return found


def cast_time(rows: int, columns: int, dtype_name: str) -> tuple[float, float]:
    """TE's cast of a BF16 matrix to FP8 with a known scale, to rows and columns: (median ms, interquartile range)."""
    te = importlib.import_module("transformer_engine.pytorch")
    dtype = getattr(importlib.import_module("transformer_engine_torch").DType, dtype_name)
    scale, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    quantizer = te.Float8Quantizer(scale=scale, amax=amax, fp8_dtype=dtype, rowwise=True, columnwise=True)
    tensors = random_copies(rows, columns)
    return time_graphed(lambda i: quantizer(tensors[i]), len(tensors))


def measure(m: int, k: int, n: int) -> dict:
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    gemms = {
        "fprop": gemm_times(m, n, k, (e4m3, e4m3), fast=True),
        "dgrad": gemm_times(m, k, n, (e5m2, e4m3), fast=False),
        "wgrad": gemm_times(n, k, m, (e5m2, e4m3), fast=False),
    }
    casts = {
        "x": cast_time(m, k, "kFloat8E4M3"),
        "w": cast_time(n, k, "kFloat8E4M3"),
        "dy": cast_time(m, n, "kFloat8E5M2"),
    }
    row = {"m": m, "k": k, "n": n, "kind": "measured"}
    row |= {f"{gemm}_{what}": value for gemm, found in gemms.items() for what, value in found.items()}
    row |= {f"cast_{name}_ms": median for name, (median, _) in casts.items()}
    row["bf16_ms"] = sum(found["bf16_ms"] for found in gemms.values())
    row["fp8_gemm_ms"] = sum(found["fp8_ms"] for found in gemms.values())
    row["cast_ms"] = sum(median for median, _ in casts.values())
    row["fp8_ms"] = row["fp8_gemm_ms"] + row["cast_ms"]
    row["speedup"] = row["bf16_ms"] / row["fp8_ms"]
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192, 32768])
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    options = parser.parse_args()
    hw = hardware.detect()
    if not hw.fp8:
        raise SystemExit(f"gemm_sweep: FP8 GEMMs are not REAL here: {hw.recipes['delayed']}")
    if bad := [size for size in options.tokens + options.widths if size % 16]:
        raise SystemExit(f"gemm_sweep: {bad} given; FP8 needs multiples of 16")
    rows = [measure(m, k, n) for m, k, n in product(options.tokens, options.widths, options.widths)]
    # What a copy reaches, for the roofline: bytes read and written by the time.
    big = torch.empty(2**28, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(big)
    ms, _ = time_graphed(lambda _: out.copy_(big), 1)
    bandwidth = 2 * big.numel() * big.element_size() / ms / 1e6
    rows = [row | {"copy_gb_per_s": bandwidth} for row in rows]
    method = (
        f"CUDA graphs of {CALLS} calls, median of {REPLAYS} replays, operands rotate through {ROTATE_BYTES / 1e6:.0f} MB, random "
        "numbers; fprop E4M3 x E4M3 with fast, dgrad and wgrad E5M2 x E4M3 with split accumulation; casts by TE's Float8Quantizer"
    )
    print(results.save("gemm_sweep", hw, rows, method, command="python -m benchmarks.gemm_sweep"))
    table = pd.DataFrame(rows)
    for m in options.tokens:
        print(f"speedup with casts, {m} tokens (rows K, columns N)")
        print(table[table["m"] == m].pivot(index="k", columns="n", values="speedup").round(2).to_string())
    print(
        f"copy: {bandwidth:.0f} GB/s; median IQR/ms of fprop fp8: {statistics.median(table['fprop_fp8_iqr_ms'] / table['fprop_fp8_ms']):.3f}"
    )


if __name__ == "__main__":
    main()
