"""tools/bootstrap.py, colab_setup.sh and the Makefile, run as a user runs them: fresh processes, real virtual environments.

Nothing here needs the network: what would be downloaded is a wheel of a few lines, made on the spot.
"""

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BASE_PYTHON = Path(sys.base_prefix) / ("python.exe" if os.name == "nt" else f"bin/python3.{sys.version_info[1]}")
needs_venv = pytest.mark.skipif(not importlib.util.find_spec("ensurepip"), reason="this Python has no ensurepip")
needs_bash = pytest.mark.skipif(not shutil.which("bash") or os.name == "nt", reason="needs bash, as Colab has")


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in files) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in (files | {f"{info}/RECORD": record}).items():
            wheel.writestr(path, text)


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def environment(home: Path, **changes: str) -> dict[str, str]:
    """An empty HOME, no settings for pip, and an index that nothing answers at."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "JUPYTER", "PYTHON", "COLAB_"))
    }
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    return kept | {"HOME": str(home)} | offline | changes


def one_line(ran: subprocess.CompletedProcess) -> str:
    """What it said on stderr; the test fails if that is not one line or the exit status is 0."""
    assert ran.returncode not in (0, None), ran.stdout
    assert "Traceback" not in ran.stdout + ran.stderr
    lines = ran.stderr.strip().splitlines()
    assert len(lines) == 1, ran.stderr
    return lines[0]


# ------------------------------------------------------------------------------------------------ bootstrap


class Checkout:
    """A small checkout: bootstrap, requirements that ask for two tiny packages, and those packages' wheels beside it."""

    def __init__(self, folder: Path):
        self.root, self.home, self.wheels = folder / "a checkout", folder / "home", folder / "wheels"
        for part in (self.root / "tools", self.root / "notebooks", self.home, self.wheels):
            part.mkdir(parents=True)
        for name in ("tools/bootstrap.py", "tools/badges.py", "Makefile"):
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "notebooks" / "01_hardware_detection.ipynb").touch()
        (self.root / "tools" / "run_notebooks.py").write_text("import sys; print('run', sys.argv[1:]); sys.exit(3)")
        (self.root / "requirements.txt").write_text("jupyterlab\n")
        (self.root / "requirements-dev.txt").write_text("pytest\n")
        (self.root / "constraints.txt").write_text("jupyterlab==1.0\n")
        say = "import os, sys; print(__package__, sys.argv[1:], os.environ['JUPYTER_PATH'])"
        make_wheel(self.wheels, "jupyterlab", "1.0", {"jupyterlab/__init__.py": "", "jupyterlab/__main__.py": say})
        make_wheel(self.wheels, "jupyterlab", "2.0", {"jupyterlab/__init__.py": "", "jupyterlab/__main__.py": say})
        make_wheel(self.wheels, "pytest", "1.0", {"pytest/__init__.py": "", "pytest/__main__.py": say})

    def __call__(self, *arguments, python=sys.executable, wheels=True, **changes) -> subprocess.CompletedProcess:
        if wheels:
            changes = {"PIP_FIND_LINKS": str(self.wheels), "PIP_NO_INDEX": "1"} | changes
        command = [str(python), str(self.root / "tools" / "bootstrap.py"), *arguments]
        env = environment(self.home, **changes)
        return subprocess.run(command, env=env, cwd=self.home, capture_output=True, text=True, timeout=300)

    def version(self) -> str:
        return next((self.root / ".venv").rglob("jupyterlab-*.dist-info")).name


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("setup"))


@needs_venv
def test_without_network_one_line_and_the_next_try_works(checkout):
    """The story of a first start: no network, then the network is back, then it is quick."""
    message = one_line(checkout("run", wheels=False))
    assert "pip finds no jupyterlab" in one_line(checkout("run", wheels=False, PIP_RETRIES="0"))
    assert "pip reached no package index: check the network" in message
    assert "run the same command again" in message
    ran = checkout("run", "--notebook", "03")
    assert ran.returncode == 3  # the command's own exit status
    assert ran.stdout.splitlines()[-1] == "run ['--notebook', '03']"
    assert checkout.version() == "jupyterlab-1.0.dist-info"  # the constraint, not the newest
    ran = checkout("run", wheels=False)
    assert ran.stdout == "run []\n"  # nothing to install, nothing to say


