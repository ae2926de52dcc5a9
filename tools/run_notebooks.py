"""Executes the workshop's notebooks on copies and says what happened: `make run`.

The copies lie in artifacts/run/ and each kernel works in its copy's folder, so the committed notebooks stay as they are.
Beyond what nbclient checks, a notebook fails here when a widget's callback raised (nbclient files that under the
notebook's widget state and carries on), and warnings on stderr are counted: `--strict` makes them failures.
"""

import argparse
import copy
import json
import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, CellExecutionError, CellTimeoutError, DeadKernelError
from traitlets import default

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # started as a script, sys.path[0] is tools/
    sys.path.insert(0, str(ROOT))
from tools import patience  # noqa: E402

patience.install()

CARD = "application/vnd.fp8-workshop.card+json"  # the machine card: {"tier": ..., "fp8": ...}
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
CELL_TIMEOUT_S = 600
GROWTH_ALLOWED = 1.05  # GPU memory after a second pass over that after the first

# Runs in the kernel between passes; None where there is no CUDA.
MEMORY = """
def _workshop_memory():
    import gc, sys
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    gc.collect()
    return torch.cuda.memory_allocated()
"""


class Usage(Exception):
    """A wrong argument; the message is one line and lists the choices."""


@dataclass
class Result:
    """What became of one notebook."""

    notebook: str  # "03_model_building", "deeper/checkpoints"
    status: str = "passed"  # or "failed"
    seconds: float = 0.0
    tier: str | None = None  # from the machine card; None when it failed before the card
    fp8: str | None = None  # real | emulated | recorded | off
    where: str = ""  # the failing cell
    error: list[str] = field(default_factory=list)  # its last lines
    warnings: list[str] = field(default_factory=list)
    memory: list[int | None] = field(default_factory=list)  # bytes allocated on the GPU after each pass (--twice)

    def fail(self, where: str, lines: list[str]) -> None:
        if self.status == "passed":  # the first reason is the one to show
            self.status, self.where, self.error = "failed", where, lines

    def summary(self) -> dict:
        row = {key: getattr(self, key) for key in ("notebook", "status", "seconds", "tier", "fp8")}
        return row | ({"memory_allocated": self.memory} if self.measured() else {})

    def measured(self) -> bool:
        """Whether GPU memory was measured after more than one pass."""
        return len(self.memory) > 1 and None not in self.memory


# ------------------------------------------------------------------------------------------------ which notebooks


def name_of(path: Path, root: Path = ROOT) -> str:
    """A notebook's name in tables and on the command line: its path under notebooks/, without the ending."""
    return path.relative_to(root / "notebooks").with_suffix("").as_posix()


def find_notebooks(root: Path = ROOT, deeper: bool = False) -> list[Path]:
    """The notebooks in reading order."""
    folder = root / "notebooks"
    return sorted(folder.glob("0*.ipynb")) + (sorted(folder.glob("deeper/*.ipynb")) if deeper else [])


def select(wanted: list[str], root: Path = ROOT, deeper: bool = False) -> list[Path]:
    """Resolves "03", a full name or a deeper one, in the order given; nothing wanted means all.

    Raises Usage with the choices when a name fits no notebook or several.
    """
    if not wanted:
        return find_notebooks(root, deeper)
    everything = {name_of(path, root): path for path in find_notebooks(root, deeper=True)}
    chosen = []
    for word in wanted:
        given = word.removesuffix(".ipynb").removeprefix("notebooks/")
        exact = [name for name in everything if given in (name, name.removeprefix("deeper/"))]
        fits = exact or [name for name in everything if given and name.startswith(given)]
        if len(fits) != 1:
            problem = f"{word!r} fits several notebooks" if fits else f"there is no notebook {word!r}"
            raise Usage(f"{problem}; choose from: {', '.join(fits or everything) or 'none are here'}.")
        chosen.append(everything[fits[0]])
    return chosen


# ------------------------------------------------------------------------------------------------ the kernel


