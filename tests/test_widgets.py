"""Each explorer's drawing over its controls' range, and its controls moved as a reader moves them."""

import matplotlib.pyplot as plt
import pytest

from helpers import formats, widgets


@pytest.mark.parametrize("name", formats.FORMATS)
def test_the_figure_is_drawn_over_the_whole_range(name):
    last = 2 ** formats.FORMATS[name].bits - 1
    for code in (0, last // 2, last):
        figure = widgets.draw_code(name, code)
        assert name in " ".join(t.get_text() for t in figure.findobj(plt.Text))
        plt.close(figure)


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [("E3M4", 0, "'E3M4' is not known; choose one of E4M3"), ("E4M3", 256, "256"), ("E2M1", 16, "16")],
)
def test_bad_format_or_code_is_refused(name, code, message):
    with pytest.raises(ValueError, match=message):
        widgets.draw_code(name, code)


def controls(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from controls(child)


def test_moving_a_control_redraws_and_raises_nothing():
    pytest.importorskip("ipywidgets")
    explorer = widgets.format_explorer()
    found = {type(w).__name__: w for w in controls(explorer)}
    output = found["Output"]
    for code in (0, 127, 255):
        found["IntSlider"].value = code
        assert not [o for o in output.outputs if o["output_type"] == "error"]
    slider = found["IntSlider"]
    assert not slider.continuous_update
    assert any(type(w).__name__ == "BoundedIntText" and w.value == slider.value for w in controls(explorer)), (
        "a typed equivalent"
    )
