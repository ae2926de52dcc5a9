"""Explorers. Each one is a plain function that draws a figure, and controls around it where ipywidgets runs.

A picture of the starting values is always an output of its own above the controls, so that GitHub, nbconvert and a
Jupyter without ipywidgets show it too. What a callback raises appears in the explorer's Output widget.
"""

import math
from functools import lru_cache

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display

from helpers import formats

# A name, a fill colour and a hatch for each field, so that the fields differ without colour as well.
FIELDS = (("sign", "#f6c6a8", ""), ("exponent", "#a9cfe8", "//"), ("mantissa", "#a8dcc8", ".."))

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def show(figure) -> None:
    """Displays a figure once and forgets it."""
    display(figure)
    plt.close(figure)


def known(fmt: str | formats.Format) -> formats.Format:
    """The format of a name. Raises ValueError for a name that does not exist."""
    if isinstance(fmt, formats.Format):
        return fmt
    if fmt not in formats.FORMATS:
        raise ValueError(f"format {fmt!r} is not known; choose one of {', '.join(formats.FORMATS)}")
    return formats.FORMATS[fmt]


def value_of(fmt: formats.Format, code: int) -> float:
    return formats.decode(torch.tensor([code], dtype=torch.uint8), fmt).item()


def nearest_code(fmt: formats.Format, value: float) -> int:
    """The code of the value nearest to `value`; a format without a sign takes the magnitude."""
    return int(formats.encode(float(value) if fmt.signed else abs(float(value)), fmt))


@lru_cache(maxsize=8)
def all_values(fmt: formats.Format) -> list[float]:
    return formats.values(fmt).tolist()


def formula(fmt: formats.Format, code: int) -> str:
    """How the bits of a code make its value, as mathtext."""
    sign, exponent, mantissa = formats.split_bits(code, fmt)
    value, e = value_of(fmt, code), int(exponent, 2)
    if not math.isfinite(value):
        return f"a reserved code: {'infinity' if math.isinf(value) else 'NaN, not a number'}"
    start = rf"$(-1)^{sign} \times " if sign else "$"
    if not mantissa:
        return rf"{start}2^{{{e} - {fmt.bias}}}$ = {value:.8g}"
    fraction = rf"\frac{{{int(mantissa, 2)}}}{{{2**fmt.mantissa_bits}}}"
    if e == 0:
        return rf"{start}2^{{1 - {fmt.bias}}} \times {fraction}$ = {value:.8g}   (subnormal: no leading 1)"
    return rf"{start}2^{{{e} - {fmt.bias}}} \times (1 + {fraction})$ = {value:.8g}"


def draw_code(fmt: str | formats.Format, code: int, value: float | None = None):
    """One code of a format: its bits, the formula, its neighbours, its place on a log number line. Returns the figure.

    `value` is a number that was rounded to this code; it is marked among the neighbours. Raises ValueError for an unknown
    format and for a code that the format does not have.
    """
    fmt = known(fmt)
    parts = formats.split_bits(code, fmt)
    decoded = value_of(fmt, code)
    figure = plt.figure(figsize=(8.5, 4.6))
    bits, near, line = (
        figure.add_axes(box) for box in ([0.03, 0.48, 0.94, 0.45], [0.03, 0.24, 0.94, 0.2], [0.03, 0.0, 0.94, 0.2])
    )
    for axes in (bits, near, line):
        axes.axis("off")  # also keeps a redraw under a tenth of a second
    figure.text(
        0.03, 0.95, f"{fmt.name} code 0x{code:02X} = {' '.join(filter(None, parts))} is {decoded:.8g}", fontsize=13
    )
    draw_bits(bits, fmt, parts, formula(fmt, code))
    draw_neighbours(near, fmt, decoded, value)
    draw_line(line, fmt, decoded)
    return figure


def draw_bits(axes, fmt, parts, text) -> None:
    axes.set(xlim=(0, 8), ylim=(-1.3, 1.5))
    x = (8 - fmt.bits) / 2
    for (name, colour, hatch), field in zip(FIELDS, parts, strict=True):
        start = x
        for bit in field:
            axes.add_patch(plt.Rectangle((x + 0.04, 0), 0.92, 1, facecolor=colour, edgecolor="#555555", hatch=hatch))
            axes.add_patch(plt.Rectangle((x + 0.34, 0.2), 0.32, 0.6, facecolor="white", alpha=0.85))
            axes.text(x + 0.5, 0.48, bit, ha="center", va="center", fontsize=20)
            x += 1
        if field:
            number = "" if name == "sign" else f" = {int(field, 2)}"
            axes.text((start + x) / 2, 1.12, f"{name}{number}", ha="center", fontsize=11)
    axes.text(4, -0.7, text, ha="center", va="center", fontsize=14)