class OwnKernelSpecs(KernelSpecManager):
    """`python3` is the interpreter that runs this file, whatever JUPYTER_PATH or the user's own kernels say."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(**get_kernel_dict())


class OwnKernelManager(AsyncKernelManager):
    @default("kernel_spec_manager")
    def _own_specs(self) -> KernelSpecManager:
        return OwnKernelSpecs(parent=self)


def kernel_environment() -> dict[str, str]:
    environment = dict(os.environ, PYDEVD_DISABLE_FILE_VALIDATION="1")  # else the debugger warns on start
    environment.pop("MPLBACKEND", None)  # the kernel's inline backend; another one warns at every plt.show()
    return environment


def ask(client: NotebookClient, expression: str, code: str = "") -> str:
    """The repr of an expression in the kernel, outside the notebook's history."""
    request = client.kc.execute(code, silent=True, store_history=False, user_expressions={"answer": expression})
    answer = client.wait_for_reply(request)["content"]["user_expressions"]["answer"]
    return answer["data"]["text/plain"] if answer["status"] == "ok" else f"{answer['ename']}: {answer['evalue']}"


def execute(nb, folder: Path, result: Result, passes: int = 1, timeout: int = CELL_TIMEOUT_S, on_cell=None):
    """Runs a notebook's code cells in one kernel, `passes` times over, in `folder`; fills in `result`.

    Returns the executed notebook: with several passes, every pass's cells one after the other.
    """
    own = len(nb.cells)
    ran = copy.deepcopy(nb)
    for number in range(2, passes + 1):
        for cell in copy.deepcopy(nb.cells):
            cell["id"] = f"{cell['id'][:60]}-{number}"
            ran.cells.append(cell)
    at = 0

    def started(cell, cell_index):
        nonlocal at
        at = cell_index
        if on_cell:
            on_cell(cell_index + 1, len(ran.cells))

    client = NotebookClient(
        ran,
        kernel_manager_class=OwnKernelManager,
        kernel_name="python3",
        timeout=timeout,
        startup_timeout=120,
        coalesce_streams=True,
        record_timing=False,
        on_cell_start=started,
        resources={"metadata": {"path": str(folder)}},
    )
    began = time.perf_counter()
    # What the kernel's process itself prints is no output of a cell; it is kept in case the kernel dies.
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            drive(client, ran, own, passes, result, log)
        except CellTimeoutError:
            result.fail(describe(ran.cells[at], at, own), [f"the cell took more than {timeout} s"])
        except DeadKernelError:
            log.seek(0)
            printed = [line for line in log if "without encryption" not in line]  # said by every kernel
            reason = "the kernel died (out of memory? a crash in native code?); the last it printed:"
            result.fail(describe(ran.cells[at], at, own), [reason, *last_lines("".join(printed) or "nothing")])
        except (CellExecutionError, CellControlSignal) as error:
            result.fail(describe(ran.cells[at], at, own), last_lines(str(error)))
        except (RuntimeError, OSError) as error:  # the kernel did not start
            result.fail("before the first cell", last_lines(str(error)))
    result.seconds = round(time.perf_counter() - began, 2)
    inspect_outputs(ran, result, own)
    return ran


def drive(client: NotebookClient, ran, own: int, passes: int, result: Result, log) -> None:
    """Starts the kernel, makes sure that it is ours, runs every cell, measures between passes."""
    with client.setup_kernel(env=kernel_environment(), stdout=log, stderr=log):
        kernel = ask(client, "__import__('sys').executable")
        if kernel != repr(sys.executable):
            raise RuntimeError(f"the kernel runs {kernel}, not {sys.executable!r}")
        try:
            for index, cell in enumerate(ran.cells):
                client.execute_cell(cell, index)
                if passes > 1 and (index + 1) % own == 0:
                    allocated = ask(client, "_workshop_memory()", MEMORY)
                    result.memory.append(int(allocated) if allocated.isdigit() else None)
        finally:
            client.set_widgets_metadata()


