import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
from IPython.core.interactiveshell import InteractiveShell

from helpers import plots, results


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def test_every_colour_has_a_line_style_of_its_own():
    assert len(set(plots.COLORS)) == len(plots.COLORS) == len(set(plots.LINES))


def test_loss_curves_name_axes_units_and_levels():
    history = pd.DataFrame({"step": [0, 1, 2], "loss": [3.0, 2.0, 1.0]})
    figure = plots.loss_curves({"BF16": history, "FP8 (EMULATED)": history}, "Both fall", {"ln 6": 1.79})
    axes = figure.axes[0]
    assert axes.get_xlabel() == "training step"
    assert "nats" in axes.get_ylabel()
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["BF16", "FP8 (EMULATED)"]
    assert "ln 6 = 1.79" in [t.get_text() for t in axes.texts]


def test_bars_write_the_value_at_each_bar():
    figure = plots.bars({"a": 1.5, "b": 20.0}, "ms", "a is faster", {"a": 0.1, "b": 1.0})
    assert [t.get_text().strip() for t in figure.axes[0].texts] == ["1.5 ms", "20 ms"]


NOTEBOOKS = sorted((results.ROOT / "notebooks").rglob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_notebooks_show_figures_with_alt_text_and_a_sentence(path):
    cells = nbformat.read(path, as_version=4).cells
    wrong = [cell.id for cell in cells if cell.cell_type == "code" and "plt.show(" in cell.source]
    assert wrong == [], "use plots.show(figure, sentence) in these cells"


def test_a_figure_is_shown_once_with_alt_text_and_its_sentence(monkeypatch, capsys):
    sent = []
    monkeypatch.setattr(
        InteractiveShell.instance().display_pub,
        "publish",
        lambda data, metadata=None, **more: sent.append((data, metadata)),
    )
    history = pd.DataFrame({"step": [0, 1], "loss": [3.0, 1.0]})
    plots.show(plots.loss_curves({"BF16": history, "FP8": history}, "Both fall"), "Both end at 1.00 nats.")
    ((data, metadata),) = sent
    assert data["image/png"].startswith(b"\x89PNG")
    alt = metadata["image/png"]["alt"]
    for said in ("Both fall", "training step", "nats per token", "BF16, FP8", "Both end at 1.00 nats."):
        assert said in alt
    assert capsys.readouterr().out == "Both end at 1.00 nats.\n"
    assert plt.get_fignums() == [], "the inline backend would show the figure again"


def test_alt_text_names_every_panel():
    figure, (left, right) = plt.subplots(1, 2)
    figure.suptitle("Two answers")
    left.set(title="speed", xlabel="n", ylabel="ms")
    right.set(title="memory", ylabel="GB")
    assert plots.alt_text(figure, "FP8 wins.") == "Figure. Two answers. speed; x: n; y: ms. memory; y: GB. FP8 wins."
