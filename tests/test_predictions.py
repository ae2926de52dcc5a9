"""Guesses are kept and held against measurements, with and without controls; the ten questions; both in the notebooks."""

import ast
import json
import subprocess
import sys

import nbformat
import pytest

from helpers import transfer
from tests.conftest import copy_tree
from tools import run_notebooks

PATHS = run_notebooks.find_notebooks()
BOOKS = [path.name[:2] for path in PATHS]


def run(tree, code: str) -> list:
    """What the code says with `say(...)`, in a fresh process in `tree`: nothing is kept in this checkout's artifacts."""
    begin = "import json\nfrom helpers.predictions import guesses, predict, reveal\n"
    begin += "from helpers.transfer import answer, ask\ndef say(x): print('SAID', json.dumps(x))\n"
    ran = subprocess.run(
        [sys.executable, "-c", begin + code], cwd=tree, capture_output=True, text=True, encoding="utf-8"
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return [json.loads(line.removeprefix("SAID ")) for line in ran.stdout.splitlines() if line.startswith("SAID ")]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return copy_tree(tmp_path_factory.mktemp("predictions") / "workshop")


PLAIN = """
import sys
sys.modules["ipywidgets"] = None  # as where it is not installed
say(predict("saved", "How much?", unit="%"))
say(predict("moves", "Which?", ["one", "all"]))
say(repr(reveal("saved", 7.1, "Because.")))  # nobody answered
guesses["saved"] = "50"
guesses["moves"] = "one"
say([guesses["saved"], guesses["moves"], guesses["never"]])
for name, guess in (("moves", "two"), ("saved", "half"), ("saved", float("nan")), ("sved", 1)):
    try:
        guesses[name] = guess
        say("accepted")
    except ValueError as error:
        say(str(error))
say([guesses["saved"], guesses["moves"]])
say(ask())
"""
LATER = """
predict("saved", "How much?", unit="%"), predict("moves", "Which?", ["one", "all"])
say([repr(reveal("saved", 7.1, "Because.", "On an H200.")), repr(reveal("saved", 49, "Because."))])
say([repr(reveal("moves", "all", "Because.")), repr(reveal("moves", "one", "Because."))])
say(reveal("moves", "all", "Since <a> & b.")._repr_html_())
try:
    reveal("moves", "some", "Because.")
except ValueError as error:
    say(str(error))
"""


def test_without_controls_guesses_are_typed_and_kept(tree):
    (number, choice, unanswered, kept, *refused, kept_still, asked) = run(tree, PLAIN)
    assert [number, choice, asked] == [None, None, None]
    assert "No guess was made." in unanswered
    assert "7.1 %" in unanswered
    assert kept == [50.0, "one", None] == [*kept_still, None]
    assert refused == [
        "'two' is not among the choices: 'one', 'all'",
        *["that is no number: give one such as 1.5, with a point and without a unit"] * 2,
        "'sved' was not asked for; asked for: saved, moves",
    ]
    assert json.loads((tree / "artifacts" / "predictions.json").read_text()) == {
        "saved": {"guess": 50.0},
        "moves": {"guess": "one"},
    }

    (far, close), (wrong, right), html, error = run(tree, LATER)  # another process finds them
    for text in ("50 %", "7.1 %", "The measurement is 0.14 times your guess.", "Because.", "On an H200."):
        assert text in far
    assert "Close." in close
    assert "Not what you said." in wrong
    assert "As you said." in right
    assert "Since &lt;a&gt; &amp; b." in html
    assert "'some' is not among the choices of moves: one, all" in error


CONTROLS = """
import ipywidgets as w
def inside(box, kind): return next(c for c in box.children if isinstance(c, kind))
box = predict("lost", "How many?", unit="%")
text, line = inside(box, w.Text), inside(box, w.HTML)
say([text.value, line.value, text.continuous_update])
for typed in ("12.5", "many", ""):
    text.value = typed
    say([line.value, guesses["lost"]])
box = predict("which", "Which?", ("a", "b"))
radio, line = inside(box, w.RadioButtons), inside(box, w.HTML)
say([radio.value, line.value])
radio.value = "b"
say([line.value, guesses["which"]])
again = predict("which", "Which?", ("a", "b"))
say([inside(again, w.RadioButtons).value, inside(again, w.HTML).value])
other = predict("which", "Which, in a newer edition?", ("c", "d"))  # the old guess is no choice any more
say([inside(other, w.RadioButtons).value, repr(reveal("which", "c", "Because."))])
box = predict("late", "How many?")
reveal("late", 4.0, "Because.", "On an H200.")  # all cells have run; now somebody answers
inside(box, w.Text).value = "2"
say(inside(box, w.HTML).value)
from helpers.transfer import buttons
row = buttons(w, 1)
letters, explained = row.children
say([letters.value, list(letters.options), explained.value])
letters.value = "c"
say(explained.value)
letters.value = "a"
say(explained.value)
"""


def test_controls_keep_what_is_chosen_or_typed(tree):
    said = run(tree, CONTROLS)
    assert said[:4] == [["", "", False], ["Kept. Now run on.", 12.5], [said[2][0], 12.5], [said[3][0], 12.5]]
    assert said[2][0].startswith("Not kept: that is no number")
    assert said[4:7] == [[None, ""], ["Kept. Now run on.", "b"], ["b", "Your guess from before. You can change it."]]
    assert said[7][0] is None
    assert "No guess was made." in said[7][1]
    for text in ("<b>2</b>", "<b>4</b>", "2 times your guess", "Because.", "On an H200."):
        assert text in said[8]
    assert said[9] == [None, ["a", "b", "c", "d"], ""]
    assert "✔ c) is right." in said[10]
    assert "✘ Not a) but c) the layout of the input." in said[11]


# ------------------------------------------------------------------------------------------------ the ten questions


def test_ten_questions_each_with_one_right_choice_and_a_reason():
    assert len(transfer.QUESTIONS) == 10
    assert {q.right for q in transfer.QUESTIONS} == set("abcd")  # no letter to bet on
    for number, question in enumerate(transfer.QUESTIONS, 1):
        letters = "abcd"[: len(question.choices)]
        assert len(set(question.choices)) == len(letters) >= 3
        said = [repr(transfer.answer(number, letter)) for letter in letters]
        assert [text.startswith("✔") for text in said] == [letter == question.right for letter in letters]
        assert all(question.why in text and f"Shown in {question.shown_in}" in text for text in said)
        assert all(question.choices[letters.index(question.right)] in text for text in said if text.startswith("✘"))


@pytest.mark.parametrize(
    ("number", "letter", "message"), [(11, "a", "1 to 10"), (1, "e", "a, b, c, d"), (1, "", "a, b, c, d")]
)
def test_an_unknown_question_or_letter_is_refused(number, letter, message):
    with pytest.raises(ValueError, match=message):
        transfer.answer(number, letter)


# ------------------------------------------------------------------------------------------------ in the notebooks


def calls(path, function: str) -> dict[str, tuple[int, ast.Call]]:
    """The calls of a function in a notebook: first argument -> (place of the cell, call)."""
    found = {}
    for place, cell in enumerate(nbformat.read(path, as_version=4).cells):
        if cell.cell_type == "code":
            for node in ast.walk(ast.parse(cell.source)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function:
                    assert cell.id.startswith(f"{function}-"), cell.id
                    found[node.args[0].value] = (place, node)
    return found


@pytest.mark.parametrize("path", PATHS, ids=BOOKS)
def test_two_or_three_predictions_each_revealed_after_the_cell_that_measures(path):
    asked, revealed = calls(path, "predict"), calls(path, "reveal")
    assert 2 <= len(asked) <= 3
    assert asked.keys() == revealed.keys()
    cells = nbformat.read(path, as_version=4).cells
    for name, (place, _) in asked.items():
        after = revealed[name][0]
        between = cells[place + 1 : after]
        assert any("core" in cell.metadata.get("tags", []) for cell in between), f"{name}: nothing is measured"
        assert not isinstance(revealed[name][1].args[1], ast.Constant), (
            f"{name}: the measurement is typed, not measured"
        )


def test_no_two_predictions_share_a_name():
    names = [name for path in PATHS for name in calls(path, "predict")]
    assert len(names) == len(set(names))
