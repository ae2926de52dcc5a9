"""FP8 state by layer and step: amax, scale, room above underflow and range used, from a recorded run."""

import math
from functools import lru_cache

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
    "range used (log2 of amax x scale / largest number)",
)
GAP = 3  # columns between the roles' maps


def explore_state(scale: pd.DataFrame, amax: pd.DataFrame, gradients: str = "E5M2") -> Explorer:
    """A run's scales and amaxes: one row a step, columns (role, layer), each value the one *after* the step.

    A step quantizes with the scale that the step before left, 1 in the first. The room above underflow is log2 of
    amax x scale over half the format's smallest number: at 0 or less, all of the tensor rounds to zero. `gradients` names
    the format of the role grad_output; all others are E4M3.
    """
    roles, layers = list(amax.columns.unique("role")), list(amax.columns.unique("layer"))
    steps = len(amax)
    fmt = {role: formats.FORMATS[gradients if role == "grad_output" else "E4M3"] for role in roles}
    in_use = scale.shift(1, fill_value=1.0)
    with np.errstate(divide="ignore"):
        log_amax, log_scale = np.log2(amax.where(amax > 0)), np.log2(in_use)
    largest = {role: math.log2(fmt[role].max) for role in roles}
    flushed = {
        role: math.log2(fmt[role].min_subnormal) - 1 for role in roles
    }  # half the smallest number rounds to zero

    def values(quantity: str, role: str) -> pd.DataFrame:
        """(steps, layers); NaN where amax is 0."""
        height, factor = log_amax[role], log_scale[role]
        match quantity:
            case x if x == AMAX:
                return height
            case x if x == SCALE:
                return factor
            case x if x == ROOM:
                return height + factor - flushed[role]
        return height + factor - largest[role]

    @lru_cache(maxsize=4)
    def image(quantity: str) -> tuple[np.ndarray, dict[str, tuple[float, float]]]:
        """The maps of all roles side by side, (layers, columns), each from 0 to 1, and each role's (least, largest)."""
        maps, ends = [], {}
        for role in roles:
            shown = values(quantity, role)[layers].to_numpy().T
            ends[role] = low, high = np.nanmin(shown), np.nanmax(shown)
            maps += [(shown - low) / max(high - low, 1e-9), np.full((len(layers), GAP), np.nan)]
        return np.hstack(maps[:-1]), ends

    def draw_maps(figure, quantity: str, role: str, layer: str, step: int) -> None:
        width, rows = len(roles) * (steps + GAP) - GAP, len(layers)
        starts = {name: i * (steps + GAP) for i, name in enumerate(roles)}
        ticks = {start + s: str(s) for start in starts.values() for s in range(0, steps, 20)}
        names = dict(enumerate(layers))
        box = [0.09, 0.5, 0.79, 0.36]
        axes = panel(figure, box, "", "training step", "", (-0.5, width - 0.5), (rows - 0.5, -0.5), ticks, names)
        shades, ends = image(quantity)
        axes.imshow(shades, aspect="auto", cmap="viridis", interpolation="nearest", zorder=1)
        for name, start in starts.items():
            low, high = ends[name]
            weight = "bold" if name == role else "normal"
            axes.text(start, -0.8, f"{name}: {low:.1f} to {high:.1f}", fontsize=10, fontweight=weight)
            for colour, thickness in (("black", 3.0), ("white", 1.2)):
                axes.plot([start + step] * 2, [-0.5, rows - 0.5], "-", color=colour, linewidth=thickness)
        x, y = starts[role], layers.index(layer) - 0.5
        axes.add_patch(
            plt.Rectangle((x - 0.5, y), steps, 1, fill=False, edgecolor="white", linewidth=2, linestyle="--")
        )
        axes.text(width + 4, -0.8, f"step {step}", fontsize=10)
        for row, value in enumerate(values(quantity, role).iloc[step][layers]):
            axes.text(width + 1, row, "zero" if math.isnan(value) else f"{value:.1f}", va="center", fontsize=10)

    def draw_tensor(figure, role: str, layer: str, step: int) -> None:
        """The chosen tensor's amax inside what its format held with each step's scale."""
        height, factor = log_amax[role][layer], log_scale[role][layer]
        top, bottom = largest[role] - factor, flushed[role] - factor
        low, high = math.floor(bottom.min()) - 1, math.ceil(max(top.max(), height.max())) + 1
        ticks = {s: str(s) for s in range(0, steps, 10)}
        title = f"{layer}, {role}: amax within what {fmt[role].name} held"
        box, xlim = [0.09, 0.1, 0.79, 0.24], (-0.5, steps - 0.5)
        axes = panel(
            figure, box, title, "training step", "magnitude", xlim, (low, high), ticks, powers(2, low, high, 8)
        )
        axes.fill_between(range(steps), bottom, top, step="mid", color="#d9e7f2")
        axes.plot(top, drawstyle="steps-mid", color=plots.COLORS[0], linestyle="--", linewidth=1.2)
        axes.plot(height, color=INK, marker="o", markersize=3, linewidth=0.8, linestyle="-")
        axes.vlines(step, low, high, color=INK, linewidth=1.2)

    def draw(quantity: str, role: str, layer: str, step: int):
        at = values(quantity, role).iloc[step]
        least, most = at.idxmin(), at.idxmax()
        lost = int(at.isna().sum() if quantity != ROOM else (~(at > 0)).sum())
        figure = plt.figure(figsize=(8.5, 4.2 + 0.16 * len(layers)))
        note = "Each map from dark (its least) to bright (its largest); white: the amax was 0. Dashed: the layer below."
        figure.text(0.012, 0.915, note, fontsize=10)
        draw_maps(figure, quantity, role, layer, step)
        draw_tensor(figure, role, layer, step)
        title = f"Step {step}, {role}: {quantity} from {at.min():.1f} ({least}) to {at.max():.1f} ({most})"
        heading(figure, title)
        sentence = (
            f"{title}. {layer}: amax {amax[role][layer][step]:.3g}, scale in use {in_use[role][layer][step]:.3g}, "
        )
        share = amax[role][layer][step] * in_use[role][layer][step] / fmt[role].max
        sentence += f"so {100 * share:.3g} % of the range was used; {lost} of {len(layers)} tensors {'rounded to zero' if quantity == ROOM else 'were zero'}."
        return figure, sentence

    return Explorer(
        draw,
        quantity=Choice("shown", AMAX, (AMAX, SCALE, ROOM, USED)),
        role=Choice("tensor", roles[-1], tuple(roles)),
        layer=Choice("layer", layers[0], tuple(layers)),
        step=Number("training step", 0, 0, steps - 1),
    )
