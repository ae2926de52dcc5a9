"""The exercises as the notebooks use them: `check.name(function)`, `hint.name()`, `solution.name()`, `progress()`.

    python -m helpers.exercises           progress: what is done, what is open
    python -m helpers.exercises --json    a list of {"name", "notebook", "state"}

A check draws new inputs each time, from a torch.Generator seeded by the operating system. What it finds is kept in
artifacts/exercises.json, where a correct answer stays correct; delete that file to begin anew.
"""

import inspect
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from html import escape

import torch

from helpers import kept, results, solutions
from helpers.checks import EXERCISES, Exercise
from helpers.grading import Wrong

KEPT = results.ARTIFACTS / "exercises.json"
MARKS = {"correct": "✔", "wrong": "✘", "not attempted": "○"}


@dataclass(frozen=True)
class Text:
    """Text that a notebook shows as it is."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Verdict:
    """What a check found: a state, and for a wrong answer what is wrong with it."""

    exercise: Exercise
    state: str  # "correct", "wrong" or "not attempted"
    wrong: Wrong | None = None
    note: str = ""

    def lines(self) -> tuple[str, list[tuple[str, str]], str]:
        """(headline, the values that show it, what to do next)."""
        name = self.exercise.name
        if self.state == "correct":
            return f"{name} agrees on every case.", [], self.note
        if self.state == "not attempted":
            return f"Write the body of {name} in the cell above, run that cell, then this one.", [], self.note
        rows = [("case", self.wrong.case), ("yours", self.wrong.yours), ("expected", self.wrong.expected)]
        advice = f"hint.{name}() helps; solution.{name}() shows one way."
        return (
            f"{name}: {self.wrong.message}.",
            [row for row in rows if row[1]],
            " ".join(filter(None, [advice, self.note])),
        )

    def __repr__(self) -> str:
        headline, rows, advice = self.lines()
        shown = [f"{MARKS[self.state]} {self.state}. {headline}", *(f"    {k:<8}  {v}" for k, v in rows), advice]
        return "\n".join(filter(None, shown))

    def _repr_html_(self) -> str:
        headline, rows, advice = self.lines()
        table = "".join(
            f"<tr><th style='text-align:left'>{k}</th><td style='text-align:left'><code>{escape(v)}</code></td></tr>"
            for k, v in rows
        )
        border = {"correct": "solid", "wrong": "double", "not attempted": "dotted"}[self.state]
        return (
            f"<div style='border-left:6px {border} currentColor;padding:.3em 1em;max-width:52em'>"
            f"<b>{MARKS[self.state]} {self.state}.</b> {escape(headline)}"
            + (f"<table>{table}</table>" if table else "")
            + (f"<div>{escape(advice)}</div>" if advice else "")
            + "</div>"
        )


def examine(exercise: Exercise, answer: Callable, generator: torch.Generator) -> Verdict:
    """Runs one check on one answer. Whatever the answer does, short of ending the process, becomes a verdict."""
    name = exercise.name
    if not callable(answer):
        given = f"got {type(answer).__name__}"
        return Verdict(exercise, "wrong", Wrong(f"give the function itself, as in check.{name}({name}); {given}"))

    def named(*arguments):  # a lambda, or another function's name, would make a poor case to show
        return answer(*arguments)

    named.__name__ = name
    try:
        exercise.check(named, generator)
    except NotImplementedError:
        return Verdict(exercise, "not attempted")
    except Wrong as wrong:
        return Verdict(exercise, "wrong", wrong)
    except Exception as error:  # a value that nobody thought of
        return Verdict(
            exercise, "wrong", Wrong(f"what it returns cannot be compared ({type(error).__name__}: {error})")
        )
    return Verdict(exercise, "correct")


def check_and_keep(exercise: Exercise, answer: Callable) -> Verdict:
    verdict = examine(exercise, answer, torch.Generator().manual_seed(int.from_bytes(os.urandom(4))))
    if verdict.state == "not attempted":  # a run of all cells leaves no trace
        return verdict
    try:
        kept.keep(KEPT, exercise.name, {"state": verdict.state}, unless=lambda old: old.get("state") == "correct")
    except OSError as error:
        return Verdict(exercise, verdict.state, verdict.wrong, f"(Not kept: {error}.)")
    return verdict


class Hints:
    """The first call of `hint.name()` gives the first hint, the second one both."""

    def __init__(self):
        self.given = Counter()

    def give(self, exercise: Exercise) -> Text:
        self.given[exercise.name] += 1
        first, second = exercise.hints
        if self.given[exercise.name] == 1:
            return Text(f"Hint 1 of 2. {first}\n(Run it again for the second.)")
        return Text(f"Hint 1 of 2. {first}\nHint 2 of 2. {second}")


def show_solution(exercise: Exercise) -> Text:
    return Text(inspect.getsource(getattr(solutions, exercise.name)).rstrip())


class Each:
    """One attribute an exercise: `Each(f).decode_byte(x)` is `f(EXERCISES["decode_byte"], x)`."""

    def __init__(self, function: Callable):
        for name, exercise in EXERCISES.items():
            setattr(self, name, partial(function, exercise))

    def __getattr__(self, name: str):
        raise AttributeError(f"there is no exercise {name!r}; there are {', '.join(EXERCISES)}")


@dataclass(frozen=True)
class Progress:
    """One row an exercise: notebook, name, whether it is core or deeper, state."""

    rows: list[tuple[str, str, str, str]]

    def summary(self) -> str:
        done = [row for row in self.rows if row[3] == "correct"]
        core = [row for row in self.rows if row[2] == "core"]
        return f"{len(done)} of {len(self.rows)} done, {len(set(core) & set(done))} of {len(core)} core ones"

    def __repr__(self) -> str:
        width = max(len(name) for _, name, _, _ in self.rows)
        lines = [f"{book}  {name:<{width}}  {kind:<6}  {MARKS[s]} {self.word(s)}" for book, name, kind, s in self.rows]
        return "\n".join([*lines, self.summary()])

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr><td>{book}</td><td style='text-align:left'>{name}</td><td>{kind}</td>"
            f"<td style='text-align:left'>{MARKS[state]} {self.word(state)}</td></tr>"
            for book, name, kind, state in self.rows
        )
        head = "<tr><th>notebook</th><th>exercise</th><th></th><th>state</th></tr>"
        return f"<table>{head}{body}</table><p>{self.summary()}</p>"

    @staticmethod
    def word(state: str) -> str:
        return "done" if state == "correct" else f"open ({state})"


def progress(notebook: str = "") -> Progress:
    """What is done and what is open, of one notebook ("01") or of all."""
    notebooks = sorted({exercise.notebook for exercise in EXERCISES.values()})
    if notebook and notebook not in notebooks:
        raise ValueError(
            f"notebook {notebook!r} has no exercises; choose one of {', '.join(notebooks)}, or none for all"
        )
    entries = kept.read(KEPT)
    return Progress(
        [
            (
                e.notebook,
                e.name,
                "deeper" if e.deeper else "core",
                entries.get(e.name, {}).get("state", "not attempted"),
            )
            for e in EXERCISES.values()
            if notebook in ("", e.notebook)
        ]
    )


check, hint, solution = Each(check_and_keep), Each(Hints().give), Each(show_solution)

if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--json"]):
        sys.exit(f"exercises: {' '.join(sys.argv[1:])!r} is not known; use no argument, or --json")
    if sys.argv[1:]:
        rows = [{"name": name, "notebook": book, "state": state} for book, name, _, state in progress().rows]
        print(json.dumps(rows, indent=1))
    else:
        print(progress())
