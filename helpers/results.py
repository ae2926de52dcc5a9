"""Results files: measurements with their provenance, one JSON file a subject, `results/<gpu>/<name>.json`.

A notebook saves what it measured on this machine under artifacts/results/; `make results` takes them into results/, which
is committed. What another machine measured is shown from there, labelled RECORDED.
"""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from helpers.hardware import Hardware

ROOT = Path(__file__).resolve().parent.parent
ARTIFACTS = ROOT / "artifacts"
RECORDED = ROOT / "results"
SCHEMA = "fp8-workshop/results/1"
REQUIRED = ("schema", "created", "command", "commit", "dirty", "machine", "method", "rows")
KINDS = ("measured", "emulated", "modelled")


def git(*arguments: str) -> str | None:
    """Output of a git command in the workshop's folder, or None where there is no git or no repository."""
    try:
        return subprocess.run(
            ["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def provenance(hardware: Hardware, command: str | None) -> dict:
    """When, by which command, from which commit and on which machine."""
    status = git("status", "--porcelain")
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command or " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "machine": {
            k: getattr(hardware, k)
            for k in ("gpu", "capability", "driver", "cuda", "cudnn", "torch", "te", "python", "tier")
        },
    }


def check_kinds(name: str, rows: list[dict]) -> None:
    for row in rows:
        if row.get("kind") not in KINDS:
            raise ValueError(f"a row of {name} has kind {row.get('kind')!r}; choose one of {', '.join(KINDS)}")


def write(path: Path, content: dict) -> Path:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def save(name: str, hardware: Hardware, rows: list[dict], method: str, command: str | None = None) -> Path:
    """Writes rows with their provenance to artifacts/results/<gpu>/<name>.json, whole or not at all; returns the path.

    Each row says its `kind`: measured, emulated or modelled. `method` says warm-up, repeats and order in words.
    """
    check_kinds(name, rows)
    path = ARTIFACTS / "results" / hardware.slug / f"{name}.json"
    return write(path, {"schema": SCHEMA, **provenance(hardware, command), "method": method, "rows": rows})


def merge(
    name: str, hardware: Hardware, rows: list[dict], method: str, keys: tuple[str, ...], command: str | None = None
) -> Path:
    """Like `save`, into a file that grows run by run: rows with equal `keys` replace older ones, the rest stays.

    Every row carries the provenance of its own run. Starts from what is in artifacts/, else from what is committed. Raises
    ValueError, and writes nothing, if that file is of another schema.
    """
    check_kinds(name, rows)
    path = ARTIFACTS / "results" / hardware.slug / f"{name}.json"
    before = next((p for p in (path, RECORDED / hardware.slug / f"{name}.json") if p.exists()), None)
    old = read(before)["rows"] if before else []
    own = provenance(hardware, command)

    def key(row):
        return tuple(row.get(k) for k in keys)

    new = {key(row) for row in rows}
    kept = [row for row in old if key(row) not in new]
    merged = kept + [row | {"provenance": own} for row in rows]
    return write(path, {"schema": SCHEMA, **own, "method": method, "rows": merged})


def read(path: Path) -> dict:
    """A results file's content. Raises ValueError naming the file if it has no provenance or another schema."""
    try:
        content = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    missing = [key for key in REQUIRED if key not in content]
    if missing or content["schema"] != SCHEMA:
        raise ValueError(
            f"{path} is refused: schema {content.get('schema')!r} (this code reads {SCHEMA!r}), missing {missing or 'nothing'}"
        )
    return content


def recorded(name: str, gpu: str = "nvidia-h200") -> tuple[pd.DataFrame, str]:
    """What `gpu` measured: (rows, a caption that starts with RECORDED and names machine, versions and date)."""
    path = RECORDED / gpu / f"{name}.json"
    if not path.exists():
        have = sorted(p.stem for p in (RECORDED / gpu).glob("*.json"))
        raise ValueError(f"no recorded results {name!r} of {gpu!r}; there are {', '.join(have) or 'none'}")
    content = read(path)
    m = content["machine"]
    caption = (
        f"RECORDED on one {m['gpu']}, {content['created'][:10]}, TE {m['te']}, torch {m['torch']}, driver {m['driver']}"
    )
    return pd.DataFrame(content["rows"]), caption
