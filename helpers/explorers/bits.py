"""Number formats by bit: pick a format, then a code or a value, and see its bits, its formula and its neighbours."""

import math
from functools import lru_cache

import matplotlib.pyplot as plt
import torch

from helpers import formats
from helpers.explorers.frame import Choice, Explorer, Field, Number
from helpers.explorers.panel import power

# A name, a fill colour and a hatch for each field, so that the fields differ without colour as well.
FIELDS = (("sign", "#f6c6a8", ""), ("exponent", "#a9cfe8", "//"), ("mantissa", "#a8dcc8", ".."))
MARK, LINE = "#d55e00", "#888888"


def known(name: str) -> formats.Format:
    """The format of a name. Raises ValueError for a name that does not exist."""
    if name not in formats.FORMATS:
        raise ValueError(f"format {name!r} is not known; choose one of {', '.join(formats.FORMATS)}")
    return formats.FORMATS[name]


def value_of(fmt: formats.Format, code: int) -> float:
    return formats.decode(torch.tensor([code], dtype=torch.uint8), fmt).item()


def nearest_code(fmt: formats.Format, value: float) -> int:
    """The code of the value nearest to `value`; a format without a sign takes the magnitude."""
    return int(formats.encode(float(value) if fmt.signed else abs(float(value)), fmt))


def in_words(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.8g}".replace("inf", "infinity")


@lru_cache(maxsize=8)
def all_values(fmt: formats.Format) -> list[float]:
    return formats.values(fmt).tolist()


def formula(fmt: formats.Format, code: int) -> str:
    """How the bits of a code make its value."""
    sign, exponent, mantissa = formats.split_bits(code, fmt)
    value, e = value_of(fmt, code), int(exponent, 2)
    if not math.isfinite(value):
        return f"a reserved code, for {'infinity' if math.isinf(value) else 'what is not a number'}"
    start = f"(−1){power('', int(sign))} × " if sign else ""
    if not mantissa:
        return f"{start}2^({e} − {fmt.bias}) = {value:.8g}"
    fraction = f"{int(mantissa, 2)}/{2**fmt.mantissa_bits}"
    if e == 0:
        return f"{start}2^(1 − {fmt.bias}) × {fraction} = {value:.8g} (subnormal: no leading 1)"
    return f"{start}2^({e} − {fmt.bias}) × (1 + {fraction}) = {value:.8g}"


def draw(format: str, code: int, value: float):
    """One code of a format: its bits, the formula, its neighbours, its place on a log number line. (figure, sentence).

    `value` is marked among the neighbours if it is a number that rounds to this code. Raises ValueError for an unknown
    format and for a code that the format does not have.
    """
    fmt = known(format)
    parts = formats.split_bits(code, fmt)
    decoded = value_of(fmt, code)
    rounded_here = math.isfinite(decoded) and nearest_code(fmt, value) == code and value != decoded
    figure = plt.figure(figsize=(8.5, 4.6))
    bits, lines = (figure.add_axes(box) for box in ([0.03, 0.48, 0.94, 0.45], [0.03, 0.0, 0.94, 0.44]))
    for axes in (bits, lines):
        axes.axis("off")
    lines.set(xlim=(-0.04, 1.04), ylim=(-3.4, 1))
    title = f"{fmt.name} code 0x{code:02X} = {' '.join(filter(None, parts))} is {in_words(decoded)}"
    figure.suptitle(title, x=0.03, y=0.99, ha="left", fontsize=13)
    draw_bits(bits, fmt, parts, formula(fmt, code))
    error = draw_neighbours(lines, fmt, decoded, value if rounded_here else None)
    draw_line(lines, fmt, decoded)
    return figure, f"{title}: {formula(fmt, code)}. {error}".rstrip()


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


