"""Where FP8 starts to pay: the time of a GEMM in BF16 and FP8, casts included, for any M, K and N.

Points are measured (RECORDED on an H200, or REAL on the reader's GPU). Between them stands a model, a roofline:

    GEMM:  max(launch, operations / ceiling, bytes / bandwidth)       operations 2·M·K·N
           bytes: both operands once (2 bytes an element in BF16, 1 in FP8) and the BF16 result once
    casts: max(launch, bytes / cast bandwidth)                        7 bytes an element as measured: two kernels,
           x * scale (read 2, write 2) and the conversion (read 2, write 1); 3 in one kernel (read 2, write 1)

Its constants come from the points: ceilings and cast bandwidth from the product with the most operations, the launch
from the shortest time of each kind, the bandwidth from whatever moved most bytes a second.
"""

import math
from dataclasses import dataclass

import matplotlib.pyplot as plt
import pandas as pd

from helpers import plots, results
from helpers.explorers.frame import Choice, Explorer, Number
from helpers.explorers.panel import INK, heading, panel, powers

TWO_KERNELS, ONE_KERNEL, INPUT_ONLY, NONE = (
    "both operands, two kernels each (plain PyTorch)",
    "both operands, one kernel each",
    "the input only, one kernel (weight cast before)",
    "none",
)
CAST_BYTES = {TWO_KERNELS: (7, 7), ONE_KERNEL: (3, 3), INPUT_ONLY: (3, 0), NONE: (0, 0)}  # an element of x, of w
SIZE = {"bf16": 2, "fp8": 1}  # bytes of an operand's element
COLOUR = {"bf16": plots.COLORS[0], "fp8": plots.COLORS[1], "fp8_with_cast": plots.COLORS[2]}
MARKER = {"bf16": "o", "fp8": "s", "fp8_with_cast": "^"}
NAME = {"bf16": "BF16", "fp8": "FP8", "fp8_with_cast": "FP8 and casts"}
M_RANGE = (16, 65536)


def operations(m: int, k: int, n: int) -> int:
    return 2 * m * k * n


def gemm_bytes(precision: str, m: int, k: int, n: int) -> int:
    return SIZE[precision] * (m * k + n * k) + 2 * m * n


@dataclass(frozen=True)
class Model:
    """Times in ms, operations and bytes a ms."""

    ceiling: dict[str, float]
    launch: dict[str, float]  # the least time of a GEMM, and of the casts ("cast")
    bandwidth: float
    cast_bandwidth: float

    def gemm_ms(self, precision: str, m: int, k: int, n: int) -> float:
        needed = operations(m, k, n) / self.ceiling[precision], gemm_bytes(precision, m, k, n) / self.bandwidth
        return max(self.launch[precision], *needed)

    def cast_ms(self, casts: str, m: int, k: int, n: int) -> float:
        of_x, of_w = CAST_BYTES[casts]
        launch = self.launch["cast"] * (of_x + of_w) / sum(CAST_BYTES[TWO_KERNELS])  # fewer kernels, fewer launches
        return max(launch, (of_x * m * k + of_w * n * k) / self.cast_bandwidth)

    def times(self, casts: str, m: int, k: int, n: int) -> dict[str, float]:
        ms = {precision: self.gemm_ms(precision, m, k, n) for precision in SIZE}
        return ms | {"fp8_with_cast": ms["fp8"] + self.cast_ms(casts, m, k, n)}


def fit(points: pd.DataFrame) -> Model:
    """The model's constants from measured times: rows of m, k, n, precision (bf16, fp8, fp8_with_cast) and median_ms."""
    ms = points.pivot_table(index=["m", "k", "n"], columns="precision", values="median_ms")
    casting = ms["fp8_with_cast"] - ms["fp8"]
    per_element, _ = CAST_BYTES[TWO_KERNELS]
    cast_speed = pd.Series(
        {shape: per_element * (shape[0] + shape[2]) * shape[1] / casting[shape] for shape in ms.index}
    )
    largest = max(ms.index, key=lambda shape: operations(*shape))
    gemm_speed = max(gemm_bytes(p, *shape) / ms.loc[shape, p] for shape in ms.index for p in SIZE)
    return Model(
        {precision: operations(*largest) / ms.loc[largest, precision] for precision in SIZE},
        {precision: ms[precision].min() for precision in SIZE} | {"cast": casting.min()},
        max(gemm_speed, cast_speed.max()),
        cast_speed[largest],
    )