@needs_venv
def test_lab_opens_the_first_notebook_and_names_a_gpu_that_lacks_te(checkout, tmp_path):
    ran = checkout("lab", "--no-browser", PATH=str(tmp_path), JUPYTER_PATH="/elsewhere")
    share = checkout.root / ".venv" / "share" / "jupyter"
    notebook = os.path.join("notebooks", "01_hardware_detection.ipynb")
    said = [
        "jupyterlab",
        f"['--ServerApp.root_dir={checkout.root}', '{notebook}', '--no-browser']",
        f"{share}{os.pathsep}/elsewhere",
    ]
    assert (ran.returncode, ran.stderr, ran.stdout.splitlines()[-1]) == (0, "", " ".join(said))
    assert "colab_setup" not in ran.stdout
    if os.name == "nt":
        return
    program(tmp_path, "nvidia-smi", "echo 'GPU 0: NVIDIA L4 (UUID: GPU-1)'")
    hint = "Found NVIDIA L4. To run FP8 for real, add Transformer Engine once: bash colab_setup.sh --force"
    assert hint in checkout("lab", PATH=str(tmp_path)).stdout
    site = next((checkout.root / ".venv").rglob("site-packages"))
    (site / "transformer_engine-2.20.2.dist-info").mkdir()
    assert "Found" not in checkout("lab", PATH=str(tmp_path)).stdout
    (site / "transformer_engine-2.20.2.dist-info").rmdir()
    program(tmp_path, "nvidia-smi", "echo 'has failed because it could not communicate with the driver'; exit 9")
    assert "Found" not in checkout("lab", PATH=str(tmp_path)).stdout


@needs_venv
def test_dev_requirements_come_with_test_and_changed_files_are_noticed(checkout):
    ran = checkout("test", "-k", "x")
    assert ran.stdout.splitlines()[-1].startswith("pytest ['-k', 'x'] ")
    assert checkout("test-all").stdout.startswith("pytest ['--slow'] ")
    assert checkout("run", wheels=False).stdout == "run []\n"
    (checkout.root / "constraints.txt").write_text("jupyterlab==2.0\n")
    assert ".venv is ready" in checkout("run").stdout
    assert checkout.version() == "jupyterlab-2.0.dist-info"
    (checkout.root / "constraints.txt").write_text("jupyterlab==3.0\n")
    assert "pip finds no jupyterlab==3.0 for Python 3." in one_line(checkout("run"))
    (checkout.root / "constraints.txt").write_text("jupyterlab==2.0\n")
    assert checkout("run", wheels=False).stdout == "run []\n"  # the stamp was not touched by the failed try


@needs_venv
def test_a_broken_environment_is_made_again(checkout):
    venv = checkout.root / ".venv"
    shutil.rmtree(venv)
    # Broken off while it was being made: Python is there, pip and the stamp are not.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    assert checkout("run").returncode == 3
    # The Python it was made from is gone.
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    python.unlink()
    assert checkout("run").returncode == 3
    shutil.rmtree(venv)
    venv.mkdir()
    (venv / "precious.txt").touch()
    assert "is not a virtual environment: move it away" in one_line(checkout("run"))
    assert (venv / "precious.txt").exists()
    shutil.rmtree(venv)


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_a_python_without_venv_says_what_to_install(tmp_path, module):
    """As on Debian without python3-venv: the module cannot be imported."""
    checkout = Checkout(tmp_path)
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / f"{module}.py").write_text(f"raise ModuleNotFoundError('No module named {module}')")
    message = one_line(checkout("lab", PYTHONPATH=str(tmp_path / "lacking")))
    assert f"its module {module} is missing" in message
    assert f"sudo apt install python3.{sys.version_info[1]}-venv" in message
    assert not (checkout.root / ".venv").exists()


