"""Addresses in badges and setup cells, and the setup cell itself, run in fresh processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import badges

ROOT = badges.ROOT
SETUP = (ROOT / "tools" / "setup_cell.py").read_text(encoding="utf-8")
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({})"
PYPROJECT = """[project]
name = "x"

[project.urls]
Homepage = "https://github.com/old/name"
Repository = "https://github.com/old/name"  # keep this comment

[tool.other]
branch = "untouched"

[tool.workshop]
branch = "main"
"""


def notebook(path: str, setup, more: str = "") -> str:
    """A notebook's JSON with odd but valid spacing, so that a tool that writes it anew would be noticed."""
    title = f"# Überschrift\n\n{BADGE.format(f'{badges.COLAB}old/name/blob/main/{path}')}\n\n{more}"
    cells = [
        {"cell_type": "markdown", "id": "title", "metadata": {"source": ["a trap"]}, "source": title},
        {"cell_type": "code", "execution_count": None, "id": "setup", "metadata": {}, "outputs": [], "source": setup},
        {
            "cell_type": "code",
            "execution_count": None,
            "id": "last",
            "metadata": {},
            "outputs": [],
            "source": ['"source": [1]'],
        },
    ]
    text = json.dumps(
        {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1, ensure_ascii=False
    )
    return text.replace('"nbformat": 4', '"nbformat":   4') + "\n\n"


@pytest.fixture
def tree(tmp_path) -> Path:
    source = badges.Source("old/name", "main")
    (tmp_path / "tools").mkdir()
    (tmp_path / "notebooks" / "deeper").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "tools" / "setup_cell.py").write_text(SETUP.replace(badges.read_source(ROOT).repo, source.repo))
    setup = badges.setup_text(source, tmp_path)
    link = BADGE.format(source.badge("notebooks/01_a.ipynb")) + " git clone https://github.com/old/name.git; old/names"
    for path, text in (
        ("notebooks/01_a.ipynb", notebook("notebooks/01_a.ipynb", setup.splitlines(True))),
        ("notebooks/deeper/b.ipynb", notebook("notebooks/deeper/b.ipynb", setup.splitlines(True), link)),
        ("README.md", f"Überschrift {link}\n\nhttps://github.com/old/name-other stays\n"),
    ):
        (tmp_path / path).write_bytes(text.encode())
    return tmp_path


def contents(tree: Path) -> dict[str, bytes]:
    return {path.relative_to(tree).as_posix(): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def test_a_fork_and_back_leaves_every_byte_as_it_was(tree, capsys):
    before = contents(tree)
    assert badges.main(["--check"], tree) == 0
    assert badges.main(["--repo", "you/my.fork", "--branch", "feature/x-1"], tree) == 0
    after = contents(tree)
    assert set(after) == set(before)
    for name, text in after.items():
        changed = text.decode().replace("you/my.fork", "old/name").replace("feature/x-1", "main")
        assert changed.encode() == before[name], name
        assert b"you/my.fork" in text
    assert b'Homepage = "https://github.com/old/name"' in after["pyproject.toml"]
    assert b'branch = "untouched"' in after["pyproject.toml"]
    assert b'Repository = "https://github.com/you/my.fork"  # keep' in after["pyproject.toml"]
    assert (
        badges.COLAB.encode() + b"you/my.fork/blob/feature/x-1/notebooks/deeper/b.ipynb"
        in after["notebooks/deeper/b.ipynb"]
    )
    assert b"git clone https://github.com/you/my.fork.git" in after["README.md"]
    assert b"https://github.com/old/name-other stays" in after["README.md"]
    assert badges.main(["--check"], tree) == 0
    assert badges.main(["--repo", "old/name", "--branch", "main"], tree) == 0
    assert contents(tree) == before
    assert "5 files changed" in capsys.readouterr().out


def test_check_lists_what_differs_and_a_plain_run_mends_it(tree, capsys):
    wrong = notebook(
        "notebooks/99_other.ipynb", "x = 1", BADGE.format(f"{badges.COLAB}o/n/blob/b/notebooks/gone.ipynb")
    )
    (tree / "notebooks" / "02_c.ipynb").write_text(wrong)
    (tree / "notebooks" / "03_d.ipynb").write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    before = contents(tree)
    assert badges.main(["--check"], tree) == 1
    assert capsys.readouterr().out.splitlines() == [
        "notebooks/02_c.ipynb: differs; run `make badges`",
        "notebooks/02_c.ipynb: a Colab link leads to notebooks/gone.ipynb, which does not exist",
        "notebooks/03_d.ipynb: has no Colab badge",
        'notebooks/03_d.ipynb: has no cell with the id "setup"',
    ]
    assert contents(tree) == before
    assert badges.main([], tree) == 0
    mended = (tree / "notebooks" / "02_c.ipynb").read_text(encoding="utf-8")
    assert f"{badges.COLAB}old/name/blob/main/notebooks/02_c.ipynb" in mended
    assert "".join(json.loads(mended)["cells"][1]["source"]) == badges.setup_text(badges.read_source(tree), tree)
    assert contents(tree) == before | {"notebooks/02_c.ipynb": mended.encode()}


@pytest.mark.parametrize("repo", ["name", "https://github.com/a/b", "a/b/c", "a b/c", "a/b?x", "-a/b", "a/..", '"a"/b'])
def test_a_wrong_repository_is_one_line(tree, capsys, repo):
    before = contents(tree)
    assert badges.main([f"--repo={repo}"], tree) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert repr(repo) in error
    assert "owner/name" in error
    assert contents(tree) == before


@pytest.mark.parametrize("branch", ["a b", "a..b", "-x", "x/", "a'b", "a.lock", "/a", "a//b"])
def test_a_wrong_branch_is_one_line(tree, capsys, branch):
    assert badges.main([f"--branch={branch}"], tree) == 2
    assert repr(branch) in capsys.readouterr().err


def test_the_committed_files_agree():
    assert badges.problems() == []


# ------------------------------------------------------------------------------------------------ the setup cell


def run_cell(source: str, folder: Path, before: str = "", after: str = "") -> subprocess.CompletedProcess:
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", f"{before}\n{source}\n{after}"], cwd=folder, capture_output=True, text=True, timeout=60
    )


