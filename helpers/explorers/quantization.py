"""The error of a tensor against its scale: plateau and walls, an outlier, one scale against a scale for each block."""

from functools import lru_cache

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from helpers import formats, plots
from helpers.explorers.frame import Explorer, Number
from helpers.explorers.panel import INK, heading, panel, power, powers

NAMES = ("E4M3", "E5M2", "INT8")
LARGEST = {"E4M3": formats.E4M3.max, "E5M2": formats.E5M2.max, "INT8": 127.0}
BLOCK = 128
FACTORS = (-24, 8)  # octaves that the figure shows: the scale as a multiple of largest number / amax
GROUPS = ("one scale for the tensor", f"a scale for each 1x{BLOCK} block")
ERRORS = (-3.3, 0.25)  # decades


def eight_bits(x: Tensor, name: str) -> Tensor:
    """What `x` becomes in a format; INT8 is the whole numbers from -127 to 127."""
    if name == "INT8":
        return x.round().clamp(-127, 127)
    return formats.quantize(x, formats.FORMATS[name])


@lru_cache(maxsize=64)
def sample(spread: float, outlier: float) -> Tensor:
    """32 blocks of 128 numbers: normal, times 2^(spread x normal). The first is `outlier` times the largest other one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, BLOCK, generator=generator) * torch.exp2(spread * torch.randn(32, BLOCK, generator=generator))
    x[0, 0] = 0
    x[0, 0] = outlier * x.abs().max()
    return x


def errors(x: Tensor, name: str, blocks: bool, factors: Tensor) -> Tensor:
    """Relative error (norm of the error / norm) of all elements but the outlier, for each factor on the scale."""
    amax = x.abs().amax(1, keepdim=True) if blocks else x.abs().max()
    scale = factors[:, None, None] * LARGEST[name] / amax
    off = eight_bits(x * scale, name) / scale - x
    off[:, 0, 0] = 0
    others = x.clone()
    others[0, 0] = 0
    return off.flatten(1).norm(dim=1) / others.norm()


@lru_cache(maxsize=64)
def curve(spread: float, outlier: float, name: str, blocks: bool) -> list[float]:
    octaves = torch.arange(FACTORS[0], FACTORS[1] + 1.0)
    return errors(sample(spread, outlier), name, blocks, torch.exp2(octaves)).log10().tolist()


def percent(error: float) -> str:
    return f"{100 * error:.2g} %" if error < 0.995 else "100 %"


def draw(outlier: float, spread: float, octaves: int):
    """Error against scale, with one scale and with a scale for each block, and the scale that was chosen. (figure, sentence).

    `outlier`: the largest element over the next largest. `spread`: standard deviation of the magnitudes in octaves, beyond
    a normal distribution's own. `octaves`: log2 of the scale over largest number / amax, which is TE's choice.
    """
    x, here = sample(spread, outlier), {}
    figure = plt.figure(figsize=(8.5, 4.4))
    for left, group, blocks in ((0.105, GROUPS[0], False), (0.585, GROUPS[1], True)):
        y = "" if blocks else "error of the others"
        xticks, yticks = powers(2, *FACTORS, 8), {-3: "0.1 %", -2: "1 %", -1: "10 %", 0: "100 %"}
        box, x_name = [left, 0.16, 0.395, 0.66], "scale / (largest number / amax)"
        axes = panel(figure, box, group, x_name, y, FACTORS, ERRORS, xticks, yticks)
        axes.axvline(octaves, color=INK, linewidth=1.2, linestyle="-")
        for name, colour, line, marker in zip(NAMES, plots.COLORS, plots.LINES, "osv", strict=False):
            error = errors(x, name, blocks, torch.tensor([2.0**octaves])).item()
            here[group, name] = percent(error)
            places = range(FACTORS[0], FACTORS[1] + 1)
            style = {"color": colour, "linestyle": line, "marker": marker, "markersize": 5, "markevery": 4}
            axes.plot(places, curve(spread, outlier, name, blocks), label=f"{name}: {here[group, name]}", **style)
        axes.legend(loc="lower left", fontsize=10)
    one, each = ({name: here[group, name] for name in NAMES} for group in GROUPS)
    where = "the scale from amax" if octaves == 0 else f"{power(2, int(octaves))} times the scale from amax"
    title = f"One scale: INT8 off by {one['INT8']}, E4M3 by {one['E4M3']}. Blocks: {each['INT8']} and {each['E4M3']}"
    heading(figure, title)
    what = f"An outlier of {outlier:,.6g} times the next largest" if outlier > 1 else "No outlier"
    listed = [", ".join(f"{name} {error}" for name, error in group.items()) for group in (one, each)]
    sentence = f"{what}, at {where}. Error of the other elements with one scale for the tensor: {listed[0]}; "
    return figure, f"{sentence}with a scale for each 1x{BLOCK} block: {listed[1]}."


def explore_quantization(outlier: float = 1000, spread: float = 0.0) -> Explorer:
    """The error of a made-up tensor against its scale, in E4M3, E5M2 and INT8."""
    return Explorer(
        draw,
        outlier=Number("outlier / next largest", outlier, 1, 1e6, step=0.5, log=10),
        spread=Number("spread of magnitudes (octaves)", spread, 0, 5, step=0.5),
        octaves=Number("scale, octaves from amax's", 0, -20, 8),
    )
