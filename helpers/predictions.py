"""Predict, run, reveal: a guess before a measurement, kept in artifacts/predictions.json, then shown beside it.

    predict("fp8_memory", "How much does it save?", unit="%")    asks, with a box or with choices
    guesses["fp8_memory"] = 50                                    the same without controls
    reveal("fp8_memory", 7.1, "States stay FP32 …")              guess, measurement, and why they may differ

Nobody has to answer: without a guess `reveal` shows the measurement alone. Delete the file to begin anew.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from IPython.display import Markdown, display

from helpers import kept, results

KEPT = results.ARTIFACTS / "predictions.json"


@dataclass(frozen=True)
class Question:
    text: str
    choices: tuple[str, ...]  # () where a number is asked for
    unit: str


class Guesses:
    """Guesses by name: `guesses["fp8_memory"] = 50` keeps one, `guesses["fp8_memory"]` is it, or None."""

    def __init__(self):
        self.asked: dict[str, Question] = {}  # in this process
        self.measured: dict[str, tuple[float | str, str, str]] = {}  # what `reveal` was given, in this process

    def __setitem__(self, name: str, guess: float | str) -> None:
        """Raises ValueError for a name that was not asked for, a choice that does not exist, and what is no number."""
        question = self.asked.get(name)
        if question is None:
            known = ", ".join(self.asked) or "nothing yet: run the cell with predict(...) first"
            raise ValueError(f"{name!r} was not asked for; asked for: {known}")
        if question.choices:
            if guess not in question.choices:
                raise ValueError(f"{guess!r} is not among the choices: {', '.join(map(repr, question.choices))}")
        else:
            try:
                guess = float(guess)
            except (TypeError, ValueError):
                guess = math.nan
            if not math.isfinite(guess):
                raise ValueError("that is no number: give one such as 1.5, with a point and without a unit")
        kept.keep(KEPT, name, {"guess": guess})

    def __getitem__(self, name: str) -> float | str | None:
        return kept.read(KEPT).get(name, {}).get("guess")


guesses = Guesses()


def predict(name: str, question: str, choices: Sequence[str] = (), unit: str = ""):
    """Asks for a guess: one of `choices`, or a number in `unit`. Shows the question; returns the controls, if there are any."""
    asked = guesses.asked[name] = Question(question, tuple(choices), unit)
    example, *others = map(repr, choices) if choices else ["1.5"]
    example += f" (or {', '.join(others)})" if others else ""
    display(
        Markdown(
            f"**Predict.** {question}{f' (in {unit})' if unit else ''}\n\n"
            f"<small>Answer below, or in a cell of your own: `guesses[{name!r}] = {example}`</small>"
        )
    )
    try:
        import ipywidgets as w
    except ImportError:
        return None
    return controls(w, name, asked)


def controls(w, name: str, asked: Question):
    """A row of choices or a box, and a line that says what was kept. It also reveals what has been measured already."""
    said, before = w.HTML(), guesses[name]
    wide = w.Layout(width="max-content", max_width="100%")
    if asked.choices:
        before = before if before in asked.choices else None
        asks = w.RadioButtons(options=list(asked.choices), value=before, layout=wide)
    else:
        before = f"{before:g}" if isinstance(before, float) else ""
        asks = w.Text(
            value=before, placeholder="your guess", description=asked.unit, continuous_update=False, layout=wide
        )
    if before:
        said.value = "Your guess from before. You can change it."

    def answered(change):
        try:
            guesses[name] = change["new"]
            known = guesses.measured.get(name)
            said.value = reveal(name, *known)._repr_html_() if known else "Kept. Now run on."
        except (ValueError, OSError) as error:
            said.value = escape(f"Not kept: {error}", quote=False)

    asks.observe(answered, "value")
    return w.VBox([asks, said])


@dataclass(frozen=True)
class Revealed:
    """A guess beside the measurement, and why they may differ."""

    guess: float | str | None
    measured: float | str
    unit: str
    why: str
    detail: str

    def shown(self, value: float | str) -> str:
        return value if isinstance(value, str) else f"{value:.3g} {self.unit}".strip()

    def verdict(self) -> str:
        if self.guess is None:
            return "No guess was made."
        if isinstance(self.measured, str):
            return "As you said." if self.guess == self.measured else "Not what you said."
        if self.guess > 0 < self.measured:
            factor = self.measured / self.guess
            return "Close." if 0.9 < factor < 1 / 0.9 else f"The measurement is {factor:.2g} times your guess."
        return ""

    def rows(self) -> list[tuple[str, str]]:
        guess = "-" if self.guess is None else self.shown(self.guess)
        return [("your guess", guess), ("measured", self.shown(self.measured))]

    def __repr__(self) -> str:
        lines = [*(f"{k:<10}  {v}" for k, v in self.rows()), self.detail, self.verdict(), self.why]
        return "\n".join(filter(None, lines))

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th style='text-align:left'>{k}</th><td style='text-align:left'><b>{escape(v)}</b></td></tr>"
            for k, v in self.rows()
        )
        text = " ".join(filter(None, [self.verdict(), self.why]))
        return (
            "<div style='border-left:6px double currentColor;padding:.3em 1em;max-width:52em'>"
            f"<table>{cells}</table><div>{escape(self.detail)}</div><div>{escape(text)}</div></div>"
        )


def reveal(name: str, measured: float | str, why: str, detail: str = "") -> Revealed:
    """Guess beside measurement. `measured` is one of the question's choices, or a number; `detail` says where it is from.

    Raises ValueError if the question has choices and `measured` is none of them.
    """
    question = guesses.asked.get(name) or Question("", (), "")
    if question.choices and measured not in question.choices:
        raise ValueError(f"measured={measured!r} is not among the choices of {name}: {', '.join(question.choices)}")
    guesses.measured[name] = measured, why, detail
    guess = guesses[name]
    if isinstance(guess, str) != isinstance(measured, str) or (question.choices and guess not in question.choices):
        guess = None  # kept by an older version of the notebook
    return Revealed(guess, measured, question.unit, why, detail)
