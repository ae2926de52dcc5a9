import matplotlib.pyplot as plt
import pandas as pd
import pytest

from helpers import plots


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
