"""A workshop of its own, stand-ins for torch and Transformer Engine on the module path, and the report it gives there."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GPU, TE = (ROOT / "tests" / "fakes" / name for name in ("gpu", "te"))

# The commands of helpers/advice.py in a workshop without a .venv
PYTHON = shlex.quote(sys.executable)
PIP = f"{PYTHON} -m pip"
SETUP = f"bash colab_setup.sh --force --python {PYTHON}"
REMOVE = (
    f"{PIP} uninstall -y transformer_engine transformer_engine_torch transformer_engine_cu12 transformer_engine_cu13"
)
REBUILD = f"{PIP} cache remove transformer_engine_torch; {SETUP}"
NEWEST = f'{PIP} install --upgrade --no-build-isolation "transformer_engine[pytorch,core_cu13]"'
WHO = "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"


class Workshop:
    """A copy of the report's modules, so that its verdicts are kept apart from this checkout's.

    The stand-ins come before what is installed: the tests say the same on a machine with a GPU and Transformer Engine.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.file = folder / "artifacts" / "hardware.json"
        (folder / "helpers").mkdir(parents=True)
        for name in ("__init__", "advice", "hardware", "probe", "verdict"):
            shutil.copy2(ROOT / "helpers" / f"{name}.py", folder / "helpers")

    def python(self, *arguments, path=(GPU, TE), timeout=120, **environment) -> subprocess.CompletedProcess:
        """Runs Python with `path` in front of the workshop on its module path."""
        foreign = ("WORKSHOP_", "NVTE_", "FAKE_", *(("CUDA_", "CUDNN_") if GPU in path else ()))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        places = (*path, self.folder, *filter(None, [os.environ.get("PYTHONPATH")]))
        kept |= {"PYTHONPATH": os.pathsep.join(map(str, places)), "PYTHONDONTWRITEBYTECODE": "1"}
        for name, value in environment.items():
            kept[name] = value if isinstance(value, str) else json.dumps(value)
        return subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, env=kept, cwd=self.folder, timeout=timeout
        )

    def report(self, *arguments, **options) -> dict:
        ran = self.python("-m", "helpers.hardware", "--json", *arguments, **options)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)


def broken_te(folder: Path, code: str, version: str = "2.20.2") -> Path:
    """A transformer_engine package whose PyTorch half runs `code` when it is imported."""
    package = folder / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (package / "pytorch" / "__init__.py").write_text(code + "\n")
    return folder


def installed(folder: Path, **versions: str) -> Path:
    """Metadata as pip leaves it."""
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder
