"""The exercises: every check against right, blank, raising, wrong and mutated answers; what is kept; how they stand in the notebooks."""

import ast
import copy
import inspect
import json
import re
import subprocess
import sys

import nbformat
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from helpers import exercises, solutions, transfer
from helpers.checks import EXERCISES
from helpers.exercises import examine, hint, progress, solution
from tests.wrong_answers import WRONG, no_sign_and_no_subnormals
from tools import run_notebooks

ROOT = run_notebooks.ROOT
PATHS = {path.name[:2]: path for path in run_notebooks.find_notebooks()}
CORE_MINUTES = 40
each = pytest.mark.parametrize("name", EXERCISES)


def judge(name, answer, seed=0):
    return examine(EXERCISES[name], answer, torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------ answers


@each
def test_the_solution_passes_whatever_is_drawn(name):
    for seed in range(5):
        assert judge(name, getattr(solutions, name), seed).state == "correct", judge(
            name, getattr(solutions, name), seed
        )


@each
def test_a_blank_answer_is_not_attempted(name):
    def blank(*arguments):
        raise NotImplementedError

    assert judge(name, blank).state == "not attempted"


@each
def test_an_answer_that_raises_is_wrong_and_told_so(name):
    def raises(*arguments):
        raise ZeroDivisionError("division by zero")

    verdict = judge(name, raises)
    assert verdict.state == "wrong"
    assert "it raised ZeroDivisionError: division by zero" in str(verdict)


@each
def test_each_wrong_answer_has_a_message_of_its_own(name):
    assert len(WRONG[name]) >= 3
    messages = set()
    for answer, words in WRONG[name]:
        for seed in range(3):
            verdict = judge(name, answer, seed)
            assert verdict.state == "wrong"
            assert words in verdict.wrong.message
        messages.add(verdict.wrong.message)
        assert verdict.wrong.case
        assert "raised" in verdict.wrong.message or verdict.wrong.yours != verdict.wrong.expected
    assert len(messages) == len(WRONG[name])


@each
@pytest.mark.parametrize("value", [0, 1.0, True, None, "fc1", (1, 2), [], set(), torch.zeros(3)], ids=repr)
def test_no_constant_passes(name, value):
    assert judge(name, lambda *arguments: value).state == "wrong"


def test_of_two_mistakes_the_one_that_the_shown_case_suffers_from_is_named():
    verdict = judge("decode_byte", no_sign_and_no_subnormals)
    assert verdict.wrong.case == "decode_byte(0b1_0111_100)"
    assert "sign bit" in verdict.wrong.message


def test_what_is_no_function_is_told_so():
    verdict = judge("decode_byte", 0.5)
    assert verdict.state == "wrong"
    assert "check.decode_byte(decode_byte)" in str(verdict)


def test_an_error_of_torch_is_not_taken_for_a_blank():
    """torch raises NotImplementedError, too, for operations that a type lacks."""
    verdict = judge("scale_from_amax", lambda x, top: top / x.to(torch.float8_e4m3fn).abs().max())
    assert verdict.state == "wrong"
    assert "NotImplementedError" in verdict.wrong.message


def test_the_verdict_names_the_line_that_failed_and_shows_no_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))  # the shell keeps a history
    shell = InteractiveShell()
    code = "def decode_byte(code):\n    exponent = code >> 3\n    return code / (exponent - exponent)\n"
    shell.run_cell(code)
    text = repr(judge("decode_byte", shell.user_ns["decode_byte"]))
    assert "ZeroDivisionError" in text
    assert "`return code / (exponent - exponent)`" in text
    assert "Traceback" not in text


def test_a_verdict_is_told_apart_without_colour_and_escapes_what_it_shows():
    wrong = judge("decode_byte", lambda code: "<b>bold</b>")
    html = wrong._repr_html_()
    assert "✘ wrong" in html
    assert "<b>bold</b>" not in html
    assert "expected" in html
    assert "color:" not in html.replace("currentColor", "")
    assert "✔ correct" in repr(judge("decode_byte", solutions.decode_byte))


