"""Makes .venv when it is missing or out of date, then runs one of the workshop's commands in it.

    python3 tools/bootstrap.py lab       (Windows: py tools/bootstrap.py lab)

Standard library only. The whole file must parse on Python 3.6 and newer, so that the reader of an old one sees the
line from `check_python` and not a SyntaxError: no `match`, no walrus, no quotes reused inside an f-string.
"""

import hashlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
STAMP = os.path.join(VENV, "workshop-stamp.json")  # written last: without it .venv counts as half made
FIRST_NOTEBOOK = os.path.join("notebooks", "01_hardware_detection.ipynb")
BASE = ("requirements.txt", "constraints.txt")
DEV = ("requirements.txt", "constraints.txt", "requirements-dev.txt")
NO_NETWORK = (
    "NewConnectionError|ConnectTimeout|ReadTimeout|Read timed out|ProxyError|ConnectionReset|Connection broken"
    "|name resolution|Network is unreachable"
)
COMMANDS = {
    "lab": "open JupyterLab on the first notebook",
    "run": "execute the notebooks on copies in artifacts/run/ (--notebook 03, --deeper, --out DIR)",
    "test": "run the tests (further arguments go to pytest)",
    "test-all": "the tests and the slow ones: every notebook twice in one kernel, a fresh installation, ...",
    "results": "take what `run` left in artifacts/ on a GPU machine into results/, rewrite the tables",
    "badges": "set the repository in badges and setup cells (--repo owner/name, --branch main, --check)",
    "setup": "only make .venv (--dev: with what the tests need)",
}


class Stop(Exception):
    """One line for the reader: what is wrong and what to do."""


def venv_python():
    return os.path.join(VENV, "Scripts", "python.exe") if os.name == "nt" else os.path.join(VENV, "bin", "python")


# ------------------------------------------------------------------------------------------------ checks


def check_python():
    if sys.version_info >= (3, 11):  # noqa: UP036 (this line is what the check is for)
        return
    found = ".".join(str(part) for part in sys.version_info[:3])
    message = f"The workshop needs Python 3.11 or newer, but {sys.executable} is Python {found}."
    for name in ("python3.13", "python3.12", "python3.11"):
        # A name on PATH may be a shim that only prints an error, so it has to answer.
        if works(name, ""):
            raise Stop(f"{message} {name} is installed: run `make {command_name()} PYTHON={name}`.")
    raise Stop(f"{message} Install a newer one beside it, then run `make {command_name()} PYTHON=python3.12`.")


def check_venv_module():
    for module in ("venv", "ensurepip"):
        try:
            __import__(module)
        except ImportError:
            package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
            raise Stop(
                f"{sys.executable} cannot make a virtual environment: its module {module} is missing. "
                f"On Debian and Ubuntu run `sudo apt install {package}`; elsewhere use another Python: "
                f"`make {command_name()} PYTHON=...`."
            ) from None


def command_name():
    return sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] in COMMANDS else "lab"


# ------------------------------------------------------------------------------------------------ .venv


def digest(files):
    total = hashlib.sha256()
    for name in files:
        path = os.path.join(ROOT, name)
        try:
            with open(path, "rb") as file:
                total.update(name.encode() + b"\0" + file.read().replace(b"\r\n", b"\n") + b"\0")
        except FileNotFoundError:
            raise Stop(f"{name} is missing in {ROOT}: this is not a complete checkout; clone it again.") from None
    return total.hexdigest()