def old_pythons() -> Iterator[str]:
    folders = [Path(entry) for entry in os.environ.get("PATH", "").split(os.pathsep)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders += [path / "bin" for path in pyenv.glob("versions/*")]
    for minor in range(6, 11):
        for python in (folder / f"python3.{minor}" for folder in folders):
            if python.is_file() and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
                yield str(python)
                break


def test_an_old_python_says_what_is_needed(tmp_path):
    checkout = Checkout(tmp_path)
    ast.parse((ROOT / "tools" / "bootstrap.py").read_text(), feature_version=(3, 7))
    pretend = "import sys, runpy; sys.version_info = (3, 8, 10); sys.argv[:] = [sys.argv[1], 'lab']; runpy.run_path(sys.argv[0], run_name='__main__')"
    commands = [[sys.executable, "-c", pretend, str(checkout.root / "tools" / "bootstrap.py")]]
    commands += [[python, str(checkout.root / "tools" / "bootstrap.py"), "lab"] for python in old_pythons()]
    for command in commands:
        ran = subprocess.run(command, env=environment(checkout.home), capture_output=True, text=True)
        message = one_line(ran)
        assert "The workshop needs Python 3.11 or newer, but" in message
        assert "run `make lab PYTHON=python3.1" in message
        assert not (checkout.root / ".venv").exists()


def test_wrong_arguments_and_an_incomplete_checkout_are_one_line(tmp_path):
    checkout = Checkout(tmp_path)
    assert "unknown command 'lob'; one of: lab, run, test, test-all, results, badges, setup." in one_line(
        checkout("lob")
    )
    assert "no command given" in one_line(checkout())
    assert "allowed: --dev" in one_line(checkout("setup", "--everything"))
    (checkout.root / "constraints.txt").unlink()
    assert "constraints.txt is missing" in one_line(checkout("lab"))


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_passes_everything_on(checkout, tmp_path):
    echo = program(tmp_path, "python", 'shift; for word in "$@"; do printf "<%s>" "$word"; done')
    # `make test` runs this test too, and a make below a make says more
    env = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARGS")}
    for words, said in {
        ("lab",): "<lab>",
        ("run",): "<run>",
        ("run", "NOTEBOOK=03"): "<run><--notebook><03>",
        ("run", "DEEPER=1", "ARGS=--out 'a b'"): "<run><--deeper><--out><a b>",
        ("run", "DEEPER=0"): "<run>",
        ("test", "ARGS=-k 'a or b'"): "<test><-k><a or b>",
        ("test-all",): "<test-all>",
        ("badges", "REPO=you/fork", "BRANCH=dev"): "<badges><--repo><you/fork><--branch><dev>",
        ("badges",): "<badges>",
    }.items():
        ran = subprocess.run(["make", *words, f"PYTHON={echo}"], cwd=ROOT, env=env, capture_output=True, text=True)
        assert (ran.stdout, ran.stderr) == (said, "")


# ------------------------------------------------------------------------------------------------ colab_setup.sh


FAKE_PIP = """
import os, pathlib, sys
site = pathlib.Path(__file__).parents[1]
with open(site / "pip-calls", "a") as calls:
    print(*sys.argv[1:], "CPATH=" + os.environ.get("CPATH", ""), "MAX_JOBS=" + os.environ.get("MAX_JOBS", ""), file=calls)
if os.environ.get("PIP_FAILS") and "--no-build-isolation" in sys.argv:
    print("x.cpp:1:10: fatal error: cudnn.h: No such file or directory\\nERROR: Failed building wheel")
    sys.exit(1)
def add(name, version):
    (site / f"{name}-{version}.dist-info").mkdir(exist_ok=True)
    (site / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
if "--no-build-isolation" in sys.argv:
    version = sys.argv[-1].split("==")[1]
    for name in ("transformer_engine", "transformer_engine_torch", "transformer_engine_cu13"):
        add(name, version)
    (site / "transformer_engine" / "pytorch").mkdir(parents=True)
    (site / "transformer_engine" / "__init__.py").write_text(f"__version__ = {version!r}")
    (site / "transformer_engine" / "pytorch" / "__init__.py").write_text(os.environ.get("TE_IMPORT", ""))
elif sys.argv[1] == "uninstall":
    import shutil
    for path in site.glob("transformer_engine*"):
        shutil.rmtree(path)
else:
    for word in sys.argv[sys.argv.index("-c") + 2:]:
        add(word.split("==")[0].replace("-", "_"), "1.0")
"""


class Machine:
    """A Python whose packages are a folder of fakes (no site-packages), and a GPU that nvidia-smi answers for."""

    def __init__(self, folder: Path, capability: str = "9.0", cuda: str = "'13.0'", torch: str = "2.99.0"):
        self.folder, self.site = folder, folder / "site"
        self.script = folder / "repo" / "colab_setup.sh"
        self.script.parent.mkdir()
        shutil.copy(ROOT / "colab_setup.sh", self.script)
        self.python = program(folder, "fake-python", f'PYTHONPATH="{self.site}" exec "{BASE_PYTHON}" -S "$@"')
        cuda_module = "class cuda:\n    @staticmethod\n    def is_available(): return False\n"
        self.add("torch", torch, {"__init__.py": cuda_module, "version.py": f"cuda: Optional[str] = {cuda}\n"})
        self.add("pip", "1.0", {"__init__.py": "", "__main__.py": FAKE_PIP})
        for name in ("numpy", "pandas", "matplotlib", "tqdm", "safetensors", "ipywidgets"):
            self.add(name, "1.0", {})
        for header in ("cu13/include/cuda_runtime.h", "cudnn/include/cudnn.h"):
            (self.site / "nvidia" / header).parent.mkdir(parents=True)
            (self.site / "nvidia" / header).touch()
        if capability:
            program(folder / "bin", "nvidia-smi", f"echo '{capability}, NVIDIA Test GPU'")

    def add(self, name: str, version: str, files: dict[str, str]) -> None:
        info = self.site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for file, text in files.items():
            (self.site / name).mkdir(exist_ok=True)
            (self.site / name / file).write_text(text)

    def __call__(self, *options: str, **changes: str) -> subprocess.CompletedProcess:
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        command = ["bash", str(self.script), "--python", str(self.python), *options]
        env = environment(self.folder, PATH=path, **changes)
        return subprocess.run(command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=60)

    def calls(self) -> list[str]:
        path = self.site / "pip-calls"
        return path.read_text().splitlines() if path.exists() else []


@needs_bash
def test_outside_colab_it_does_nothing(tmp_path):
    machine = Machine(tmp_path)
    ran = machine()
    assert (ran.returncode, ran.stdout) == (
        0,
        "Not in Colab: nothing to do. On a CUDA machine of your own: bash colab_setup.sh --force\n",
    )
    assert machine.calls() == []
    assert not (tmp_path / "repo" / "artifacts").exists()


@needs_bash
def test_wrong_options_and_a_python_that_will_not_do(tmp_path):
    machine = Machine(tmp_path)
    ran = machine("--froce")
    assert (ran.returncode, ran.stdout) == (
        2,
        "colab_setup.sh: unknown option '--froce'; allowed: --force, --dry-run, --python PATH, --help\n",
    )
    ran = machine("--force", "--python", "no-such-python")
    assert (ran.returncode, "there is no Python 'no-such-python'" in ran.stdout) == (1, True)
    shutil.rmtree(machine.site / "torch")
    shutil.rmtree(machine.site / "torch-2.99.0.dist-info")
    ran = machine("--force")
    assert (ran.returncode, "PyTorch is not installed" in ran.stdout, ran.stdout.count("\n")) == (1, True, 1)
    for old in list(old_pythons())[:1]:
        ran = machine("--force", "--python", old)
        assert (ran.returncode, "needs Python 3.11 or newer" in ran.stdout, ran.stdout.count("\n")) == (1, True, 1)


@needs_bash
@pytest.mark.parametrize(
    ("machine", "says"),
    [
        ({}, "Transformer Engine 2.20.2 for CUDA 13 will be installed"),
        ({"cuda": "'12.8'", "capability": "8.0"}, "Transformer Engine 2.20.2 for CUDA 12 will be installed"),
        ({"capability": "7.5"}, "needs compute capability 8.0, this GPU has 7.5: not installed"),
        ({"capability": "12.0"}, "Transformer Engine 2.20.2 for CUDA 13 will be installed"),
        ({"capability": ""}, "no CUDA GPU answers"),
        ({"cuda": "None", "torch": "2.99.0+cpu"}, "torch 2.99.0+cpu is a build without CUDA"),
        ({"cuda": "'11.8'"}, "exists for CUDA 12 and 13, and torch 2.99.0 is built for 11.8"),
    ],
    ids=["hopper", "ampere", "t4", "blackwell", "no gpu", "cpu torch", "cuda 11"],
)
def test_dry_run_prints_the_plan_and_changes_nothing(tmp_path, machine, says):
    machine = Machine(tmp_path, **machine)
    if "no CUDA" in says:  # a real nvidia-smi further down the path must not answer
        program(tmp_path / "bin", "nvidia-smi", "exit 9")
    shutil.rmtree(machine.site / "safetensors-1.0.dist-info")
    ran = machine("--dry-run")
    assert ran.returncode == 0
    assert says in ran.stdout
    assert "packages: safetensors will be installed; what is there stays as it is" in ran.stdout
    assert ("5 to 15 minutes on" in ran.stdout) == ("will be installed" in says)
    assert machine.calls() == []
    assert not (tmp_path / "repo" / "artifacts").exists()


@needs_bash
@pytest.mark.parametrize(("version", "says"), [("2.8.0", "will be installed"), ("2.9.0", "is installed (")])
def test_a_te_that_is_too_old_is_replaced_and_a_newer_one_is_kept(tmp_path, version, says):
    machine = Machine(tmp_path)
    for name in ("transformer_engine", "transformer_engine_torch", "transformer_engine_cu13"):
        machine.add(name, version, {})
    ran = machine("--dry-run")
    assert says in ran.stdout
    assert ("leftovers are removed first" in ran.stdout) == (version == "2.8.0")


@needs_bash
def test_te_is_installed_once_for_this_torch_and_nothing_else_changes(tmp_path):
    machine = Machine(tmp_path)
    machine.add("transformer_engine_cu12", "1.0", {})  # a leftover
    shutil.rmtree(machine.site / "safetensors-1.0.dist-info")
    ran = machine(COLAB_RELEASE_TAG="release-colab")
    assert ran.returncode == 0, ran.stdout
    assert "leftovers are removed first: transformer_engine_cu12 1.0" in ran.stdout
    assert ran.stdout.strip().splitlines()[-1].startswith("Setup is done. ")
    assert "Transformer Engine 2.20.2: imported; no GPU to try it on. No restart is needed." in ran.stdout
    packages, uninstall, tools, te = machine.calls()
    assert packages.split(" CPATH")[0].endswith(" safetensors")
    assert uninstall.startswith("uninstall -y transformer_engine transformer_engine_torch transformer_engine_cu12")
    # torch brought its headers, except those that have packages of their own
    assert tools.split(" CPATH")[0].endswith(
        " setuptools wheel packaging ninja nvidia-cuda-crt==13.0.* nvidia-cuda-cccl==13.0.*"
    )
    assert " --no-build-isolation transformer_engine[pytorch,core-cu13]==2.20.2 " in te
    assert f"CPATH={machine.site}/nvidia/cu13/include:{machine.site}/nvidia/cudnn/include " in te
    assert int(te.rpartition("MAX_JOBS=")[2]) >= 1
    constraints = (tmp_path / "repo" / "artifacts" / "setup" / "constraints.txt").read_text().split()
    assert {"torch==2.99.0", "numpy==1.0", "ipywidgets==1.0"} <= set(constraints)
    assert not any(line.startswith("transformer_engine") for line in constraints)
    for options in ((), ("--force",)):
        again = machine(*options, COLAB_RELEASE_TAG="release-colab")
        assert (again.returncode, again.stdout) == (0, ran.stdout.splitlines(True)[-1])
    assert len(machine.calls()) == 4


@needs_bash
def test_when_te_does_not_build_the_workshop_carries_on(tmp_path):
    machine = Machine(tmp_path)
    ran = machine("--force", PIP_FAILS="1")
    log = tmp_path / "repo" / "artifacts" / "setup" / "pip.log"
    last = f"The workshop carries on without Transformer Engine: x.cpp:1:10: fatal error: cudnn.h: No such file or directory. Log: {log}"
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, last)
    assert "cudnn.h" in log.read_text()
    calls = len(machine.calls())
    again = machine(COLAB_RELEASE_TAG="x", PIP_FAILS="1")  # Run All again: said again, not tried again
    assert again.stdout.splitlines()[0] == last
    assert "--force" in again.stdout
    assert len(machine.calls()) == calls
    assert machine("--force").stdout.strip().endswith("No restart is needed.")


