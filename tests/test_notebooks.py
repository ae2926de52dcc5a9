"""Every committed notebook: its form, and that it runs (under nbmake; and alone, in reverse order, twice in one kernel)."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest

from tools import badges, run_notebooks

ROOT = run_notebooks.ROOT
PATHS = run_notebooks.find_notebooks(deeper=True)
NAMES = [run_notebooks.name_of(path) for path in PATHS]
TIERS = {"cpu", "fp32", "bf16", "fp8", "blackwell"}
FP8 = {"real", "emulated", "recorded", "off"}

each = pytest.mark.parametrize("path", PATHS, ids=NAMES)


def read(path: Path):
    return nbformat.read(path, as_version=4)


# ------------------------------------------------------------------------------------------------ form


@each
def test_committed_without_outputs(path):
    nb = read(path)
    kept = [
        cell.id for cell in nb.cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count is not None)
    ]
    assert kept == [], f"these cells hold outputs or counts: run `nbstripout {path.relative_to(ROOT)}`"
    assert "widgets" not in nb.metadata


@each
def test_kernelspec_and_cell_ids(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(content)
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell.get("id") for cell in content["cells"]]
    assert None not in ids
    assert len(ids) == len(set(ids))


@each
def test_setup_cell_is_the_one_everywhere(path):
    """tools/setup_cell.py is the text; `make badges` puts it into every notebook."""
    code = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert code[0].id == "setup", "the first code cell must be the one with the id `setup`"
    assert code[0].source == badges.setup_text(badges.read_source())


@each
def test_badge_names_this_file(path):
    first = read(path).cells[0]
    assert first.cell_type == "markdown"
    assert f"({badges.read_source().badge(path.relative_to(ROOT).as_posix())})" in first.source


@each
def test_headings(path):
    """One H1, first of all, and no level skipped on the way down."""
    levels = []
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"^(```|~~~).*?^\1", "", cell.source, flags=re.MULTILINE | re.DOTALL)
            levels += [(len(marks), title) for marks, title in re.findall(r"^(#{1,6}) +(.+)$", text, re.MULTILINE)]
    assert levels[0][0] == 1
    assert [title for level, title in levels if level == 1] == [levels[0][1]]
    skipped = [title for (above, _), (level, title) in pairwise(levels) if level > above + 1]
    assert skipped == []


@each
def test_number_of_cells(path):
    counted = [cell for cell in read(path).cells if "exercise" not in cell.metadata.get("tags", [])]
    assert 25 <= len(counted) <= 50, f"{len(counted)} cells that are no exercises; 25 to 50 are allowed"


@pytest.mark.skipif(not importlib.util.find_spec("ruff"), reason="ruff is not installed (requirements-dev.txt)")
@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_ruff(command):
    ran = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


# ------------------------------------------------------------------------------------------------ execution


@each
def test_under_nbmake(path, tree, clean_environment):
    """As a maintainer would run it: pytest --nbmake. tools.patience: see there."""
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tools.patience",
        "--nbmake",
        "--nbmake-timeout=600",
    ]
    ran = subprocess.run(
        [sys.executable, *command, str(tree / path.relative_to(ROOT))],
        cwd=tree,
        env=clean_environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "1 passed" in ran.stdout


def snapshot(tree: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file that git would look at and that is not an artifact."""
    ignored = {"artifacts", "__pycache__", ".ipynb_checkpoints", ".pytest_cache", ".ruff_cache"}
    files = [path for path in tree.rglob("*") if path.is_file() and not ignored & set(path.relative_to(tree).parts)]
    return {str(path.relative_to(tree)): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS[::-1], ids=NAMES[::-1])
def test_alone_and_twice_in_one_kernel(path, tree, pytestconfig):
    """No artifact of another notebook is there; no warning, no widget error, no growing memory, no stray file."""
    shutil.rmtree(tree / "artifacts", ignore_errors=True)
    before = snapshot(tree)
    out = tree / "artifacts" / "run"
    result = run_notebooks.run_one(tree / path.relative_to(ROOT), out, tree, passes=2, strict=True)
    assert result.status == "passed", "\n".join([result.where, *result.error])
    assert result.tier in TIERS
    assert result.fp8 in FP8
    assert snapshot(tree) == before
    if pytestconfig.getoption("--gpu"):
        import torch

        assert None not in result.memory
        if torch.cuda.get_device_capability() >= (8, 9):
            assert result.fp8 == "real"
