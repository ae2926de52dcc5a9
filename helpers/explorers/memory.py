"""Peak memory of a training step by component, against batch, sequence length and precision. By formula (MODELLED).

The step is this workshop's: FP32 weights, gradients and Adam states in every precision, flash attention, no
recomputation, old gradients dropped after the forward pass. d: width, L: layers, P: parameters, T: tokens (batch times length).

    weights 4P, gradients 4P, Adam's two states 8P
    copies of the blocks' weights: BF16 2 bytes each; FP8 1 + 1, since Hopper also needs the transpose
    kept for backward, bytes a token, layer and unit of width:
        LayerNorm's input, twice     2 + 2    (4 + 4 in PyTorch, whose autocast computes LayerNorm in FP32)
        LayerNorm's result, twice    2 + 2    (1 + 1 in FP8)
        q, k, v; attention's result  6 + 2    (in FP8 also a copy of the result for the next GEMM, 1)
        fc1's result, GELU's result  8 + 8    (8 + 4 in FP8)
    at the start of backward: the gradients of those last two in one block, 16 d T; logits and loss, 12 bytes a logit

Against the peaks that an H200 recorded it is off by about 1 % (tests/test_explorers.py).
"""

import math
from dataclasses import replace

import matplotlib.pyplot as plt

from helpers import models, plots, results
from helpers.explorers.frame import Choice, Explorer, Number
from helpers.explorers.panel import INK, heading, panel

KEPT = {"BF16 in PyTorch": 36, "BF16 in TE": 32, "FP8 in TE": 27}  # bytes for backward a token, layer and unit of width
RECORDED_AS = {"BF16 in PyTorch": "torch-eager-bf16", "BF16 in TE": "te-bf16", "FP8 in TE": "te-fp8-delayed"}
CASES = {"compact": "compact", "scale_up": "scale_up_256"}  # of results/*/04_benchmark.json, batch 32, 256 tokens
PARTS = ("weights, FP32", "gradients, FP32", "Adam's states, FP32", "copies of weights", "activations")
HATCHES = ("", "//", "..", "xx", "")
COLOURS = (*plots.COLORS[:3], plots.COLORS[5], "#cccccc")
BATCHES = (1, 512)


def components(config: models.GPTConfig, batch: int, precision: str) -> dict[str, float]:
    """GB (10^9 bytes) by component at the peak of a training step."""
    d, layers, tokens, params = config.d_model, config.n_layers, batch * config.seq_len, config.n_params()
    copies = 2 * layers * 12 * d * d
    activations = KEPT[precision] * d * tokens * layers + 16 * d * tokens + 12 * config.vocab * tokens
    parts = (4 * params, 4 * params, 8 * params, copies, activations)
    return {name: size / 1e9 for name, size in zip(PARTS, parts, strict=True)}


def nice_ticks(top: float) -> dict[float, str]:
    """About five round places from 0 to `top`."""
    step = 10 ** math.floor(math.log10(top / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if top / (factor * step) <= 6)
    return {i * step: f"{i * step:g}" for i in range(int(top / step) + 1)}


def draw_bars(figure, totals: dict[str, dict[str, float]], recorded: dict[str, float]) -> None:
    """One bar a precision, cut into components; a diamond where a peak was recorded."""
    top = 1.12 * max(sum(parts.values()) for parts in totals.values())
    ticks = {y: name.replace(" in ", "\nin ") for y, name in enumerate(totals)}
    axes = panel(
        figure, [0.1, 0.15, 0.37, 0.56], "Each precision", "GB", "", (0, top), (2.6, -0.6), nice_ticks(top), ticks
    )
    for y, (name, parts) in enumerate(totals.items()):
        start = 0.0
        for part, colour, hatch in zip(PARTS, COLOURS, HATCHES, strict=True):
            style = {"color": colour, "hatch": hatch, "edgecolor": "white"}
            axes.barh(y, parts[part], 0.62, left=start, label=part if y == 0 else "", **style)
            start += parts[part]
        if name in recorded:
            style = {"color": INK, "markersize": 7, "fillstyle": "none"}
            axes.plot(recorded[name], y, "D", label="RECORDED" if y == 0 else "", **style)
    place = {"loc": "lower left", "bbox_to_anchor": (-0.25, 1.12), "ncol": len(PARTS) + 1}
    axes.legend(fontsize=9, columnspacing=1, handlelength=1.4, **place)


def draw_batches(figure, config: models.GPTConfig, batch: int, precision: str) -> None:
    """The components of one precision against the batch."""
    sizes = [2 ** (i / 2) for i in range(2 * int(math.log2(BATCHES[1])) + 1)]
    columns = [components(config, size, precision) for size in sizes]
    top = 1.5 * sum(components(config, batch, precision).values())
    xlim, ticks = (0, math.log2(BATCHES[1])), {i: str(2**i) for i in range(0, 10, 2)}
    axes = panel(figure, [0.57, 0.15, 0.41, 0.56], precision, "batch", "GB", xlim, (0, top), ticks, nice_ticks(top))
    places, below = [math.log2(size) for size in sizes], [0.0] * len(sizes)
    for part, colour, hatch in zip(PARTS, COLOURS, HATCHES, strict=True):
        above = [start + column[part] for start, column in zip(below, columns, strict=True)]
        axes.fill_between(places, below, above, facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
        below = above
    axes.vlines(math.log2(batch), 0, top, color=INK, linewidth=1.2)


def draw(model: str, batch: int, length: int, precision: str):
    """(figure, sentence) for one of the presets with another batch and sequence length."""
    config = replace(models.preset(model).config, seq_len=length)
    totals = {name: components(config, batch, name) for name in KEPT}
    gb = {name: sum(parts.values()) for name, parts in totals.items()}
    recorded = {}
    if model in CASES and (batch, length) == (32, 256):
        rows, _ = results.recorded("04_benchmark")
        rows = rows[rows["case"] == CASES[model]].set_index("variant")["allocated_gb"]
        recorded = {name: rows[variant] for name, variant in RECORDED_AS.items()}
    change = gb["FP8 in TE"] / gb["BF16 in TE"] - 1
    figure = plt.figure(figsize=(8.5, 4.4))
    draw_bars(figure, totals, recorded)
    draw_batches(figure, config, batch, precision)
    fixed = sum(totals["FP8 in TE"][part] for part in PARTS[:3]) / gb["FP8 in TE"]
    title = f"MODELLED: FP8 takes {abs(change):.0%} {'less' if change < 0 else 'more'} than BF16 in TE"
    heading(figure, f"{title}; {fixed:.0%} of its memory stays FP32 in any precision")
    listed = ", ".join(f"{name} {size:.3g} GB" for name, size in gb.items())
    sentence = f"MODELLED for {config.d_model} x {config.n_layers}, batch {batch}, {length} tokens: {listed}. "
    sentence += f"{precision}: {'; '.join(f'{part} {size:.3g} GB' for part, size in totals[precision].items())}."
    if recorded:
        sentence += f" RECORDED on an H200: {', '.join(f'{name} {size:.3g} GB' for name, size in recorded.items())}."
    return figure, sentence


def explore_memory(model: str = "scale_up") -> Explorer:
    """Where the memory of a training step goes."""
    return Explorer(
        draw,
        model=Choice("model (preset)", model, tuple(models.PRESETS)),
        batch=Number("batch, sequences", 32, *BATCHES, log=2),
        length=Number("sequence length, tokens", 256, 64, 4096, step=16, log=2),
        precision=Choice("precision, right panel", "FP8 in TE", tuple(KEPT)),
    )