@needs_bash
def test_a_te_that_does_not_import_is_removed_again(tmp_path):
    machine = Machine(tmp_path)
    ran = machine("--force", TE_IMPORT="raise OSError('undefined symbol: _ZN3c10')")
    last = ran.stdout.splitlines()[-1]
    assert ran.returncode == 0
    assert "does not work (OSError: undefined symbol: _ZN3c10), so it was removed" in last
    assert not list(machine.site.glob("transformer_engine*"))


@needs_bash
def test_a_missing_package_without_network_is_one_line(tmp_path):
    """The real pip here: nothing answers at the index."""
    machine = Machine(tmp_path)
    shutil.rmtree(machine.site / "safetensors-1.0.dist-info")
    shutil.rmtree(machine.site / "pip")
    shutil.rmtree(machine.site / "pip-1.0.dist-info")
    pip = pytest.importorskip("pip")
    (machine.site / "pip").symlink_to(Path(pip.__file__).parent)
    ran = machine("--force")
    assert ran.returncode == 1
    assert ran.stdout.splitlines()[-1].startswith(
        "colab_setup.sh: could not install safetensors: no network (pip reached no package index)"
    )


@needs_bash
@pytest.mark.gpu
def test_on_a_gpu_the_installed_te_is_tried(tmp_path):
    shutil.copy(ROOT / "colab_setup.sh", tmp_path)
    ran = subprocess.run(
        ["bash", str(tmp_path / "colab_setup.sh"), "--force", "--python", sys.executable],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0
    assert "a forward and backward ran in BF16" in ran.stdout, ran.stdout


@needs_bash
def test_shell_scripts_parse():
    for name in ("colab_setup.sh", ".ci/run"):
        ran = subprocess.run(["bash", "-n", str(ROOT / name)], capture_output=True, text=True)
        assert (ran.returncode, ran.stderr) == (0, "")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


# ------------------------------------------------------------------------------------------------ the whole, for real


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_a_fresh_installation_runs_a_notebook(tree, tmp_path):
    """Downloads everything: an empty HOME and so an empty cache, the real requirements, one real notebook."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("JUPYTER", "PYTHON"))}
    env |= {"HOME": str(tmp_path)}
    ran = subprocess.run(
        ["make", "run", "NOTEBOOK=01"], cwd=tree, env=env, capture_output=True, text=True, timeout=1800
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-2000:]
    summary = json.loads((tree / "artifacts" / "run" / "summary.json").read_text())
    assert [(row["notebook"], row["status"]) for row in summary] == [("01_hardware_detection", "passed")]