# ------------------------------------------------------------------------------------------------ reading outputs


def describe(cell, index: int, own: int) -> str:
    first = (cell.source.strip().splitlines() or [""])[0]
    again = f", pass {index // own + 1}" if index >= own else ""
    return f"cell {index % own + 1} of {own}{again} (id {cell.get('id', '?')}): {first}"


def last_lines(text: str, count: int = 6) -> list[str]:
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    return [line for line in plain.splitlines() if line.strip()][-count:]


def find_card(nb) -> dict:
    """The first machine card among a notebook's outputs, or an empty dict."""
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            card = output.get("data", {}).get(CARD)
            if card is not None:
                return json.loads(card) if isinstance(card, str) else dict(card)
    return {}


def widget_outputs(nb):
    """Every output that an executed notebook's Output widgets hold: (model id, output)."""
    models = nb.metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    for identifier, model in models.items():
        if model.get("model_name") == "OutputModel":
            for output in model.get("state", {}).get("outputs", []):
                yield identifier, output


def warning_lines(output) -> list[str]:
    """The lines on stderr that hold the word Warning or are torch's log of one, W1130 …; tqdm's bars there are fine."""
    if output.get("output_type") != "stream" or output.get("name") != "stderr":
        return []
    text = output["text"] if isinstance(output["text"], str) else "".join(output["text"])
    return [line.strip() for line in text.splitlines() if re.search(r"Warning|^W\d{4} ", line)]


def inspect_outputs(nb, result: Result, own: int | None = None) -> None:
    """Reads card, warnings and widget errors off an executed notebook into `result`."""
    own = own or len(nb.cells) or 1
    card = find_card(nb)
    result.tier, result.fp8 = card.get("tier"), card.get("fp8")
    for index, cell in enumerate(nb.cells):
        for output in cell.get("outputs", []):
            result.warnings += [f"{describe(cell, index, own)}: {line}" for line in warning_lines(output)]
    for identifier, output in widget_outputs(nb):
        result.warnings += [f"widget {identifier[:8]}: {line}" for line in warning_lines(output)]
        if output.get("output_type") == "error":
            trace = "\n".join(output.get("traceback") or [f"{output.get('ename')}: {output.get('evalue')}"])
            result.fail(f"a widget's callback raised {output.get('ename')}", last_lines(trace))


# ------------------------------------------------------------------------------------------------ running


def run_one(path: Path, out: Path, root: Path = ROOT, passes: int = 1, strict: bool = False, **options) -> Result:
    """Copies one notebook, executes the copy, writes the executed notebook to `out`."""
    name = name_of(path, root)
    result = Result(name)
    # A kernel outside the repository would not find `helpers`, so the work is done inside; the result goes to `out`.
    inside = out if out.resolve().is_relative_to(root.resolve()) else root / "artifacts" / "run"
    place, target = (folder / f"{name}.ipynb" for folder in (inside, out))
    for folder in {place.parent, target.parent}:
        folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, place)
    try:
        nb = nbformat.read(place, as_version=4)
    except Exception as error:  # nbformat raises many kinds for a file that is no notebook
        result.fail("reading the notebook", last_lines(f"{type(error).__name__}: {error}"))
        return result
    ran = execute(nb, place.parent, result, passes, **options)
    write_atomically(target, nbformat.writes(ran) + "\n")
    if result.measured():
        first, last = result.memory[0], result.memory[-1]
        if last > first * GROWTH_ALLOWED:
            grown = f"GPU memory grew from {first / 1e6:.1f} MB after the first pass to {last / 1e6:.1f} MB"
            result.fail("the second pass", [grown])
    if strict and result.warnings:
        result.fail("a warning was printed", result.warnings[:3])
    return result


