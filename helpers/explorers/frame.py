"""What all explorers share: a picture of the starting values, controls, and a picture of what the reader chose.

An explorer is a function `draw(**values) -> (figure, sentence)` and controls for its values. As the last line of a cell it
displays the controls, then the starting picture as an output of its own, so that GitHub, nbconvert and a Jupyter
without ipywidgets show it too. At the first move the picture between them takes its place. Works with ipywidgets 7 and 8.

That picture is HTML in a widget, not something displayed from a callback: it arrives in every front end, it does not
flicker, and it carries its alt text.
"""

import base64
import html
import math
from collections.abc import Callable
from dataclasses import dataclass

from IPython.display import display

from helpers import plots

WITHOUT_WIDGETS = "The controls need a running notebook with ipywidgets; this is the picture of the starting values."
AGAIN = "Run the cell again to return to the starting picture."


@dataclass(frozen=True)
class Number:
    """A slider with a number field beside it. `log`: the slider moves in powers of this base.

    A typed value becomes the nearest multiple of `step`; with `log` and a fractional step, the nearest number of three digits.
    """

    label: str
    start: float
    low: float
    high: float
    step: float = 1
    log: int = 0

    @property
    def whole(self) -> bool:
        return float(self.step).is_integer()

    def snap(self, value: float) -> float:
        if self.whole:
            value = round(value / self.step) * self.step
        elif self.log:
            value = float(f"{value:.3g}")
        else:
            value = round(round(value / self.step) * self.step, 10)
        return min(max(value, self.low), self.high)

    def samples(self) -> list[float]:
        """The least, a middle and the largest value."""
        middle = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        return [self.low, self.snap(middle), self.high]


@dataclass(frozen=True)
class Field:
    """A number without bounds, typed."""

    label: str
    start: float

    def snap(self, value: float) -> float:
        return value

    def samples(self) -> list[float]:
        return [-1e6, self.start, 1e6]


@dataclass(frozen=True)
class Choice:
    """One of several names."""

    label: str
    start: str
    options: tuple[str, ...]

    def snap(self, value: str) -> str:
        return value

    def samples(self) -> list[str]:
        return list(self.options)


def widgets_of(control, w) -> tuple[list, object]:
    """(the widgets whose value is the control's, what to display)."""
    named = {"description": control.label, "style": {"description_width": "16em"}}
    match control:
        case Choice():
            one = w.Dropdown(options=control.options, value=control.start, layout=w.Layout(width="47em"), **named)
            return [one], one
        case Field():
            one = w.FloatText(value=control.start, step=None, layout=w.Layout(width="27em"), **named)
            return [one], one
    shared = named | {"continuous_update": False, "readout": False, "layout": w.Layout(width="38em")}
    if control.log:
        ends = {"min": math.log(control.low, control.log), "max": math.log(control.high, control.log)}
        slider = w.FloatLogSlider(value=control.start, base=control.log, step=0.25, **ends, **shared)
    else:
        kind = w.IntSlider if control.whole else w.FloatSlider
        slider = kind(value=control.start, min=control.low, max=control.high, step=control.step, **shared)
    kind = w.BoundedIntText if control.whole else w.BoundedFloatText
    step = control.step if control.whole or not control.log else None
    typed = kind(value=control.start, min=control.low, max=control.high, step=step, layout=w.Layout(width="8em"))
    return [slider, typed], w.HBox([slider, typed])


class Explorer:
    """The figure of `draw(**values) -> (figure, sentence)`, and a control for each value.

    `settle(changed, values)` returns the values that belong together after the one named `changed` was moved;
    `limits(values)` returns the largest value of each control whose range depends on the others.
    """

    def __init__(self, draw: Callable, settle: Callable | None = None, limits: Callable | None = None, **controls):
        self.draw, self.controls = draw, controls
        self.settle = settle or (lambda changed, values: values)
        self.limits = limits or (lambda values: {})
        self.values = {name: control.start for name, control in controls.items()}

    def after(self, changed: str, value) -> dict:
        """All values once the control `changed` was moved to `value`."""
        value = self.controls[changed].snap(value)
        if changed in (limits := self.limits(self.values)):
            value = min(value, limits[changed])
        return self.settle(changed, self.values | {changed: value})

    def _ipython_display_(self) -> None:
        try:
            import ipywidgets as w
        except ImportError:
            display({"text/plain": WITHOUT_WIDGETS}, raw=True)
        else:
            self.display_controls(w)
        figure, sentence = self.draw(**self.values)
        alt = plots.alt_text(figure, sentence)
        data = {"image/png": plots.png(figure), "text/plain": alt}
        self.starting = [
            display(data, metadata={"image/png": {"alt": alt}}, raw=True, display_id=True),
            display({"text/plain": sentence}, raw=True, display_id=True),
        ]

    def display_controls(self, w) -> None:
        made = {name: widgets_of(control, w) for name, control in self.controls.items()}
        self.inputs = {name: inputs for name, (inputs, _) in made.items()}
        self.picture, self.setting = w.HTML(), False
        for name, inputs in self.inputs.items():
            for widget in inputs:
                widget.observe(lambda change, name=name: self.move(name, change["new"]), "value")
        box = w.VBox([*(shown for _, shown in made.values()), self.picture])
        # Displayed by hand so that a page without widgets shows a sentence and not the widget's repr.
        view = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
        display({"application/vnd.jupyter.widget-view+json": view, "text/plain": WITHOUT_WIDGETS}, raw=True)

    def move(self, name: str, value) -> None:
        """A control was moved: brings the others in line and draws once."""
        if self.setting:
            return
        try:
            values = self.after(name, value)
            self.show_values(values)
            if values != self.values:
                self.values = values
                self.redraw()
        except Exception as error:  # a front end drops what a callback raises, so it has to be shown
            self.picture.value = f"<pre>{html.escape(f'{type(error).__name__}: {error}')}</pre>"

    def show_values(self, values: dict) -> None:
        self.setting = True
        try:
            for name, high in self.limits(values).items():
                for widget in self.inputs[name]:
                    widget.max = high
            for name, inputs in self.inputs.items():
                for widget in inputs:
                    widget.value = values[name]
        finally:
            self.setting = False

    def redraw(self) -> None:
        figure, sentence = self.draw(**self.values)
        alt = html.escape(plots.alt_text(figure, sentence))
        source = base64.b64encode(plots.png(figure)).decode()
        self.picture.value = f'<img alt="{alt}" src="data:image/png;base64,{source}"><p>{html.escape(sentence)}</p>'
        while self.starting:  # the first move: the starting picture makes room
            self.starting.pop().update({"text/plain": AGAIN if not self.starting else ""}, raw=True)