# ------------------------------------------------------------------------------------------------ mutants

SWAPS = {
    ast.Add: [ast.Sub], ast.Sub: [ast.Add], ast.Mult: [ast.Div, ast.Add], ast.Div: [ast.Mult], ast.FloorDiv: [ast.Div, ast.Mult],
    ast.Pow: [ast.Mult], ast.RShift: [ast.LShift], ast.BitAnd: [ast.BitOr], ast.BitOr: [ast.BitAnd],
    ast.Gt: [ast.GtE, ast.Lt], ast.GtE: [ast.Gt], ast.Lt: [ast.LtE, ast.Gt], ast.LtE: [ast.Lt], ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq], ast.And: [ast.Or], ast.Or: [ast.And],
}  # fmt: skip
CALLS = {"max": "min", "amax": "amin", "any": "all", "argmax": "argmin", "idxmax": "idxmin"}


def replacements(node):
    """What a node of the tree may be replaced by."""
    new = copy.deepcopy(node)
    match node:
        case ast.BinOp() | ast.BoolOp():
            for operator in SWAPS.get(type(node.op), []):
                new.op = operator()
                yield copy.deepcopy(new)
        case ast.Compare():
            for operator in SWAPS.get(type(node.ops[0]), []):
                new.ops = [operator()]
                yield copy.deepcopy(new)
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield new.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(node.value + 1)
            yield ast.Constant(node.value - 1)
        case ast.Call(func=ast.Attribute(attr="abs" | "clone" | "detach")):
            yield new.func.value
        case ast.Call(func=ast.Attribute() as function) if function.attr in CALLS:
            new.func.attr = CALLS[function.attr]
            yield new
        case ast.Call(func=ast.Name() as function) if function.id in CALLS:
            new.func.id = CALLS[function.id]
            yield new
        case ast.IfExp():
            new.body, new.orelse = new.orelse, new.body
            yield new
        case ast.If():
            new.test = ast.UnaryOp(ast.Not(), new.test)
            yield new
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Subscript()]):
            yield ast.Pass()  # the statement is left out
        case ast.With():
            yield [ast.If(ast.Constant(True), new.body, [])]
        case ast.FunctionDef() if node.decorator_list:
            new.decorator_list = []
            yield new


class Replace(ast.NodeTransformer):
    def __init__(self, target, new):
        self.target, self.new = target, new

    def visit(self, node):
        return self.new if node is self.target else super().visit(node)


def mutants(name):
    """(what changed, source) for every small change of a solution."""
    source = inspect.getsource(getattr(solutions, name))
    before = ast.unparse(ast.parse(source)).splitlines()
    for position in range(len(list(ast.walk(ast.parse(source))))):
        for number in range(len(list(replacements(list(ast.walk(ast.parse(source)))[position])))):
            tree = ast.parse(source)
            target = list(ast.walk(tree))[position]
            changed = Replace(target, list(replacements(target))[number]).visit(tree)
            after = ast.unparse(ast.fix_missing_locations(changed))
            lines = [line.strip() for line in after.splitlines() if line not in before]
            yield " | ".join(lines), after


