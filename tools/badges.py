"""Keeps every address of the repository in step with pyproject.toml: `make badges REPO=owner/name BRANCH=main`.

pyproject.toml is the one place that names the repository and the branch. From it this sets each notebook's Colab badge
and setup cell (the text is tools/setup_cell.py) and the addresses in the README. Without arguments it applies again
what pyproject.toml says; with --check it changes nothing, lists what differs and exits with 1.

Files are edited as text: a notebook keeps every other byte. Standard library only.
"""

import argparse
import json
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOST = "https://github.com/"
COLAB = "https://colab.research.google.com/github/"
ADDRESS = re.compile(re.escape(COLAB) + r"([^/\s\"')]+/[^/\s\"')]+)/blob/([^\s\"')]+?)/(notebooks/[^\s\"')]+?\.ipynb)")
SETUP_LINE = re.compile(r'^(REPO, BRANCH\b[^=\n]*= )"[^"\n]*", "[^"\n]*"', re.MULTILINE)
REPO_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?/(?!\.{1,2}$)[A-Za-z0-9._-]+")
# What git allows, less what would need quoting in an address or a shell.
BRANCH_NAME = re.compile(r"(?!.*(\.\.|//|/\.|\.lock(/|$)|[/.]$))[A-Za-z0-9_][A-Za-z0-9._/-]*")


class Wrong(Exception):
    """One line: what is wrong and what to do."""


@dataclass(frozen=True)
class Source:
    """Where the workshop lives."""

    repo: str  # owner/name
    branch: str

    @property
    def address(self) -> str:
        return HOST + self.repo

    def badge(self, notebook: str) -> str:
        return f"{COLAB}{self.repo}/blob/{self.branch}/{notebook}"


def check_source(repo: str, branch: str) -> Source:
    if not REPO_NAME.fullmatch(repo):
        raise Wrong(f"REPO={repo!r} is not a repository: give owner/name, for instance REPO=you/fp8-workshop.")
    if not BRANCH_NAME.fullmatch(branch):
        raise Wrong(f"BRANCH={branch!r} is not a branch's name: letters, digits and . _ - / are allowed, as in main.")
    return Source(repo, branch)


def read_source(root: Path = ROOT) -> Source:
    """What pyproject.toml says."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    try:
        address, branch = project["project"]["urls"]["Repository"], project["tool"]["workshop"]["branch"]
    except KeyError as missing:
        raise Wrong(f"pyproject.toml has no {missing}: it needs Repository and [tool.workshop] branch.") from None
    return check_source(address.removeprefix(HOST).removesuffix("/").removesuffix(".git"), branch)


def notebook_paths(root: Path = ROOT) -> list[Path]:
    folder = root / "notebooks"
    return sorted(folder.glob("*.ipynb")) + sorted(folder.glob("deeper/*.ipynb"))


def setup_text(source: Source, root: Path = ROOT) -> str:
    """The setup cell's source for this repository."""
    text = (root / "tools" / "setup_cell.py").read_text(encoding="utf-8")
    text, found = SETUP_LINE.subn(rf'\1"{source.address}", "{source.branch}"', text)
    if found != 1:
        raise Wrong('tools/setup_cell.py needs one line that starts with REPO, BRANCH and assigns "address", "branch".')
    return text.rstrip("\n")


def source_of(cell: dict) -> str:
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def cell_spans(text: str):
    """Every cell of a notebook's JSON text with its place in it: (start, end, cell)."""
    opening = re.search(r'(?<!\\)"cells"\s*:\s*\[', text)
    at = opening.end() if opening else len(text)
    while match := re.compile(r"[\s,]*(?=\{)").match(text, at):
        cell, end = json.JSONDecoder().raw_decode(text, match.end())
        yield match.end(), end, cell
        at = end


def with_setup_cell(text: str, wanted: str) -> str:
    """The notebook's text with the source of its cell `setup` replaced, and nothing else."""
    for start, end, cell in cell_spans(text):
        if cell.get("id") != "setup" or source_of(cell) == wanted:
            continue
        # In JSON a quote inside a string is always escaped, so this is the key itself.
        key = re.compile(r'(?<!\\)"source"\s*:\s*').search(text, start, end)
        _, value_end = json.JSONDecoder().raw_decode(text, key.end())
        line_start = text.rfind("\n", 0, key.start()) + 1
        indent = text[line_start : key.start()]
        lines = ",\n".join(f"{indent} {json.dumps(line, ensure_ascii=False)}" for line in wanted.splitlines(True))
        return f"{text[: key.end()]}[\n{lines}\n{indent}]{text[value_end:]}"
    return text