def draw_neighbours(axes, fmt, decoded, value) -> None:
    """The code's value and up to three on either side, true to scale; `value`, if it was rounded to here, as a cross."""
    axes.set(xlim=(-0.04, 1.04), ylim=(-1, 1))
    if not math.isfinite(decoded):
        axes.text(0.5, 0, "this code has no place on the number line", ha="center", va="center", fontsize=11)
        return
    values = all_values(fmt)
    at = values.index(decoded)
    shown = values[max(0, at - 3) : at + 4]
    scale = float if fmt.mantissa_bits else math.log2  # powers of two would crowd at the left
    low, high = scale(shown[0]), scale(shown[-1])
    places = [(scale(v) - low) / (high - low) for v in shown]
    axes.hlines(0, -0.04, 1.04, color="#888888", linewidth=1)
    axes.vlines(places, -0.3, 0.3, color="#333333", linewidth=1.2)
    for v, place in zip(shown, places, strict=True):
        axes.text(place, -0.45, f"{v:.6g}", ha="center", va="top", fontsize=11 if v == decoded else 9)
    axes.plot(places[shown.index(decoded)], 0.3, marker="v", color="#d55e00", markersize=11)
    title = f"neighbours ({'linear' if fmt.mantissa_bits else 'log'} scale)"
    if value is not None and math.isfinite(value):
        title = f"{value:.8g} (the cross) becomes {decoded:.8g}"
        if value:
            title += f": relative error {abs(decoded - value) / abs(value):.2%}"
            place = (scale(value if fmt.signed else abs(value)) - low) / (high - low)
            axes.plot(
                min(max(place, -0.04), 1.04),
                0,
                marker="x",
                color="#0072b2",
                markersize=9,
                markeredgewidth=2,
                clip_on=False,
            )
    axes.text(-0.04, 0.75, title, fontsize=11)


def draw_line(axes, fmt, decoded) -> None:
    """All magnitudes of the format on a log scale."""
    magnitudes = [v for v in all_values(fmt) if v > 0]
    places = [math.log2(v) for v in magnitudes]
    low, high = places[0], places[-1]
    room = 0.04 * (high - low)
    axes.set(xlim=(low - room, high + room), ylim=(-1, 1))
    axes.hlines(0, low - room, high + room, color="#888888", linewidth=1)
    axes.vlines(places, -0.3, 0.3, color="#888888", linewidth=0.7)
    step = max(1, round((high - low) / 10))
    for power in range(math.ceil(low), math.floor(high) + 1, step):
        axes.text(power, -0.45, "2" + str(power).translate(SUPERSCRIPT), ha="center", va="top", fontsize=10)
    normal = f"; normal from {fmt.min_normal:.5g}" if fmt.min_normal > fmt.min_subnormal else ""
    title = f"all magnitudes (log scale): {magnitudes[0]:.5g} to {magnitudes[-1]:.5g}{normal}"
    if decoded == 0:
        title += "; 0 lies off the left end"
    elif math.isfinite(decoded):
        axes.vlines(math.log2(abs(decoded)), -0.3, 0.3, color="#d55e00", linewidth=2)
        axes.plot(math.log2(abs(decoded)), 0.3, marker="v", color="#d55e00", markersize=9)
    axes.text(low - room, 0.75, title, fontsize=11)


def format_explorer(fmt: str = "E4M3", code: int = 0x2A):
    """Pick a format, and a code or a value, and see its bits. Returns the widget, or a line of text where ipywidgets is missing."""
    show(draw_code(fmt, code))
    try:
        import ipywidgets as w
    except ImportError:
        return Markdown("ipywidgets is not installed, so no controls: `widgets.draw_code('E4M3', 0x2A)` draws a code.")
    name = w.Dropdown(options=list(formats.FORMATS), value=fmt, description="format")
    top = 2 ** known(fmt).bits - 1
    wide = {"layout": w.Layout(width="24em"), "continuous_update": False}
    slider = w.IntSlider(value=code, min=0, max=top, description="code", readout=False, **wide)
    typed = w.BoundedIntText(value=code, min=0, max=top, layout=w.Layout(width="6em"))
    number = w.FloatText(value=value_of(known(fmt), code), description="value", step=None)
    w.link((slider, "value"), (typed, "value"))
    picture = w.Output()

    def redraw(change=None):
        picture.clear_output(wait=True)
        with picture:
            chosen = known(name.value)
            rounded_here = nearest_code(chosen, number.value) == slider.value
            show(draw_code(chosen, slider.value, number.value if rounded_here else None))

    def go_to(new: int):
        """Moves to a code and draws exactly once, also when only the value or the format changed."""
        if new == slider.value:
            redraw()
        else:
            slider.value = new

    def format_changed(change):
        """Keeps the number: the one typed, or else the old code's."""
        old, new = known(change["old"]), known(change["new"])
        typed_one = nearest_code(old, number.value) == slider.value
        new_code = nearest_code(new, number.value if typed_one else value_of(old, slider.value))
        widest = max(slider.max, 2**new.bits - 1)
        slider.max = typed.max = widest  # room for both codes while moving from one to the other
        go_to(new_code)
        slider.max = typed.max = 2**new.bits - 1

    slider.observe(redraw, "value")
    number.observe(lambda change: go_to(nearest_code(known(name.value), change["new"])), "value")
    name.observe(format_changed, "value")
    hint = w.Label("Move a control: the picture of your choice appears below. A typed value goes to its nearest code.")
    return w.VBox([hint, w.HBox([name, number]), w.HBox([slider, typed]), picture])