# Mutants that compute the same, or something as right: name -> {what the line became: why it is as good}.
OTHER_TOKENS = "any other tokens in row 0 show the same"
ONE_PART = "a part in 447 changes no ranking"
EQUIVALENT = {
    "decode_byte": {
        "sign = -1.0 if code >= 127 else 1.0": "127 is NaN, which is never asked",
        "sign = -1.0 if code > 128 else 1.0": "128 is -0, which equals 0",
        "sign = -1.0 if code >= 129 else 1.0": "128 is -0, which equals 0",
    },
    "leaks_across_batch": {
        "changed[0] = (changed[0] - 1) % 96": OTHER_TOKENS,
        "changed[0] = (changed[0] + 2) % 96": OTHER_TOKENS,
        "changed[0] = (changed[0] + 1) % 95": OTHER_TOKENS,
        "changed[0] = (changed[1] + 1) % 96": OTHER_TOKENS,
        "changed[0] = (changed[-1] + 1) % 96": OTHER_TOKENS,
        "if True:": "with gradients the same logits cost more memory",
        "return bool((moved[1:] >= 1e-06).any())": "no difference is exactly the limit",
    },
    "train_step": {"optimizer.zero_grad(set_to_none=False)": "zeros in place of nothing: the same gradients"},
    "next_tokens": {"return logits[rows, lengths - 1].argmax(dim=1)": "of two dimensions the last is number 1"},
    "sabotaged_layer": {
        "off = share.where(share >= 1, 1 / share)": "1 and 1 / 1 are the same",
        "largest = state['format'].map({'E4M3': 447.0, 'E5M2': 57344.0})": ONE_PART,
        "largest = state['format'].map({'E4M3': 449.0, 'E5M2': 57344.0})": ONE_PART,
        "largest = state['format'].map({'E4M3': 448.0, 'E5M2': 57343.0})": ONE_PART,
        "largest = state['format'].map({'E4M3': 448.0, 'E5M2': 57345.0})": ONE_PART,
    },
}


@each
def test_every_small_mutation_of_the_solution_is_caught(name):
    survived, made = set(), 0
    for change, source in mutants(name):
        made += 1
        namespace = dict(vars(solutions))
        exec(source, namespace)
        if any(judge(name, namespace[name], seed).state == "correct" for seed in range(2)):
            survived.add(change)
    assert made >= 3
    assert survived == set(EQUIVALENT.get(name, {}))


# ------------------------------------------------------------------------------------------------ hints, solutions, progress


def test_hints_come_one_after_the_other_and_the_solution_is_the_tested_source():
    fresh = exercises.Each(exercises.Hints().give)
    for name, exercise in EXERCISES.items():
        first, second = exercise.hints
        assert len({first, second}) == 2
        once, twice = repr(getattr(fresh, name)()), repr(getattr(fresh, name)())
        assert first in once
        assert second not in once
        assert first in twice
        assert second in twice
        assert repr(getattr(solution, name)()) == inspect.getsource(getattr(solutions, name)).rstrip()


def test_an_unknown_exercise_is_refused_with_the_choices():
    with pytest.raises(AttributeError, match="no exercise 'decode_bite'; there are decode_byte"):
        hint.decode_bite()
    with pytest.raises(ValueError, match="'09' has no exercises; choose one of 01"):
        progress("09")


ANSWER = """
import json, sys
from helpers import solutions
from helpers.exercises import check, progress
def blank(*arguments):
    raise NotImplementedError
for name, how in zip(sys.argv[1::2], sys.argv[2::2]):
    answer = {"right": getattr(solutions, name), "wrong": lambda *a: 7, "blank": blank}[how]
    said = repr(getattr(check, name)(answer))
    print(json.dumps([said, *(state for _, other, _, state in progress().rows if other == name)]))
"""


def run(tree, *arguments):
    return subprocess.run([sys.executable, *arguments], cwd=tree, capture_output=True, text=True, encoding="utf-8")


def states(tree):
    shown = run(tree, "-m", "helpers.exercises", "--json")
    assert shown.returncode == 0, shown.stderr
    rows = json.loads(shown.stdout)
    assert [(row["name"], row["notebook"]) for row in rows] == [(e.name, e.notebook) for e in EXERCISES.values()]
    return {row["name"]: row["state"] for row in rows}