def updated_notebook(text: str, path: str, source: Source, old: Source, setup: str) -> str:
    """A notebook's text with its own badge first, other notebooks' badges after it, and the setup cell."""
    seen = 0

    def replace(match: re.Match) -> str:
        nonlocal seen
        seen += 1
        return source.badge(path if seen == 1 else match.group(3))

    return ADDRESS.sub(replace, with_setup_cell(renamed(text, source, old), setup))


def renamed(text: str, source: Source, old: Source) -> str:
    """Plain addresses of the old repository (a clone command, a link) made into the new one's."""
    ends = r"(?=\.git(?![\w-])|(?!\.?[\w-]))"  # not the beginning of a longer name
    return re.sub(re.escape(old.address) + ends, source.address, text) if old.repo != source.repo else text


def updated_pyproject(text: str, source: Source) -> str:
    for table, key, value in (
        ("project.urls", "Repository", source.address),
        ("tool.workshop", "branch", source.branch),
    ):
        pattern = rf'(^\[{re.escape(table)}\][^\[]*?^{key}\s*=\s*)"[^"\n]*"'
        text, found = re.subn(pattern, rf'\1"{value}"', text, count=1, flags=re.MULTILINE)
        if not found:
            raise Wrong(f"pyproject.toml has no [{table}] {key} to set.")
    return text


def plan(source: Source, root: Path = ROOT) -> dict[Path, str]:
    """The new text of every file that would change."""
    old, setup = read_source(root), setup_text(source, root)
    texts = {
        root / "pyproject.toml": lambda text, _: updated_pyproject(text, source),
        root / "tools" / "setup_cell.py": lambda text, _: setup + "\n",
        root / "README.md": lambda text, _: ADDRESS.sub(
            lambda match: source.badge(match.group(3)), renamed(text, source, old)
        ),
    }
    for path in notebook_paths(root):
        texts[path] = lambda text, name: updated_notebook(text, name, source, old, setup)
    changes = {}
    for path, update in texts.items():
        if path.exists():
            before = read_exactly(path)
            after = update(before, path.relative_to(root).as_posix())
            if after != before:
                changes[path] = after
    return changes


def read_exactly(path: Path) -> str:
    return path.read_bytes().decode("utf-8")  # read_text would turn \r\n into \n


def problems(root: Path = ROOT) -> list[str]:
    """What differs from pyproject.toml, and what no rewriting can mend, one line each."""
    found = [
        f"{path.relative_to(root).as_posix()}: differs; run `make badges`" for path in plan(read_source(root), root)
    ]
    for path in notebook_paths(root):
        name, text = path.relative_to(root).as_posix(), read_exactly(path)
        addresses = [match.group(3) for match in ADDRESS.finditer(text)]
        if not addresses:
            found.append(f"{name}: has no Colab badge")
        for other in addresses[1:]:
            if not (root / other).exists():
                found.append(f"{name}: a Colab link leads to {other}, which does not exist")
        if not any(cell.get("id") == "setup" for _, _, cell in cell_spans(text)):
            found.append(f'{name}: has no cell with the id "setup"')
    return found


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="badges", description=__doc__.split("\n")[0])
    parser.add_argument("--repo", help="owner/name of the repository; default: what pyproject.toml says")
    parser.add_argument("--branch", help="default: what pyproject.toml says")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something differs")
    options = parser.parse_args(arguments)
    try:
        if options.check:
            found = problems(root)
            print("\n".join(found) or "badges and setup cells agree with pyproject.toml")
            return 1 if found else 0
        now = read_source(root)
        source = check_source(options.repo or now.repo, options.branch or now.branch)
        changes = plan(source, root)
        for path, text in changes.items():
            path.write_bytes(text.encode("utf-8"))
            print(f"changed {path.relative_to(root).as_posix()}")
        print(f"{source.address}, branch {source.branch}: {len(changes)} files changed")
        return 0
    except Wrong as wrong:
        print(f"badges: {wrong}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