def gain_error(model: Model, points: pd.DataFrame) -> float:
    """The largest difference between modelled and measured gain (BF16 over FP8 with casts) over all measured shapes."""
    ms = points.pivot_table(index=["m", "k", "n"], columns="precision", values="median_ms")
    measured = ms["bf16"] / ms["fp8_with_cast"]
    modelled = {shape: model.times(TWO_KERNELS, *shape) for shape in ms.index}
    return max(abs(modelled[s]["bf16"] / modelled[s]["fp8_with_cast"] - measured[s]) for s in ms.index)


def break_even(model: Model, casts: str, k: int, n: int) -> int | None:
    """The least M, in steps of a quarter of an octave, from which on FP8 with its casts is faster. None: there is none."""
    low, high = (int(4 * math.log2(end)) for end in M_RANGE)
    sizes = [round(2 ** (quarter / 4) / 16) * 16 for quarter in range(low, high + 1)]
    times = {m: model.times(casts, m, k, n) for m in sizes}
    slower = [m for m in sizes if times[m]["fp8_with_cast"] >= times[m]["bf16"]]
    return next((m for m in sizes if not slower or m > slower[-1]), None)


def draw_roofline(figure, model: Model, points: pd.DataFrame, kind: str, m: int, k: int, n: int) -> None:
    """Speed against operations a byte: measured points, the two roofs, the chosen product on its roof."""
    xlim, ylim = (4, 13), (1, 11)
    axes = panel(
        figure, [0.085, 0.15, 0.37, 0.6], "Roofline", "operations a byte", "TFLOP/s",
        xlim, ylim, powers(2, *xlim, 2), {tick: str(2**tick) for tick in range(1, 12, 2)},
    )  # fmt: skip
    for precision in SIZE:
        corner = math.log2(model.ceiling[precision] / model.bandwidth)
        top = math.log2(model.ceiling[precision] / 1e9)
        line = "-" if precision == "bf16" else "--"
        axes.plot(
            [xlim[0], corner, xlim[1]], [top - corner + xlim[0], top, top], line, color=COLOUR[precision], linewidth=1.5
        )
        rows = points[points["precision"] == precision]
        shapes = list(zip(rows["m"], rows["k"], rows["n"], strict=True))
        at = [math.log2(operations(*s) / gemm_bytes(precision, *s)) for s in shapes]
        speed = [math.log2(operations(*s) / t / 1e9) for s, t in zip(shapes, rows["median_ms"], strict=True)]
        open_symbols = {"marker": MARKER[precision], "linestyle": "none", "fillstyle": "none"}
        axes.plot(at, speed, color=COLOUR[precision], label=f"{NAME[precision]}, {kind}", **open_symbols)
        here = operations(m, k, n) / gemm_bytes(precision, m, k, n)
        reached = operations(m, k, n) / model.gemm_ms(precision, m, k, n) / 1e9
        axes.plot(math.log2(here), math.log2(reached), "*", color=COLOUR[precision], markersize=13)
    axes.legend(loc="lower right", fontsize=9)