def draw_neighbours(axes, fmt, decoded, value) -> str:
    """The code's value and up to three on either side, true to scale; `value`, if it was rounded to here, as a cross.

    Returns the rounding error in words.
    """
    if not math.isfinite(decoded):
        axes.text(0.5, 0, "this code has no place on the number line", ha="center", va="center", fontsize=11)
        return ""
    values = all_values(fmt)
    at = values.index(decoded)
    shown = values[max(0, at - 3) : at + 4]
    scale = float if fmt.mantissa_bits else math.log2  # powers of two would crowd at the left
    low, high = scale(shown[0]), scale(shown[-1])
    places = [(scale(v) - low) / (high - low) for v in shown]
    axes.hlines(0, -0.04, 1.04, color=LINE, linewidth=1)
    axes.vlines(places, -0.3, 0.3, color="#333333", linewidth=1.2)
    for v, place in zip(shown, places, strict=True):
        axes.text(place, -0.45, f"{v:.6g}", ha="center", va="top", fontsize=11 if v == decoded else 9)
    axes.plot(places[shown.index(decoded)], 0.3, marker="v", color=MARK, markersize=11)
    title, error = f"neighbours ({'linear' if fmt.mantissa_bits else 'log'} scale)", ""
    if value is not None:
        error = f"{value:.8g} becomes {decoded:.8g}"
        if value:
            error += f", a relative error of {abs(decoded - value) / abs(value):.2%}."
            place = (scale(value if fmt.signed else abs(value)) - low) / (high - low)
            place = min(max(place, -0.04), 1.04)
            axes.plot(place, 0, marker="x", color="#0072b2", markersize=9, markeredgewidth=2, clip_on=False)
        title = f"cross: {error}"
    axes.text(-0.04, 0.75, title, fontsize=11)
    return error


def draw_line(axes, fmt, decoded) -> None:
    """All magnitudes of the format on a log scale, below the neighbours."""
    magnitudes = [v for v in all_values(fmt) if v > 0]
    low, high = math.log2(magnitudes[0]), math.log2(magnitudes[-1])
    y = -2.4

    def place(exponent):
        return (exponent - low) / (high - low)

    axes.hlines(y, -0.04, 1.04, color=LINE, linewidth=1)
    axes.vlines([place(math.log2(v)) for v in magnitudes], y - 0.3, y + 0.3, color=LINE, linewidth=0.7)
    step = max(1, round((high - low) / 8))
    for exponent in range(math.ceil(low), math.floor(high) + 1, step):
        axes.text(place(exponent), y - 0.45, power(2, exponent), ha="center", va="top", fontsize=10)
    normal = f"; normal from {fmt.min_normal:.5g}" if fmt.min_normal > fmt.min_subnormal else ""
    title = f"all magnitudes (log scale): {magnitudes[0]:.5g} to {magnitudes[-1]:.5g}{normal}"
    if decoded == 0:
        title += "; 0 lies off the left end"
    elif math.isfinite(decoded):
        here = place(math.log2(abs(decoded)))
        axes.vlines(here, y - 0.3, y + 0.3, color=MARK, linewidth=2)
        axes.plot(here, y + 0.3, marker="v", color=MARK, markersize=9)
    axes.text(-0.04, y + 0.75, title, fontsize=11)


def settle(changed: str, values: dict) -> dict:
    """A moved code takes its value along; a typed value, or another format, goes to the code nearest to the value."""
    fmt = known(values["format"])
    if changed == "code":
        decoded = value_of(fmt, values["code"])
        return values | ({"value": decoded} if math.isfinite(decoded) else {})
    return values | {"code": nearest_code(fmt, values["value"])}


def explore_format(format: str = "E4M3", code: int = 0x2A) -> Explorer:
    """Any code of E4M3, E5M2, E8M0 and E2M1, or any value rounded to them."""
    top = 2 ** known(format).bits - 1
    return Explorer(
        draw,
        settle,
        limits=lambda values: {"code": 2 ** known(values["format"]).bits - 1},
        format=Choice("format", format, tuple(formats.FORMATS)),
        code=Number("code", code, 0, top),
        value=Field("value (any number)", value_of(known(format), code)),
    )
