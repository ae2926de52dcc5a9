"""The verdict on this machine: what works here and why the rest does not. Decided once, then kept.

It is decided in fresh processes (helpers/probe.py) and kept in artifacts/hardware.json together with the state it was
found in: versions, driver, GPUs and the environment variables that matter. Reading that state takes milliseconds, since
neither torch nor Transformer Engine (TE) is imported for it; another state has another verdict.
"""

import contextlib
import ctypes
import glob
import hashlib
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from helpers import advice, probe

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "artifacts" / "hardware.json"
KEPT = 8  # verdicts: two environments, or GPUs taken by CUDA_VISIBLE_DEVICES, do not push each other out
LIMIT_S = 180.0  # of one probing process; the first import of TE takes up to half a minute

# What changes the verdict. TE sets NVTE_CUDA_INCLUDE_DIR itself, when it is imported.
PACKAGES = ("torch-", "triton-", "transformer_engine", "nvidia_", "flash_attn", "pydantic", "onnx", "einops-")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH", "CUDNN_HOME", "CUDNN_PATH")
VARIABLES += ("LD_LIBRARY_PATH", "LD_PRELOAD")
SYSTEM = ("/usr/local/cuda/lib*", "/usr/lib/*-linux-gnu", "/usr/lib*")  # where TE finds a cuDNN before torch's


# ------------------------------------------------------------------------------------------------ the state


def packages() -> dict[str, list]:
    """{name: [version, when it was installed]} of PACKAGES; the first on the search path is the one that is imported."""
    found = {}
    for folder in sys.path:
        try:
            entries = [entry for entry in os.scandir(folder or ".") if entry.name.lower().startswith(PACKAGES)]
        except OSError:
            continue
        for entry in entries:
            if entry.name.endswith((".dist-info", ".egg-info")):
                name, _, version = entry.name.rpartition(".")[0].partition("-")
                found.setdefault(name.lower(), [version, entry.stat().st_mtime_ns])
    return dict(sorted(found.items()))


def location(module: str) -> list | None:
    """[file, when it was changed] of a module, without importing it."""
    try:
        origin = importlib.util.find_spec(module).origin
        return [origin, os.stat(origin).st_mtime_ns]
    except (AttributeError, ValueError, TypeError, OSError):  # not there, or a namespace without a file
        return None


def system_cudnn() -> list[str]:
    """The files of the cuDNN libraries that are not torch's; their names end in the version."""
    homes = [os.environ[name] for name in VARIABLES if name.endswith(("_HOME", "_PATH")) and name in os.environ]
    folders = [*SYSTEM, *(f"{glob.escape(home)}/lib*" for home in homes if os.pathsep not in home)]
    return sorted({os.path.realpath(path) for folder in folders for path in glob.glob(f"{folder}/libcudnn.so.*")})


def nvidia() -> tuple[str | None, list[str]]:
    """(the driver's version, the GPUs) without starting CUDA, which takes seconds and could hang."""
    try:
        version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
        folders = sorted(Path("/proc/driver/nvidia/gpus").iterdir())
        models = [re.search(r"Model:\s*(.*)", (folder / "information").read_text()) for folder in folders]
        return version and version[0], [f"{f.name} {m[1] if m else '?'}" for f, m in zip(folders, models, strict=True)]
    except OSError:
        return nvml()  # Windows, and Linux inside it (WSL)


def nvml() -> tuple[str | None, list[str]]:
    """The same from NVIDIA's management library, which comes with the driver; (None, []) where there is none."""
    try:
        library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        text, count, gpu, gpus = ctypes.create_string_buffer(96), ctypes.c_uint(), ctypes.c_void_p(), []
        if library.nvmlInit_v2():
            return None, []
        library.nvmlSystemGetDriverVersion(text, 80)
        driver = text.value.decode()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu))
            library.nvmlDeviceGetUUID(gpu, text, 96)
            gpus.append(text.value.decode())
        library.nvmlShutdown()
    except (OSError, AttributeError):
        return None, []
    return driver, gpus


def state() -> dict:
    """Everything that the verdict depends on, as JSON holds it."""
    driver, gpus = nvidia()
    sources = b"".join(Path(module.__file__).read_bytes() for module in (probe, advice))
    return {
        "decided by": hashlib.sha256(sources + Path(__file__).read_bytes()).hexdigest(),
        "platform": sys.platform,
        "python": [sys.executable, platform.python_version()],
        "packages": packages(),
        "modules": {name: location(name) for name in ("torch", "transformer_engine")},
        "system cuDNN": system_cudnn(),
        "driver": driver,
        "gpus": gpus,
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in VARIABLES or (name.startswith("NVTE_") and name != "NVTE_CUDA_INCLUDE_DIR")
        },
    }


# ------------------------------------------------------------------------------------------------ deciding