def draw_times(figure, model: Model, points: pd.DataFrame, casts: str, m: int, k: int, n: int) -> None:
    """Time against M for the chosen K and N, and the measured points of that K and N."""
    xlim = tuple(math.log2(end) for end in M_RANGE)
    sizes = [2 ** (quarter / 2) for quarter in range(int(2 * xlim[0]), int(2 * xlim[1]) + 1)]
    curves = {name: [math.log10(model.times(casts, size, k, n)[name]) for size in sizes] for name in NAME}
    low, high = math.floor(min(curves["fp8"])), math.ceil(max(map(max, curves.values())))
    axes = panel(
        figure, [0.585, 0.15, 0.38, 0.6], f"MODELLED time, K = {k:,}, N = {n:,}", "M", "ms",
        xlim, (low, high), {tick: f"{2**tick:,}" for tick in range(4, 17, 4)}, {tick: f"{10.0**tick:g}" for tick in range(low, high + 1)},
    )  # fmt: skip
    same = points[(points["k"] == k) & (points["n"] == n)]
    for name, line in zip(NAME, ("-", ":", "--"), strict=True):
        style = {"color": COLOUR[name], "linestyle": line, "linewidth": 1.8}
        axes.plot([math.log2(size) for size in sizes], curves[name], label=NAME[name], **style)
        if name != "fp8_with_cast" or casts == TWO_KERNELS:
            rows = same[same["precision"] == name]
            at, ms = (rows["m"].map(math.log2), rows["median_ms"].map(math.log10))
            axes.plot(at, ms, marker=MARKER[name], color=COLOUR[name], linestyle="none", fillstyle="none")
    axes.axvline(math.log2(m), color=INK, linewidth=1.2, linestyle="-")
    axes.legend(loc="upper left", fontsize=9)


def explore_break_even(points: pd.DataFrame | None = None, caption: str = "") -> Explorer:
    """BF16 against FP8 for a product of (M, K) and (K, N). `points` as for `fit`; without them, what an H200 measured."""
    if points is None:
        sweep = (results.RECORDED / "nvidia-h200" / "gemm_sweep.json").exists()
        points, caption = results.recorded("gemm_sweep" if sweep else "01_gemm")
    model, kind = fit(points), caption.split()[0].rstrip(":")
    close = f"there the model's gain is off by {gain_error(model, points):.2f} at most"

    def draw(m: int, k: int, n: int, casts: str):
        ms = model.times(casts, m, k, n)
        gain, start = ms["bf16"] / ms["fp8_with_cast"], break_even(model, casts, k, n)
        pays = "at any M" if start == M_RANGE[0] else f"from M = {start:,} on" if start else "at no M up to 65,536"
        figure = plt.figure(figsize=(8.5, 4.6))
        draw_roofline(figure, model, points, kind, m, k, n)
        draw_times(figure, model, points, casts, m, k, n)
        heading(figure, f"M = {m:,}: FP8 with its casts runs at {gain:.2f} x the speed of BF16; it pays {pays}")
        figure.text(0.012, 0.885, f"Lines and stars: MODELLED. Open symbols: {kind}; {close}.", fontsize=10)
        sentence = (
            f"MODELLED for M = {m:,}, K = {k:,}, N = {n:,}: BF16 {ms['bf16']:.3g} ms, FP8 {ms['fp8']:.3g} ms and "
            f"{ms['fp8_with_cast'] - ms['fp8']:.3g} ms of casts: {gain:.2f} times the speed of BF16. "
            f"With these K and N it pays {pays}."
        )
        here = points[(points["m"] == m) & (points["k"] == k) & (points["n"] == n)].set_index("precision")["median_ms"]
        if len(here) and casts == TWO_KERNELS:
            listed = ", ".join(f"{NAME[p]} {here[p]:.3g} ms" for p in NAME)
            sentence += f" {kind}: {listed}: {here['bf16'] / here['fp8_with_cast']:.2f} times."
        return figure, sentence

    def size(label, start, low, high):
        return Number(label, start, low, high, step=16, log=2)

    return Explorer(
        draw,
        m=size("M, rows of the input (tokens)", 8192, *M_RANGE),
        k=size("K, input features", 4096, 64, 32768),
        n=size("N, output features", 16384, 64, 32768),
        casts=Choice("casts", TWO_KERNELS, tuple(CAST_BYTES)),
    )