def write_atomically(path: Path, text: str) -> None:
    """Nobody ever reads half a file: written under another name, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def run_all(paths: list[Path], out: Path, root: Path = ROOT, say=print, **options) -> list[Result]:
    """Runs notebooks one after the other, reports each as it ends, writes summary.json."""
    out.mkdir(parents=True, exist_ok=True)
    summary = out / "summary.json"
    summary.unlink(missing_ok=True)  # an interrupted run must not leave an older run's verdict
    results = []
    for number, path in enumerate(paths, 1):
        progress = Progress(f"[{number}/{len(paths)}] {name_of(path, root)}", say)
        result = run_one(path, out, root, on_cell=progress.cell, **options)
        progress.done(result)
        results.append(result)
    write_atomically(summary, json.dumps([result.summary() for result in results], indent=1) + "\n")
    return results


class Progress:
    """One line a notebook. On a terminal it counts cells and seconds meanwhile; in a pipe it appears in two halves."""

    def __init__(self, label: str, say=print):
        self.label, self.say, self.began = label, say, time.perf_counter()
        self.live = say is print and sys.stdout.isatty()
        say(f"{label} ...", end="", flush=True)

    def cell(self, number: int, count: int) -> None:
        if self.live:
            seconds = time.perf_counter() - self.began
            self.say(f"\r{self.label} ... cell {number}/{count}, {seconds:.0f} s ", end="", flush=True)

    def done(self, result: Result) -> None:
        start = f"\r{self.label} ..." if self.live else ""
        self.say(f"{start} {result.status} in {result.seconds:.1f} s".ljust(24) + " " * 8 * self.live, flush=True)
        if result.status == "failed":
            self.say(f"    {result.where}", flush=True)
            for line in result.error:
                self.say(f"    | {line}", flush=True)


def table(results: list[Result]) -> str:
    heads = ("notebook", "status", "seconds", "tier", "fp8", "warnings")
    rows = [heads]
    for r in results:
        rows.append((r.notebook, r.status, f"{r.seconds:.1f}", r.tier or "-", r.fp8 or "-", str(len(r.warnings))))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    failed = sum(r.status == "failed" for r in results)
    lines.append(f"{len(results) - failed} passed, {failed} failed in {sum(r.seconds for r in results):.1f} s")
    return "\n".join(lines)


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="run_notebooks", description=__doc__.split("\n")[0])
    parser.add_argument("--notebook", default="", help="just this one: 03, or its whole name")
    parser.add_argument("--order", default="", help="these, in this order: 05,03,01")
    parser.add_argument("--deeper", action="store_true", help="notebooks/deeper/ too")
    parser.add_argument("--out", type=Path, default=root / "artifacts" / "run", help="where copies and summary.json go")
    parser.add_argument("--twice", action="store_true", help="run each one's cells twice in one kernel")
    parser.add_argument("--strict", action="store_true", help="a warning on stderr fails the notebook")
    parser.add_argument("--timeout", type=int, default=CELL_TIMEOUT_S, help="seconds for one cell (%(default)s)")
    options = parser.parse_args(arguments)
    wanted = [word.strip() for word in (options.order or options.notebook).split(",") if word.strip()]
    try:
        paths = select(wanted, root, options.deeper)
        if not paths:
            raise Usage(f"there are no notebooks in {root / 'notebooks'}.")
    except Usage as usage:
        print(f"run_notebooks: {usage}", file=sys.stderr)
        return 2
    try:
        passes = 2 if options.twice else 1
        out = options.out.absolute()
        results = run_all(paths, out, root, passes=passes, strict=options.strict, timeout=options.timeout)
    except KeyboardInterrupt:
        print("\nrun_notebooks: interrupted; no summary was written.", file=sys.stderr)
        return 130
    print(f"\n{table(results)}")
    for result in results:
        if result.measured():
            print(
                f"{result.notebook}: GPU memory {', '.join(f'{b / 1e6:.1f}' for b in result.memory)} MB after each pass"
            )
        for line in result.warnings[:5]:
            print(f"{result.notebook}: {line}")
    print(f"Executed copies and summary.json: {out}")
    return 1 if any(result.status == "failed" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
