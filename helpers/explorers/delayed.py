"""Delayed scaling at work on a signal that one shapes: spikes, drift and noise; the history's length, the algorithm, the margin."""

import math

import matplotlib.pyplot as plt
import torch

from helpers import formats, plots
from helpers.emulation import DelayedScaling, ScalingState
from helpers.explorers.frame import Choice, Explorer, Number
from helpers.explorers.panel import INK, heading, panel, powers

STEPS, FIRST_SPIKE = 64, 12  # so a spike every 52 steps comes once
FORMATS = {"E4M3": formats.E4M3, "E5M2": formats.E5M2}


def signal(spike: float, every: int, drift: float, noise: float) -> torch.Tensor:
    """The amax of each of 64 steps: 3 at first, times 2^(drift x step), times noise; every `every`-th step `spike` times that."""
    step = torch.arange(STEPS)
    normal = torch.randn(STEPS, generator=torch.Generator().manual_seed(6))
    amax = 3.0 * torch.exp2(drift * step + noise * normal)
    spikes = (step >= FIRST_SPIKE) & ((step - FIRST_SPIKE) % every == 0)
    return torch.where(spikes, amax * spike, amax)


def scales_for(amaxes: torch.Tensor, length: int, algorithm: str, margin: int, fmt: formats.Format) -> torch.Tensor:
    """The scale that each step quantizes with: the state's before the step."""
    state = ScalingState(1, length, torch.device("cpu"))
    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm, margin=margin)
    used = []
    for amax in amaxes:
        used.append(state.scale.clone())
        state.record(0, amax)
        state.update(recipe, fmt.max)
    return torch.cat(used)


def draw(spike: float, every: int, drift: float, noise: float, length: int, algorithm: str, margin: int, format: str):
    """The signal inside the band that each step's scale lets through, and how far the scale is from ideal. (figure, sentence).

    Above the band a value is cut off, below it the value rounds to zero. Arguments as for `signal` and DelayedScaling.
    """
    fmt = FORMATS[format]
    amax = signal(spike, every, drift, noise)
    scale = scales_for(amax, length, algorithm, margin, fmt)
    top, bottom = (fmt.max / scale).log2(), (fmt.min_subnormal / 2 / scale).log2()
    at, height = range(STEPS), amax.log2()
    over = height > top + 1e-6
    wasted = top - height  # octaves between the amax and the largest number
    low, high = math.floor(min(height.min(), bottom[1:].min())) - 1, math.ceil(max(height.max(), top[1:].max())) + 1

    figure = plt.figure(figsize=(8.5, 4.8))
    steps = {step: str(step) for step in range(0, STEPS + 1, 8)}
    magnitudes = powers(2, low, high, 4 if high - low < 48 else 8)
    box, xlim = [0.11, 0.13, 0.87, 0.7], (-0.5, STEPS - 0.5)
    axes = panel(figure, box, "", "step", "magnitude (log scale)", xlim, (low, high), steps, magnitudes)
    held = {"label": f"what {format} holds", "step": "mid", "color": "#d9e7f2"}
    axes.fill_between(at, bottom.clamp(min=low), top.clamp(max=high), **held)
    edge = {"label": "largest number / step's scale", "drawstyle": "steps-mid", "linestyle": "--", "linewidth": 1.2}
    axes.plot(at, top, color=plots.COLORS[0], **edge)
    points = {"label": "amax of the step", "marker": "o", "markersize": 4, "linestyle": "-", "linewidth": 0.8}
    axes.plot(at, height, color=INK, **points)
    crosses = {"label": "cut off", "marker": "x", "markersize": 10, "markeredgewidth": 2, "linestyle": "none"}
    axes.plot([s for s in at if over[s]], height[over], color=plots.COLORS[1], **crosses)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), fontsize=10, ncol=4, columnspacing=1.2)

    cut, idle = int(over.sum()), wasted[1:].clamp(min=0).mean().item()
    title = f"{cut} of {STEPS} steps are cut off; {idle:.1f} octaves of range lie idle on average"
    heading(figure, title)
    known = "the newest amax" if algorithm == "most_recent" else f"the largest amax of {length} steps"
    how_far = f", the worst at {2 ** -wasted.min().item():.3g} times the largest number" if cut else ""
    sentence = f"A scale from {known}, margin {margin}: {cut} of {STEPS} steps are cut off{how_far}; "
    return figure, f"{sentence}on average {idle:.1f} octaves of range lie idle above the amax."


def explore_delayed_scaling(length: int = 16) -> Explorer:
    """The emulator's delayed scaling, the same bit for bit as TE's, fed with a made-up signal."""
    return Explorer(
        draw,
        spike=Number("spikes, times the signal", 20, 1, 1000, step=0.5, log=10),
        every=Number("a spike every … steps", 52, 2, 52),
        drift=Number("drift, octaves a step", 0, -0.5, 0.5, step=0.05),
        noise=Number("noise, octaves", 0.2, 0, 2, step=0.1),
        length=Number("amax_history_len", length, 1, 64),
        algorithm=Choice("amax_compute_algo", "max", ("max", "most_recent")),
        margin=Number("margin", 0, 0, 4),
        format=Choice("format", "E4M3", tuple(FORMATS)),
    )