def test_progress_is_kept_and_a_correct_answer_stays(own_tree):
    file = own_tree / "artifacts" / "exercises.json"
    answers = (
        "decode_byte blank decode_byte wrong legal_shape wrong legal_shape right legal_shape wrong legal_shape blank"
    )
    said = run(own_tree, "-c", ANSWER, *answers.split())
    assert not said.stderr
    verdicts, kept = zip(*map(json.loads, said.stdout.splitlines()), strict=True)
    assert [verdict.split(". ")[0] for verdict in verdicts] == [
        "○ not attempted", "✘ wrong", "✘ wrong", "✔ correct", "✘ wrong", "○ not attempted",
    ]  # fmt: skip
    assert list(kept) == ["not attempted", "wrong", "wrong", "correct", "correct", "correct"]
    shown = run(own_tree, "-m", "helpers.exercises").stdout
    assert re.search(r"01 +decode_byte +core +✘ open \(wrong\)", shown)
    assert re.search(r"02 +legal_shape +core +✔ done", shown)
    assert f"1 of {len(EXERCISES)} done" in shown

    file.write_text('{"legal_shape": {"sta')  # cut short
    assert set(states(own_tree).values()) == {"not attempted"}
    assert (file.parent / "exercises.damaged-1.json").read_text() == '{"legal_shape": {"sta'


def test_running_all_cells_leaves_no_trace_and_what_cannot_be_kept_is_still_judged(own_tree):
    run(own_tree, "-c", ANSWER, "decode_byte", "blank")
    assert not (own_tree / "artifacts").exists()
    (own_tree / "artifacts").write_text("a file in the way")
    said = run(own_tree, "-c", ANSWER, "decode_byte", "right")
    assert said.returncode == 0, said.stderr
    (verdict, kept) = json.loads(said.stdout)
    assert verdict.startswith("✔ correct")
    assert "Not kept" in verdict
    assert kept == "not attempted"


KEEP = """
import sys
from pathlib import Path
from helpers.kept import keep
print("ready", flush=True)
sys.stdin.readline()
for number in range(40):
    keep(Path(sys.argv[1]), f"{sys.argv[2]}{number}", {"state": "correct"})
"""


