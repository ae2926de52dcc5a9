"""FP8 state by layer and step: amax, scale, room above underflow and range used, from a recorded run."""

import math
from functools import cache

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from helpers import formats, plots
from helpers.explorers.frame import Choice, Explorer, Number
from helpers.explorers.panel import INK, heading, panel, powers

AMAX, SCALE, ROOM, USED = (
    "amax (log2)",
    "scale in use (log2)",
    "room above underflow (octaves)",
    "range used (log2)",
)
GAP = 3  # columns between the roles' maps


def explore_state(scale: pd.DataFrame, amax: pd.DataFrame, gradients: str = "E5M2") -> Explorer:
    """A run's scales and amaxes: one row a step, columns (role, layer), each value the one *after* the step.

    A step quantizes with the scale that the step before left, 1 in the first. The room above underflow is log2 of
    amax x scale over half the format's smallest number: at 0 or less, all of the tensor rounds to zero. The range used is
    log2 of amax x scale over the format's largest number: above 0, the largest values were cut off. `gradients` names
    the format of the role grad_output; all others are E4M3.
    """
    roles, layers = list(amax.columns.unique("role")), list(amax.columns.unique("layer"))
    steps = len(amax)
    fmt = {role: formats.FORMATS[gradients if role == "grad_output" else "E4M3"] for role in roles}
    in_use = {role: scale.shift(1, fill_value=1.0)[role][layers].to_numpy() for role in roles}  # (steps, layers)
    seen = {role: amax[role][layers].to_numpy() for role in roles}
    height = {role: np.log2(np.where(seen[role] > 0, seen[role], np.nan)) for role in roles}
    factor = {role: np.log2(in_use[role]) for role in roles}
    largest = {role: math.log2(fmt[role].max) for role in roles}
    flushed = {  # half the smallest number rounds to zero
        role: math.log2(fmt[role].min_subnormal) - 1 for role in roles
    }

    @cache
    def values(quantity: str, role: str) -> np.ndarray:
        """(steps, layers); NaN where amax is 0."""
        if quantity in (AMAX, SCALE):
            return height[role] if quantity == AMAX else factor[role]
        return height[role] + factor[role] - (flushed if quantity == ROOM else largest)[role]

    @cache
    def image(quantity: str) -> tuple[np.ndarray, dict[str, str]]:
        """The maps of all roles side by side, (layers, columns), each from 0 to 1, and each role's ends in words."""
        maps, ends = [], {}
        for role in roles:
            shown = values(quantity, role).T
            low, high = np.nanmin(shown), np.nanmax(shown)
            ends[role] = f"{role}: {low:.1f} to {high:.1f}"
            maps += [(shown - low) / max(high - low, 1e-9), np.full((len(layers), GAP), np.nan)]
        return np.hstack(maps[:-1]), ends

    def draw_maps(figure, quantity: str, role: str, layer: int, step: int) -> None:
        """Layer by step for each role; the chosen step's values beside the layers' names, so colour is not needed."""
        width, rows = len(roles) * (steps + GAP) - GAP, len(layers)
        starts = {name: i * (steps + GAP) for i, name in enumerate(roles)}
        ticks = {start + s: str(s) for start in starts.values() for s in range(0, steps, 20)}
        at = values(quantity, role)[step]
        names = {row: f"{name}  {'zero' if np.isnan(at[row]) else f'{at[row]:.1f}'}" for row, name in enumerate(layers)}
        box = [0.15, 0.5, 0.83, 0.36]
        axes = panel(figure, box, "", "training step", "", (-0.5, width - 0.5), (rows - 0.5, -0.5), ticks, names)
        shades, ends = image(quantity)
        axes.imshow(shades, aspect="auto", cmap="viridis", interpolation="nearest", zorder=1)
        for name, start in starts.items():
            weight = "bold" if name == role else "normal"
            axes.text(start, -0.8, ends[name], fontsize=10, fontweight=weight)
        for colour, thickness in (("black", 3.0), ("white", 1.2)):
            axes.vlines(
                [start + step for start in starts.values()], -0.5, rows - 0.5, color=colour, linewidth=thickness
            )
        corner = starts[role] - 0.5, layer - 0.5
        frame = {"fill": False, "edgecolor": "white", "linewidth": 2, "linestyle": "--"}
        axes.add_patch(plt.Rectangle(corner, steps, 1, **frame))

    def draw_tensor(figure, role: str, layer: int, step: int) -> None:
        """The chosen tensor's amax inside what its format held with each step's scale."""
        line, scale_of = height[role][:, layer], factor[role][:, layer]
        top, bottom = largest[role] - scale_of, flushed[role] - scale_of
        low, high = math.floor(bottom.min()) - 1, math.ceil(max(top.max(), np.nanmax(line))) + 1
        ticks = {s: str(s) for s in range(0, steps, 10)}
        title = f"{layers[layer]}, {role}: amax within what {fmt[role].name} held"
        box, xlim, magnitudes = [0.15, 0.1, 0.83, 0.24], (-0.5, steps - 0.5), powers(2, low, high, 16)
        axes = panel(figure, box, title, "training step", "magnitude", xlim, (low, high), ticks, magnitudes)
        axes.fill_between(range(steps), bottom, top, step="mid", color="#d9e7f2")
        axes.plot(top, drawstyle="steps-mid", color=plots.COLORS[0], linestyle="--", linewidth=1.2)
        axes.plot(line, color=INK, marker="o", markersize=3, linewidth=0.8, linestyle="-")
        axes.vlines(step, low, high, color=INK, linewidth=1.2)

    def draw(quantity: str, role: str, layer: str, step: int):
        row, at = layers.index(layer), values(quantity, role)[step]
        figure = plt.figure(figsize=(8.5, 4.2 + 0.16 * len(layers)))
        draw_maps(figure, quantity, role, row, step)
        draw_tensor(figure, role, row, step)
        ends = [f"{at[i]:.1f} ({layers[i]})" for i in (np.nanargmin(at), np.nanargmax(at))]
        title = f"Step {step}, {role}: {quantity} from {ends[0]} to {ends[1]}"
        heading(figure, title)
        note = "Each map from dark (its least) to bright (its largest); white: the amax was 0. Dashed: the layer below."
        figure.text(0.012, 0.915, note, fontsize=10)
        amax_, scale_ = seen[role][step, row], in_use[role][step, row]
        lost = np.sum(~(values(ROOM, role)[step] > 0))
        return figure, (
            f"{title}. {layer}: amax {amax_:.3g}, scale in use {scale_:.3g}, so {100 * amax_ * scale_ / fmt[role].max:.3g} % "
            f"of the range was used. {lost} of {len(layers)} tensors of this role were zero or rounded to zero."
        )

    return Explorer(
        draw,
        quantity=Choice("shown", AMAX, (AMAX, SCALE, ROOM, USED)),
        role=Choice("tensor", roles[-1], tuple(roles)),
        layer=Choice("layer", layers[0], tuple(layers)),
        step=Number("training step", min(10, steps - 1), 0, steps - 1),
    )
