"""Figures shared by the notebooks: legible at notebook width, safe for colour-blind readers, told apart by line style too."""

import io

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import display

# Okabe and Ito's palette, and a line style and marker for each, so that no figure depends on colour alone.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def use_style() -> None:
    """Sets matplotlib's defaults for a notebook."""
    plt.rcParams.update(
        {
            "figure.figsize": (8.5, 4.2),
            "figure.dpi": 100,
            "figure.facecolor": "white",
            "font.size": 11,
            "axes.titlesize": 12,
            "axes.titlelocation": "left",
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": plt.cycler(color=COLORS) + plt.cycler(linestyle=LINES),
            "legend.frameon": False,
        }
    )


def alt_text(figure, sentence: str) -> str:
    """What the figure shows, for who does not see it: titles, axes and series as drawn, then the result as a sentence."""
    heading = figure.get_suptitle()
    panels = []
    for axes in figure.axes:
        legend = axes.get_legend()
        parts = {
            "": axes.get_title(loc="left") or axes.get_title(),
            "x: ": axes.get_xlabel(),
            "y: ": axes.get_ylabel(),
            "shown: ": ", ".join(text.get_text() for text in legend.get_texts()) if legend else "",
        }
        panels.append("; ".join(name + text for name, text in parts.items() if text))
    return " ".join(". ".join(["Figure", *filter(None, [heading, *panels]), sentence]).split())


def png(figure) -> bytes:
    """The figure as it stands; closes it."""
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="png", pil_kwargs={"compress_level": 1}
    )  # half the time of the default, a fifth larger
    plt.close(figure)
    return buffer.getvalue()


def show(figure, sentence: str) -> None:
    """Displays a figure, with alt text in the output's metadata, and prints its result as a sentence. Closes the figure."""
    alt = alt_text(figure, sentence)
    display({"image/png": png(figure), "text/plain": alt}, metadata={"image/png": {"alt": alt}}, raw=True)
    print(sentence)


def loss_curves(histories: dict[str, pd.DataFrame], title: str, levels: dict[str, float] | None = None):
    """Loss (nats) against step for each history (`step`, `loss`), with named horizontal levels. Returns the figure."""
    figure, axes = plt.subplots(layout="constrained")
    for name, history in histories.items():
        axes.plot(history["step"], history["loss"], label=name)
    for name, value in (levels or {}).items():
        axes.axhline(value, color="grey", linewidth=0.8, linestyle="-")
        axes.annotate(
            f"{name} = {value:.2f}",
            (1, value),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=9,
            color="#555555",
        )
    axes.set(xlabel="training step", ylabel="loss (nats per token)", title=title, ylim=(0, None))
    axes.legend()
    return figure


def bars(values: dict[str, float], unit: str, title: str, spread: dict[str, float] | None = None):
    """Horizontal bars, one a name, the value written at each; `spread` draws an error bar. Returns the figure."""
    figure, axes = plt.subplots(figsize=(8.5, 1.1 + 0.5 * len(values)), layout="constrained")
    names = list(values)
    errors = [spread[name] for name in names] if spread else None
    drawn = axes.barh(
        names,
        values.values(),
        xerr=errors,
        color=COLORS[: len(names)] if len(names) <= len(COLORS) else COLORS[0],
        ecolor="#333333",
    )
    axes.bar_label(drawn, labels=[f" {v:.3g} {unit}" for v in values.values()], padding=3)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel=unit)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)  # from the figure's edge: the names on the left may be long
    return figure