def test_two_kernels_that_answer_at_once_lose_nothing(tmp_path):
    path = tmp_path / "exercises.json"
    command = [sys.executable, "-c", KEEP, str(path)]
    kernels = [
        subprocess.Popen([*command, who], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for who in "abc"
    ]
    for kernel in kernels:
        assert kernel.stdout.readline() == "ready\n"
    for kernel in kernels:  # all at once
        kernel.stdin.write("\n")
        kernel.stdin.flush()
    for kernel in kernels:
        kernel.communicate()
        assert kernel.returncode == 0
    assert len(json.loads(path.read_text())) == 3 * 40
    assert not list(tmp_path.glob("*.tmp"))


def test_a_wrong_option_is_refused():
    said = run(ROOT, "-m", "helpers.exercises", "--jsn")
    assert said.returncode == 1
    assert "--json" in said.stderr


# ------------------------------------------------------------------------------------------------ in the notebooks


def cells(book):
    return nbformat.read(PATHS[book], as_version=4).cells


def tags(cell):
    return set(cell.metadata.get("tags", []))


def tree_of(cell):
    return ast.parse(re.sub(r"^[%!].*$", "", cell.source, flags=re.MULTILINE))


def cell_id(name):
    return "ex-" + name.replace("_", "-")


@each
def test_stub_and_check_stand_together_in_the_notebook(name):
    exercise = EXERCISES[name]
    listed = cells(exercise.notebook)
    ids = [cell.id for cell in listed]
    here = ids.index(cell_id(name))
    intro, stub, check = listed[here - 1 : here + 2]
    assert intro.cell_type == "markdown"
    assert intro.id == cell_id(name) + "-task"
    assert check.id == cell_id(name) + "-check"
    for cell in (intro, stub, check):
        assert tags(cell) == {"exercise", "deeper"} if exercise.deeper else {"exercise"}

    (function,) = tree_of(stub).body
    assert isinstance(function, ast.FunctionDef)
    assert function.name == name
    docstring, blank = function.body
    assert ast.unparse(blank) == "raise NotImplementedError"
    assert len(ast.get_docstring(function)) > 60
    assert docstring.value.value
    expected = list(inspect.signature(getattr(solutions, name)).parameters)
    assert [argument.arg for argument in function.args.args] == expected
    assert all(argument in ast.get_docstring(function) for argument in expected)
    assert ast.unparse(tree_of(check)) == f"check.{name}({name})"
    for line in (f"# hint.{name}()", f"# solution.{name}()"):
        assert line in check.source


@each
def test_the_solution_needs_nothing_that_its_notebook_has_not_imported(name):
    listed = cells(EXERCISES[name].notebook)
    here = [cell.id for cell in listed].index(cell_id(name))
    known = set(dir(__import__("builtins")))
    for cell in listed[:here]:
        if cell.cell_type == "code":
            for node in ast.walk(tree_of(cell)):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    known |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    code = getattr(solutions, name).__code__
    inner = [const for const in code.co_consts if inspect.iscode(const)]
    used = {n for c in (code, *inner) for n in c.co_names if n in vars(solutions)}
    assert used <= known


@pytest.mark.parametrize("book", PATHS)
def test_two_core_and_two_folded_exercises_and_no_other_stubs(book):
    here = [e for e in EXERCISES.values() if e.notebook == book]
    assert [e.deeper for e in here] == [False, False, True, True]
    stubs = {
        c.id
        for c in cells(book)
        if c.cell_type == "code" and re.fullmatch(r"ex-(?!.*-check$)(?!progress$|transfer$).*", c.id)
    }
    assert stubs == {cell_id(e.name) for e in here}
    assert any(c.id == "ex-progress" and f'progress("{book}")' in c.source for c in cells(book))


@pytest.mark.parametrize("book", PATHS)
def test_no_other_cell_depends_on_an_answer_or_takes_its_name(book):
    """A later cell would fail for whoever skips an exercise; one that reuses a name would undo their answer."""
    ours = {e.name for e in EXERCISES.values() if e.notebook == book}
    ours |= {"check", "hint", "solution", "progress", "predict", "reveal", "guesses"}
    for cell in cells(book):
        if cell.cell_type != "code" or cell.id.startswith(("ex-", "predict-", "reveal-")):
            continue
        nodes = list(ast.walk(tree_of(cell)))
        bound = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        bound |= {n.id for n in nodes if isinstance(n, ast.Name)}
        assert not bound & ours, cell.id


@pytest.mark.parametrize("book", PATHS)
def test_folded_exercises_stand_under_a_collapsed_heading_of_their_own(book):
    """JupyterLab hides what follows a collapsed heading up to the next one of its level; Colab keeps a list of them."""
    notebook = nbformat.read(PATHS[book], as_version=4)
    collapsed = [cell for cell in notebook.cells if cell.metadata.get("jp-MarkdownHeadingCollapsed")]
    assert notebook.metadata.colab.collapsed_sections == [cell.metadata.id for cell in collapsed]
    hidden = set()
    for head in collapsed:
        level = len(re.match(r"#+", head.source)[0])
        hidden.add(head.id)
        for cell in notebook.cells[notebook.cells.index(head) + 1 :]:
            levels = [len(m) for m in re.findall(r"^(#+) ", cell.source, re.M)] if cell.cell_type == "markdown" else []
            if levels and min(levels) <= level:
                break
            hidden.add(cell.id)
    assert hidden == {c.id for c in notebook.cells if c.id.startswith("ex-") and "deeper" in tags(c)}


def reader_minutes(book):
    """Words / 200, 20 s a core code cell, 4 min a core exercise, 1 min a prediction, and the run as recorded.

    The words of the ten questions at the end of 05, with choices and explanations, are read there, too.
    """
    core = [cell for cell in cells(book) if "deeper" not in tags(cell)]
    words = sum(len(cell.source.split()) for cell in core if cell.cell_type == "markdown")
    if any(cell.id == "ex-transfer" for cell in core):
        words += sum(len(f"{q.text} {' '.join(q.choices)} {q.why}".split()) for q in transfer.QUESTIONS)
    code = sum(cell.cell_type == "code" and "core" in tags(cell) for cell in core)
    exercises_here = sum(not e.deeper for e in EXERCISES.values() if e.notebook == book)
    predictions = sum(cell.id.startswith("predict-") for cell in core)
    recorded = json.loads((ROOT / "results" / "nvidia-h200" / "summary.json").read_text())
    seconds = next(row["seconds"] for row in recorded if row["notebook"].startswith(book))
    return words / 200 + code / 3 + 4 * exercises_here + predictions + seconds / 60


@pytest.mark.parametrize("book", PATHS)
def test_reader_minutes(book):
    """At most 40, and near to what the title says."""
    minutes = reader_minutes(book)
    assert minutes <= CORE_MINUTES
    stated = int(re.search(r"about (\d+) minutes", cells(book)[0].source, re.IGNORECASE)[1])
    assert abs(stated - minutes) <= 3


def test_workshop_md_lists_every_exercise_under_an_outcome_that_it_states():
    text = (ROOT / "WORKSHOP.md").read_text(encoding="utf-8")
    outcomes = set(re.findall(r"^- \*\*(\d\.\d)\*\* \w", text, re.MULTILINE))
    rows = re.findall(r"^\| (\d\d) \| `(\w+)` \| (core|deeper) \| (\d\.\d) \| .+ \|$", text, re.MULTILINE)
    assert rows == [(e.notebook, e.name, "deeper" if e.deeper else "core", e.outcome) for e in EXERCISES.values()]
    assert {e.outcome for e in EXERCISES.values()} <= outcomes
    assert all(e.outcome[0] == e.notebook[1] for e in EXERCISES.values())
    named = set(re.findall(r"`(\w+)`", text.split("### 90 minutes")[1].split("## ")[0]))
    assert named <= EXERCISES.keys()


def test_workshop_md_gives_each_notebook_the_minutes_that_its_title_states():
    text = (ROOT / "WORKSHOP.md").read_text(encoding="utf-8")
    half_day, short = text.split("### Half a day")[1].split("### 90 minutes")
    for book in PATHS:
        stated = re.search(r"about (\d+) minutes", cells(book)[0].source, re.IGNORECASE)[1]
        assert re.search(rf"^\| {stated} \| {book} ", half_day, re.MULTILINE), book
    minutes = [
        sum(map(int, re.findall(r"^\| (\d+) \|", part, re.MULTILINE))) for part in (half_day, short.split("## ")[0])
    ]
    assert minutes == [240, 90]


@pytest.mark.slow
@pytest.mark.parametrize("book", PATHS)
def test_a_notebook_with_all_answers_filled_in(book, own_tree):
    """It runs, and all answers are correct; and `reveal` says the same when it is run once more after everything else."""
    path = own_tree / PATHS[book].relative_to(ROOT)
    notebook = nbformat.read(path, as_version=4)
    reveals = [cell for cell in notebook.cells if cell.id.startswith("reveal-")]
    for cell in notebook.cells:
        name = cell.id.removeprefix("ex-").replace("-", "_")
        if cell.id.startswith("ex-") and name in EXERCISES:
            cell.source = inspect.getsource(getattr(solutions, name))
    notebook.cells += [nbformat.v4.new_code_cell(cell.source, id=f"{cell.id}-again") for cell in reveals]
    nbformat.write(notebook, path)
    out = own_tree / "artifacts" / "run"
    result = run_notebooks.run_one(path, out, own_tree)
    assert result.status == "passed", "\n".join([result.where, *result.error])
    found = states(own_tree)
    answered = {e.name: found[e.name] for e in EXERCISES.values() if e.notebook == book}
    assert set(answered.values()) == {"correct"}, answered
    executed = nbformat.read(out / path.name, as_version=4)
    shown = {
        cell.id: cell.outputs[-1]["data"]["text/plain"] for cell in executed.cells if cell.id.startswith("reveal-")
    }
    assert len(shown) == 2 * len(reveals)
    for cell in reveals:
        assert shown[cell.id] == shown[f"{cell.id}-again"]


@pytest.fixture
def own_tree(tmp_path):
    """A copy of the checkout for one test: what is kept in its artifacts/ is nobody else's."""
    from tests.conftest import copy_tree

    return copy_tree(tmp_path / "workshop")
