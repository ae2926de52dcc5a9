"""What a reader answered, kept as JSON in artifacts/: one object, name -> entry. Several kernels may write at once."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

try:
    import fcntl

    def lock(file) -> None:
        fcntl.flock(file, fcntl.LOCK_EX)

except ImportError:  # Windows
    import msvcrt

    def lock(file) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)


def read(path: Path) -> dict:
    """All entries; {} without the file. A file that is damaged is renamed, with a warning, and counts as missing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError:  # not JSON, or not UTF-8
        content = None
    if isinstance(content, dict):
        return content
    number = 1
    while (aside := path.with_name(f"{path.stem}.damaged-{number}{path.suffix}")).exists():
        number += 1
    os.replace(path, aside)
    warnings.warn(f"{path} is damaged: it is kept as {aside.name}, and a new one is begun", stacklevel=2)
    return {}


def keep(path: Path, name: str, entry: dict, unless: Callable[[dict], bool] = lambda old: False) -> None:
    """Writes one entry, whole or not at all, and leaves the others alone; not if `unless` is true of the entry it replaces.

    The lock on a file beside it ends with the process that holds it. Raises OSError where the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as held:
        lock(held)
        content = read(path)
        if name in content and unless(content[name]):
            return
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(content | {name: entry}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
