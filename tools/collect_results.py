"""Takes what a GPU machine produced into results/, which is committed:  make results  (or: collect_results.py [FOLDER])

FOLDER (default artifacts/) holds what `make run` left there: run/*.ipynb, run/summary.json and results/<gpu>/*.json. A
machine that received the files without their git history leaves `commit` empty in the JSON; so collect in the checkout that
was sent, before anything is changed: the commit is then filled in from here. What notebooks printed on stderr, progress bars
and logs with that machine's paths, is left out. Afterwards README's tables are rendered anew.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from helpers import report, results  # noqa: E402

LARGEST_NOTEBOOK = 1_000_000  # bytes; a larger one is not readable on the web


def write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def without_stderr(notebook: str) -> str:
    """An executed notebook's text without its stderr outputs."""
    content = json.loads(notebook)
    for cell in content.get("cells", []):
        if "outputs" in cell:
            cell["outputs"] = [output for output in cell["outputs"] if output.get("name") != "stderr"]
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def collect(source: Path) -> list[Path]:
    """Copies into results/<gpu>/; returns what was written. Raises ValueError naming a file that cannot be taken."""
    folders = [f for f in sorted((source / "results").glob("*")) if f.is_dir() and f.name != "cpu"]
    if len(folders) != 1:
        names = ", ".join(f.name for f in folders) or "none"
        raise ValueError(
            f"{source / 'results'} must hold the results of one GPU; it holds {names}. Run `make run` on a GPU machine first"
        )
    target = results.RECORDED / folders[0].name
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for file in sorted(folders[0].glob("*.json")):
        content = results.read(file)
        if content["commit"] is None:
            content["commit"] = results.git("rev-parse", "HEAD")
            content["dirty"] = bool(results.git("status", "--porcelain", "--", "helpers", "notebooks", "tools"))
        write(target / file.name, json.dumps(content, indent=1) + "\n")
        written.append(target / file.name)
    run = source / "run"
    summary = json.loads((run / "summary.json").read_text())
    failed = [entry["notebook"] for entry in summary if entry["status"] != "passed"]
    if failed:
        raise ValueError(f"{run / 'summary.json'} says that {', '.join(failed)} failed; only a whole run is recorded")
    for notebook in sorted(run.glob("*.ipynb")):
        if notebook.stat().st_size > LARGEST_NOTEBOOK:
            raise ValueError(
                f"{notebook} has {notebook.stat().st_size / 1e6:.1f} MB; at most 1 MB is recorded. Make its figures smaller"
            )
        write(target / notebook.name, without_stderr(notebook.read_text(encoding="utf-8")))
        written.append(target / notebook.name)
    write(target / "summary.json", json.dumps(summary, indent=1) + "\n")
    return [*written, target / "summary.json"]


if __name__ == "__main__":
    try:
        for path in collect(Path(sys.argv[1]) if sys.argv[1:] else results.ARTIFACTS):
            print(path.relative_to(ROOT))
        report.render()
    except (ValueError, OSError) as error:
        sys.exit(f"collect_results: {error}")