def test_setup_cell_is_short_and_silent_and_runs_twice(tmp_path):
    assert len(SETUP.splitlines()) <= 15
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "__init__.py").write_text("where = 'here'")
    (tmp_path / "pyproject.toml").touch()
    show = "import helpers\nprint(helpers.where, sys.path[0], sys.path.count(sys.path[0]))"
    # Another package named helpers comes earlier on the path, as one installed from elsewhere might.
    (tmp_path / "other" / "helpers").mkdir(parents=True)
    (tmp_path / "other" / "helpers" / "__init__.py").write_text("where = 'elsewhere'")
    before = f"import sys; sys.path.insert(0, {str(tmp_path / 'other')!r})"
    ran = run_cell(SETUP, tmp_path / "artifacts" / "run", before, SETUP + show)
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", f"here {tmp_path} 1\n")


def test_setup_cell_outside_the_workshop_says_what_to_do(tmp_path):
    ran = run_cell(SETUP, tmp_path)
    last = ran.stderr.strip().splitlines()[-1]
    assert ran.returncode == 1
    assert last.startswith(f"FileNotFoundError: {tmp_path} is not in the workshop: `git clone https://github.com/")


@pytest.mark.skipif(not shutil.which("git") or not shutil.which("bash"), reason="needs git and bash, as Colab has")
def test_setup_cell_in_colab_clones_once_and_shows_the_setup_as_it_runs(tmp_path):
    """Colab is a module named google.colab and the folder /content; the repository is one on disk."""
    origin, content = tmp_path / "origin", tmp_path / "content"
    (origin / "helpers").mkdir(parents=True)
    (origin / "helpers" / "__init__.py").touch()
    (origin / "pyproject.toml").touch()
    # It goes on once its first line has been seen, which never happens if the cell shows everything at the end.
    seen = tmp_path / "seen"
    wait = f"for i in $(seq 200); do [ -e '{seen}' ] && break; sleep 0.05; done; [ -e '{seen}' ]"
    (origin / "colab_setup.sh").write_text(f"echo first; {wait} && echo second >&2\n")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    for command in (
        ["init", "-q", "-b", "main"],
        ["add", "."],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", *command], cwd=origin, check=True, env=environment)
    cell = SETUP.replace("/content/", f"{content}/").replace(badges.read_source(ROOT).address, str(origin))
    colab = "import sys, types; sys.modules['google.colab'] = types.ModuleType('google.colab')"
    watch = (
        "class Watch:\n"
        "    def writelines(self, lines):\n"
        "        for line in lines:\n"
        "            print(line.strip(), file=sys.__stdout__)\n"
        f"            open({str(seen)!r}, 'w').close()\n"
        "    def write(self, text): pass\n"
        "    def flush(self): pass\n"
        "sys.stdout = Watch()"
    )
    ran = run_cell(cell, content, f"{colab}\n{watch}", "print(sys.path[0], file=sys.__stdout__)")
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stderr
    assert lines == ["first", "second", str(content / "fp8-workshop")]
    (content / "fp8-workshop" / "colab_setup.sh").write_text("echo again\n")  # the clone is used as it is
    ran = run_cell(cell, content, colab)
    assert (ran.returncode, ran.stdout) == (0, "again\n")
    ran = run_cell(cell.replace(str(origin), str(tmp_path / "nowhere")).replace(str(content), str(tmp_path / "new")), tmp_path / "c", colab)  # fmt: skip
    assert ran.returncode == 1
    assert "does not exist" in ran.stdout  # git's own words
    assert "is not in the workshop" in ran.stderr