def read_stamp():
    try:
        with open(STAMP, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def write_stamp(stamp):
    with open(STAMP + ".new", "w", encoding="utf-8") as file:
        json.dump(stamp, file)
    os.replace(STAMP + ".new", STAMP)


def installed(name):
    """The version of an installed distribution in .venv, read from its folder's name, or None."""
    folders = [os.path.join(VENV, "Lib", "site-packages")] if os.name == "nt" else []
    library = os.path.join(VENV, "lib")
    if os.name != "nt" and os.path.isdir(library):
        folders = [os.path.join(library, python, "site-packages") for python in os.listdir(library)]
    for folder in folders:
        for entry in os.listdir(folder) if os.path.isdir(folder) else []:
            match = re.fullmatch(re.escape(name) + r"-(.+)\.dist-info", entry)
            if match:
                return match.group(1)
    return None


def ensure_venv(dev):
    """Brings .venv up to date; returns at once when its stamp matches the requirement files."""
    wanted = {"base": digest(BASE)}
    if dev:
        wanted["dev"] = digest(DEV)
    stamp = read_stamp()
    if os.path.exists(venv_python()) and all(stamp.get(key) == value for key, value in wanted.items()):
        return
    began = time.monotonic()
    make_venv()
    if not installed("torch"):
        print(f"Installing into .venv ({size_note()}).", flush=True)
    else:
        print("Bringing .venv up to the requirement files.", flush=True)
    torch_before = installed("torch")
    requirements = ["-r", "requirements.txt"] + (["-r", "requirements-dev.txt"] if dev else [])
    pip([*requirements, "-c", "constraints.txt"])
    if installed("transformer_engine") and torch_before and installed("torch") != torch_before:
        print(
            f"torch changed from {torch_before} to {installed('torch')}, and Transformer Engine was built for the old one: "
            "run `bash colab_setup.sh --force`."
        )
    write_stamp(dict(stamp, **wanted))
    print(f".venv is ready ({time.monotonic() - began:.0f} s).", flush=True)


def size_note():
    if sys.platform == "linux":
        return "up to 3 GB to download and 6 GB on disk: pip's usual torch for Linux brings CUDA, GPU or not"
    return "0.4 GB to download, 1.5 GB on disk"


def make_venv():
    """Creates .venv, or repairs the one a broken-off try left behind."""
    if os.path.exists(VENV) and os.listdir(VENV) and not os.path.exists(os.path.join(VENV, "pyvenv.cfg")):
        raise Stop(f"{VENV} is there but is not a virtual environment: move it away, then try again.")
    if works(venv_python(), "import sys; sys.exit(sys.version_info < (3, 11))"):
        if works(venv_python(), "import pip"):
            return
        # Broken off before pip was there, or made by another tool: what is installed stays.
        check_venv_module()
        subprocess.run([venv_python(), "-m", "ensurepip"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if works(venv_python(), "import pip"):
            return
    check_venv_module()
    print("Making .venv.", flush=True)
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", VENV], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if made.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        lines = made.stdout.strip().splitlines() or ["no message"]
        raise Stop(
            f"{sys.executable} could not make {VENV}: {lines[-1]}. Try another one: `make {command_name()} PYTHON=...`."
        )


def works(python, code):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        return subprocess.call([python, "-c", code], **quiet) == 0
    except OSError:
        return False


def pip(arguments):
    """Runs pip install, shows what it is at and for how long, keeps its whole output in .venv/pip.log."""
    command = [
        venv_python(),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        *arguments,
    ]
    environment = dict(os.environ, PYTHONUNBUFFERED="1", PIP_USER="0")
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    lines = queue.Queue()

    def read():
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    live = sys.stdout.isatty()
    log, doing, began, shown = [], "looking for packages", time.monotonic(), 0.0
    try:
        while True:
            try:
                line = lines.get(timeout=1)
            except queue.Empty:
                line = ""
            if line is None:
                break
            log.append(line)
            news = step(line)
            doing = news or doing
            seconds = time.monotonic() - began
            # A terminal sees one line that counts; a pipe gets a line for what is large and one every half minute.
            if live:
                sys.stdout.write(f"\r  {seconds:4.0f} s  {doing}"[:100].ljust(100))
                sys.stdout.flush()
            elif seconds - shown > 30 or (news and (large(news) or news.startswith("installing"))):
                print(f"  {seconds:4.0f} s  {doing}", flush=True)
                shown = seconds
    except BaseException:
        process.kill()
        raise
    finally:
        if live:
            sys.stdout.write("\r" + " " * 100 + "\r")
        path = os.path.join(VENV, "pip.log")
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(log)
    if process.wait() != 0:
        raise Stop(explain("".join(log)) + f" pip's output: {os.path.relpath(path, ROOT)}.")


def step(line):
    """What one line of pip's output says it is doing, in our words; None for the rest."""
    match = re.match(r"\s*(Downloading|Using cached) (\S+?)-(\d[^-\s]*)\S* (\([\d.]+ \wB\))", line)
    if match and ".metadata" not in line:
        return f"{match.group(1).lower()} {match.group(2).rpartition('/')[2]} {match.group(3)} {match.group(4)}"
    match = re.match(r"Installing collected packages: (.*)", line)
    if match:
        return f"installing {match.group(1).count(',') + 1} packages"
    return None


def large(news):
    size = re.search(r"\(([\d.]+) (\w)B\)", news)
    return bool(size) and (size.group(2) == "G" or (size.group(2) == "M" and float(size.group(1)) >= 20))


def explain(log):
    """The most likely reason why pip failed, and what to do about it, as one line."""
    if "No space left on device" in log:
        return "The disk is full: a CUDA build of torch needs 6 GB, a CPU build 1.5 GB. Make room, then run the same command again."
    if re.search(r"CERTIFICATE_VERIFY_FAILED|SSLError", log):
        return "pip does not trust the package index's certificate: behind a company proxy set PIP_CERT to its certificate file."
    if re.search(NO_NETWORK, log):
        return "pip reached no package index: check the network (and HTTPS_PROXY, PIP_INDEX_URL), then run the same command again."
    here = f"Python {sys.version_info[0]}.{sys.version_info[1]} on this machine"
    platforms = "Python 3.11 to 3.13, 64 bit, on a Mac with Apple silicon"
    match = re.search(r"No matching distribution found for ([^\s(]+)", log)
    if match and os.environ.get("PIP_NO_INDEX"):
        return f"pip finds no {match.group(1)} among the local wheels (PIP_NO_INDEX is set): add it there, or unset PIP_NO_INDEX."
    if match and "from versions: none" in log:
        return f"pip finds no {match.group(1)} at all: check the network (and PIP_INDEX_URL), and that this is {platforms}."
    # An exact version from constraints.txt that does not exist here reads as a conflict in pip's output.
    pinned = re.search(r"The user requested \(constraint\) (\S+)", log)
    if match or pinned:
        missing = pinned.group(1) if pinned else match.group(1)
        return (
            f"pip finds no {missing} for {here}: the workshop was tested with {platforms}. "
            "To try another version, take its line out of constraints.txt."
        )
    errors = re.findall(r"^ERROR: (.+?)\.?$", log, re.MULTILINE)
    return "pip could not install the requirements: " + (errors[0] if errors else "it gives no reason") + "."


# ------------------------------------------------------------------------------------------------ commands


def gpu_hint():
    """How to add TE, where a CUDA GPU answers and TE is not in .venv; otherwise an empty string."""
    if not shutil.which("nvidia-smi") or installed("transformer_engine"):
        return ""
    try:
        asked = subprocess.run(
            ["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if asked.returncode != 0 or "GPU" not in asked.stdout:
        return ""
    name = asked.stdout.splitlines()[0].partition(": ")[2].partition(" (")[0] or "a CUDA GPU"
    if os.name == "nt":
        return f"Found {name}. Transformer Engine runs on Linux only: use WSL2 to run FP8 for real."
    return f"Found {name}. To run FP8 for real, add Transformer Engine once: bash colab_setup.sh --force"


def run_in_venv(arguments):
    """Replaces this process, so that Ctrl-C and exit codes are the command's own."""
    sys.stdout.flush()
    # A kernelspec named python3 from somewhere else on JUPYTER_PATH must not win over .venv's.
    share = os.path.join(VENV, "share", "jupyter")
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [share, os.environ.get("JUPYTER_PATH")]))
    os.chdir(ROOT)
    command = [venv_python(), *arguments]
    if os.name != "nt":
        os.execv(command[0], command)
    sys.exit(subprocess.call(command))


def main(arguments):
    check_python()
    if not arguments or arguments[0] not in COMMANDS:
        given = f"unknown command {arguments[0]!r}" if arguments else "no command given"
        raise Stop(f"{given}; one of: {', '.join(COMMANDS)}.")
    command, rest = arguments[0], arguments[1:]
    if command == "badges":  # needs nothing but Python
        os.chdir(ROOT)
        sys.exit(subprocess.call([sys.executable, os.path.join("tools", "badges.py"), *rest]))
    if command == "setup" and rest not in ([], ["--dev"]):
        raise Stop(f"setup: unknown argument {rest[0]!r}; allowed: --dev.")
    ensure_venv(dev=command in ("test", "test-all") or rest == ["--dev"])
    if command == "lab":
        if not os.path.exists(os.path.join(ROOT, FIRST_NOTEBOOK)):
            raise Stop(f"{FIRST_NOTEBOOK} is missing in {ROOT}: this is not a complete checkout; clone it again.")
        hint = gpu_hint()
        if hint:
            print(hint, flush=True)
        run_in_venv(["-m", "jupyterlab", f"--ServerApp.root_dir={ROOT}", FIRST_NOTEBOOK, *rest])
    elif command == "run":
        run_in_venv([os.path.join("tools", "run_notebooks.py"), *rest])
    elif command == "test":
        run_in_venv(["-m", "pytest", *rest])
    elif command == "test-all":
        run_in_venv(["-m", "pytest", "--slow", *rest])
    elif command == "results":
        run_in_venv([os.path.join("tools", "collect_results.py"), *rest])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Stop as stop:
        sys.stdout.flush()
        sys.exit(f"bootstrap: {stop}")
    except KeyboardInterrupt:
        sys.exit("bootstrap: interrupted; run the same command again to go on.")