def decide(limit_s: float = LIMIT_S, path: list[str] | None = None) -> dict:
    """Decides anew and keeps nothing: the facts. `path` is the module search path of the probing processes.

    A step that ends its process, or is not done after `limit_s` seconds, counts as failed, and the rest is tried in
    another process. Raises RuntimeError if torch itself cannot be imported.
    """
    path = [os.path.abspath(entry) for entry in (sys.path if path is None else path)]  # "" is the current folder
    found, layers, broken = {}, {}, ""
    while True:
        todo = [name for name in (probe.BF16, *probe.RECIPES) if name not in layers]
        seen, died = run({"path": path, "te": not broken, "layers": todo}, limit_s)
        layers |= seen.pop("layers")
        found |= seen
        step = seen["step"]
        if died and step == probe.IMPORT:
            broken = f"{step} {died}"
        elif died and step in todo:
            layers[step] = f"a test layer {died}" if step == probe.BF16 else f"{probe.CLAIMED} {died}"
        elif died and "torch" not in found:
            raise RuntimeError(f"torch does not import here: {step} {died}")
        elif died:
            found["device_reason"] = f"{step} {died}"
            break
        if seen.get("end") == "all" or layers.get(probe.BF16):
            break
    if broken:
        found |= {"te": None, "te_reason": broken}
    return facts(found, layers, state())


def run(request: dict, limit_s: float) -> tuple[dict, str]:
    """One probing process: (what it reported, how it died, or "" if it ended as it meant to)."""
    seen = {"step": "starting Python", "layers": {}}
    with tempfile.TemporaryDirectory(prefix="fp8-workshop-", ignore_cleanup_errors=True) as folder:
        report, log = Path(folder, "report"), Path(folder, "log")
        # -P: helpers/ must not stand on the module path, where its data.py or models.py could shadow another's.
        command = [sys.executable, "-P", probe.__file__, json.dumps(request | {"report": str(report)})]
        with open(log, "wb") as printed:  # files, since a pipe stays open as long as a worker of torch or TE lives
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, start_new_session=True
            )
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                timed_out = process.poll() is None
                if timed_out:
                    kill(process)
        for line in report.read_text(encoding="utf-8").splitlines() if report.exists() else ():
            try:
                event = json.loads(line)
            except json.JSONDecodeError:  # it died while writing this one
                break
            seen["layers"] |= event.pop("layers", {})
            seen |= event
        if "end" in seen:
            return seen, ""
        words = log.read_text(encoding="utf-8", errors="replace").partition("Fatal Python error")[0].split("\n")
        words = [line.strip() for line in words if line.strip()]
    if timed_out:
        return seen, f"took more than {limit_s:g} s"
    how = signal.Signals(-process.returncode).name if process.returncode < 0 else f"status {process.returncode}"
    return seen, f"ended the process ({how}{f'; it last said: {words[-1][:200]}' if words else ''})"


def kill(process: subprocess.Popen) -> None:
    """Ends a process and, where the system can, the workers that it started."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def facts(found: dict, layers: dict[str, str], here: dict) -> dict:
    """What the probing processes found, as facts about this machine."""
    no_gpu, te, why = found["device_reason"], found.get("te"), found.get("te_reason", "")
    capability = found.get("capability")
    if no_gpu:
        why = why or f"Transformer Engine{f' {te}' if te else ''} needs a GPU"
    elif tuple(capability) < probe.OLDEST_CAPABILITY:
        needed = ".".join(map(str, probe.OLDEST_CAPABILITY))
        why = f"compute capability {capability[0]}.{capability[1]} is below {needed}, which Transformer Engine needs"
    elif layers.get(probe.BF16):
        why = f"Transformer Engine {te} imports, but does not run in BF16: {layers[probe.BF16]}"
    off = f"no GPU: {no_gpu}" if no_gpu else why
    known = {
        "device": "cpu" if no_gpu else "cuda",
        "device_reason": no_gpu,
        **{name: found.get(name) for name in ("gpu", "capability", "memory_gb", "cudnn")},
        "driver": here["driver"],
        "cuda": found["cuda"],
        "torch": found["torch"],
        "python": platform.python_version(),
        "te": None if why else te,
        "te_reason": why,
        "recipes": {name: off or layers[name] for name in probe.RECIPES},
        "decided": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return known | {"advice": advice.advise(known, here)}


# ------------------------------------------------------------------------------------------------ keeping


def verdict(limit_s: float | None = None) -> dict:
    """The facts: the kept ones if they were found in this state, else decided now. `limit_s` decides anew anyway."""
    here = state()
    kept = read()
    if limit_s is None:
        for entry in kept:
            if entry["state"] == here:
                return entry["facts"]
    decided = decide(limit_s or LIMIT_S)
    if not advice.passes(decided):
        write([{"state": here, "facts": decided}, *(entry for entry in kept if entry["state"] != here)][:KEPT])
    return decided


def read() -> list[dict]:
    """The kept verdicts, the newest first; none where the file is missing, broken or of another shape."""
    try:
        kept = json.loads(FILE.read_text(encoding="utf-8"))
        return [entry for entry in kept if entry["state"] and "advice" in entry["facts"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def write(kept: list[dict]) -> None:
    """Replaces the file as a whole. Where it cannot be written the next process decides again, and that is all."""
    temporary = FILE.with_name(f".{FILE.name}.{os.getpid()}")
    try:
        FILE.parent.mkdir(exist_ok=True)
        temporary.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, FILE)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
