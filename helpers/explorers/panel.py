"""Axes for figures that are redrawn at each move of a control.

matplotlib's own ticks take most of the time of a small figure; these are drawn as plain lines and texts, in half of it.
Logarithmic axes are linear ones in the logarithm.
"""

import math

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
INK, GRID = "#333333", "#dddddd"


def power(base: int, exponent: int) -> str:
    """ "2⁻⁹", as plain text: matplotlib's mathtext is slow."""
    return f"{base}{str(exponent).translate(SUPERSCRIPT)}"


def powers(base: int, low: float, high: float, step: int) -> dict[float, str]:
    """Ticks at the powers of `base` between exponents `low` and `high`, for an axis that shows the exponent."""
    first = math.ceil(low / step) * step
    return {exponent: power(base, exponent) for exponent in range(first, math.floor(high) + 1, step)}


def heading(figure, text: str) -> None:
    """The figure's takeaway, above all panels."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=12)


def panel(figure, box, title: str, x: str, y: str, xlim, ylim, xticks: dict, yticks: dict):
    """Axes at `box` (left, bottom, width, height as shares of the figure) with a title, names of axes, grid and ticks.

    `xticks` and `yticks` map places to texts. Returns the axes.
    """
    axes = figure.add_axes(box)
    axes.axis("off")
    axes.set(xlim=xlim, ylim=ylim)
    axes.set_title(title, y=1.02)
    axes.set_xlabel(x)  # not drawn with the axes off, but plots.alt_text reads them
    axes.set_ylabel(y)
    inches = figure.get_size_inches()
    right, up = (
        1 / (72 * size * share) for size, share in zip(inches, box[2:], strict=True)
    )  # a point, in the panel's own units
    width, height = xlim[1] - xlim[0], ylim[1] - ylim[0]
    axes.vlines(list(xticks), *ylim, color=GRID, linewidth=0.8, zorder=0)
    axes.hlines(list(yticks), *xlim, color=GRID, linewidth=0.8, zorder=0)
    axes.plot(
        [xlim[0], xlim[0], xlim[1]], [ylim[1], ylim[0], ylim[0]], color=INK, linewidth=0.8, linestyle="-", marker=""
    )
    for place, text in xticks.items():
        axes.text(place, ylim[0] - 5 * up * height, text, ha="center", va="top", fontsize=10)
    for place, text in yticks.items():
        axes.text(xlim[0] - 5 * right * width, place, text, ha="right", va="center", fontsize=10)
    longest = max((len(text) for text in yticks.values()), default=0)
    axes.text(0.5, -22 * up, x, transform=axes.transAxes, ha="center", va="top")
    axes.text(-(14 + 6 * longest) * right, 0.5, y, transform=axes.transAxes, rotation=90, ha="right", va="center")
    return axes
