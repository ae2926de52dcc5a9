"""The runner, tried on notebooks of a few cells, each in a folder that looks like the workshop's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from tools import run_notebooks

CARD_CELL = """
from IPython.display import display
display({"application/vnd.fp8-workshop.card+json": {"tier": "cpu", "fp8": "recorded"}, "text/plain": "card"}, raw=True)
"""


def write_notebook(folder: Path, name: str, *sources: str) -> Path:
    path = folder / "notebooks" / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [v4.new_code_cell(source, id=f"cell-{number}") for number, source in enumerate(sources, 1)]
    nbformat.write(v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return path


def run(folder: Path, name: str, *sources: str, **options) -> run_notebooks.Result:
    path = write_notebook(folder, name, *sources)
    return run_notebooks.run_one(path, folder / "artifacts" / "run", folder, **options)


def test_card_folder_and_the_notebook_stay_as_they_should(tmp_path):
    path = write_notebook(tmp_path, "01_fine", CARD_CELL, "import os; print(os.getcwd())")
    before = path.read_bytes()
    result = run_notebooks.run_one(path, tmp_path / "artifacts" / "run", tmp_path)
    assert (result.status, result.tier, result.fp8, result.warnings) == ("passed", "cpu", "recorded", [])
    assert path.read_bytes() == before
    executed = nbformat.read(tmp_path / "artifacts" / "run" / "01_fine.ipynb", as_version=4)
    assert executed.cells[1].outputs[0].text.strip() == str(tmp_path / "artifacts" / "run")


def test_a_failing_cell_is_named_and_the_summary_says_so(tmp_path, capsys):
    write_notebook(tmp_path, "01_fine", CARD_CELL)
    write_notebook(tmp_path, "02_fails", CARD_CELL, "def divide():\n    return 1 / 0\ndivide()", "print('not reached')")
    write_notebook(tmp_path, "03_early", "raise ValueError('before the card')", CARD_CELL)
    assert run_notebooks.main([], tmp_path) == 1
    summary = json.loads((tmp_path / "artifacts" / "run" / "summary.json").read_text())
    assert [list(row) for row in summary] == [["notebook", "status", "seconds", "tier", "fp8"]] * 3
    assert [(row["notebook"], row["status"], row["tier"], row["fp8"]) for row in summary] == [
        ("01_fine", "passed", "cpu", "recorded"),
        ("02_fails", "failed", "cpu", "recorded"),
        ("03_early", "failed", None, None),
    ]
    assert all(row["seconds"] > 0 for row in summary)
    printed = capsys.readouterr().out
    assert "cell 2 of 3 (id cell-2): def divide():" in printed
    assert "ZeroDivisionError: division by zero" in printed
    assert "\x1b" not in printed
    assert "1 passed, 2 failed" in printed
    executed = nbformat.read(tmp_path / "artifacts" / "run" / "02_fails.ipynb", as_version=4)
    assert not executed.cells[2].outputs
    assert not list((tmp_path / "artifacts" / "run").glob(".*"))  # no temporary file is left


def test_a_widget_callback_that_raised_fails_the_notebook(tmp_path):
    explorer = (
        "import ipywidgets\ndef show(x):\n    raise ValueError('in a callback')\nipywidgets.interact(show, x=(0, 3));"
    )
    result = run(tmp_path, "01_widget", CARD_CELL, explorer)
    assert result.status == "failed"
    assert "a widget's callback raised ValueError" in result.where
    assert "in a callback" in result.error[-1]
    assert result.tier == "cpu"


def test_a_warning_is_counted_and_fails_only_when_strict(tmp_path):
    sources = (
        CARD_CELL,
        "import warnings\nwarnings.warn('careful')",
        "import sys\nprint('a progress bar', file=sys.stderr)",
    )
    result = run(tmp_path, "01_warns", *sources)
    assert (result.status, len(result.warnings)) == ("passed", 1)
    assert "cell 2 of 3" in result.warnings[0]
    assert "UserWarning: careful" in result.warnings[0]
    result = run(tmp_path, "01_warns", *sources, strict=True)
    assert (result.status, result.where) == ("failed", "a warning was printed")


def test_a_kernel_that_dies_and_a_cell_that_takes_too_long_are_failures(tmp_path):
    result = run(tmp_path, "01_dies", "import os\nos.write(2, b'out of luck')\nos._exit(1)")
    assert (result.status, "the kernel died" in result.error[0]) == ("failed", True)
    result = run(tmp_path, "02_sleeps", "import time\ntime.sleep(60)", timeout=1)
    assert (result.status, result.error) == ("failed", ["the cell took more than 1 s"])
    broken = write_notebook(tmp_path, "03_broken")
    broken.write_text("{")
    assert run_notebooks.run_one(broken, tmp_path / "out", tmp_path).where == "reading the notebook"


def test_a_foreign_kernelspec_does_not_win(tmp_path, monkeypatch):
    spec = tmp_path / "foreign" / "kernels" / "python3"
    spec.mkdir(parents=True)
    content = {"argv": ["/nowhere/python", "-f", "{connection_file}"], "display_name": "foreign", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(content))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "foreign"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    monkeypatch.setenv("MPLBACKEND", "agg")  # would warn at every plt.show()
    result = run(tmp_path, "01_kernel", f"import os, sys\nassert sys.executable == {sys.executable!r}", "assert 'agg' not in os.environ['MPLBACKEND']")  # fmt: skip
    assert (result.status, result.error) == ("passed", [])


def test_twice_runs_every_cell_again_in_the_same_kernel(tmp_path):
    counting = "import builtins\nbuiltins.count = getattr(builtins, 'count', 0) + 1\nprint(count)"
    result = run(tmp_path, "01_counts", counting, "assert count < 2, 'second pass'", passes=2)
    assert result.status == "failed"
    assert "cell 2 of 2, pass 2" in result.where
    executed = nbformat.read(tmp_path / "artifacts" / "run" / "01_counts.ipynb", as_version=4)
    assert [executed.cells[index].outputs[0].text.strip() for index in (0, 2)] == ["1", "2"]


FAKE_CUDA = """
import sys, types
held = getattr(sys.modules.get("torch"), "held", 0) + {step}
cuda = types.SimpleNamespace(is_available=lambda: True, memory_allocated=lambda: 1000 * 1000 * held)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda, held=held)
"""


@pytest.mark.parametrize(("step", "status", "memory"), [(0, "passed", [0, 0]), (100, "failed", [10**8, 2 * 10**8])])
def test_memory_that_grows_in_the_second_pass_is_a_failure(tmp_path, step, status, memory):
    """A stand-in for torch in the kernel: the arithmetic is tried here, the real allocator on a GPU."""
    result = run(tmp_path, "01_grows", FAKE_CUDA.format(step=step), passes=2)
    assert (result.status, result.memory) == (status, memory)
    assert status == "passed" or "from 100.0 MB after the first pass to 200.0 MB" in result.error[0]


def test_choosing_notebooks(tmp_path, capsys):
    for name in ("01_one", "02_two", "deeper/graphs"):
        write_notebook(tmp_path, name, "1")

    def names(*wanted, **options):
        return [
            run_notebooks.name_of(path, tmp_path) for path in run_notebooks.select(list(wanted), tmp_path, **options)
        ]

    assert names() == ["01_one", "02_two"]
    assert names(deeper=True) == ["01_one", "02_two", "deeper/graphs"]
    assert names("02", "01_one.ipynb", "graphs") == ["02_two", "01_one", "deeper/graphs"]
    assert run_notebooks.main(["--notebook", "07"], tmp_path) == 2
    error = capsys.readouterr().err
    assert error == "run_notebooks: there is no notebook '07'; choose from: 01_one, 02_two, deeper/graphs.\n"
    assert run_notebooks.main(["--notebook", "0"], tmp_path) == 2
    assert "fits several notebooks; choose from: 01_one, 02_two." in capsys.readouterr().err
    assert run_notebooks.main([], tmp_path / "empty") == 2
    assert "there are no notebooks" in capsys.readouterr().err


def test_a_pipe_sees_each_notebook_as_it_starts_and_ends(tmp_path):
    """One line a notebook, and --out outside the repository gets the copies while the kernel stays inside."""
    write_notebook(tmp_path, "01_slow", "import time, os\ntime.sleep(2)\nassert os.path.exists('../../tools')")
    write_notebook(tmp_path, "02_quick", "1")
    (tmp_path / "tools").mkdir()
    for name in ("run_notebooks.py", "patience.py"):
        (tmp_path / "tools" / name).write_bytes((run_notebooks.ROOT / "tools" / name).read_bytes())
    out = tmp_path.parent / f"{tmp_path.name}-out"
    command = [sys.executable, str(tmp_path / "tools" / "run_notebooks.py"), "--order", "02,01", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path.parent) as process:
        read = b""
        while b"[2/2] 01_slow ..." not in read:  # seen while it still runs
            chunk = os.read(process.stdout.fileno(), 1000)
            assert chunk, read
            read += chunk
        assert b"[1/2] 02_quick ... passed in " in read
        assert not (out / "summary.json").exists()
        rest = process.stdout.read()
    assert process.returncode == 0
    assert rest.split(b"\n")[0].startswith(b" passed in ")
    assert [row["notebook"] for row in json.loads((out / "summary.json").read_text())] == ["02_quick", "01_slow"]
    assert sorted(path.name for path in out.iterdir()) == ["01_slow.ipynb", "02_quick.ipynb", "summary.json"]


def test_widgets_do_not_stall_the_runner(tmp_path):
    """nbclient can sleep until the cell's time limit when a widget shows output (tools/patience.py)."""
    source = "import ipywidgets\nipywidgets.interact(lambda x: [print(i) for i in range(20)] and None, x=(0, 3));"
    for number in range(3):
        assert run(tmp_path, f"0{number}_widget", source, timeout=120).seconds < 60
