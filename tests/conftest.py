"""Options and fixtures that the tests share.

pytest            a CPU is enough; tests marked `gpu` are skipped
pytest --gpu      runs them too; without a CUDA GPU or Transformer Engine they fail
pytest --slow     adds what takes minutes: every notebook twice in one kernel, a fresh installation
"""

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run the tests marked gpu; a missing GPU or TE makes them fail")
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")
    parser.addoption("--traces", type=Path, default=ROOT / "tests" / "data", help="folder of recorded hardware traces")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes; runs with --slow (make test-all)")


def pytest_collection_modifyitems(config, items):
    for option, reason in (("gpu", "needs a CUDA GPU with Transformer Engine"), ("slow", "takes minutes")):
        if not config.getoption(f"--{option}"):
            for item in items:
                if option in item.keywords:
                    item.add_marker(pytest.mark.skip(reason=f"{reason}: pytest --{option}"))


@functools.cache
def missing_for_gpu_tests() -> str:
    """Why the tests marked gpu cannot run here; empty where they can."""
    import torch

    if not torch.cuda.is_available():
        return f"--gpu was given, but torch {torch.__version__} finds no CUDA GPU"
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # a broken installation raises many kinds
        return f"--gpu was given, but Transformer Engine does not import: {type(error).__name__}: {error}"
    return ""


def pytest_runtest_setup(item):
    if "gpu" in item.keywords and item.config.getoption("--gpu") and (reason := missing_for_gpu_tests()):
        pytest.fail(reason, pytrace=False)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def traces(pytestconfig) -> Path:
    folder = pytestconfig.getoption("--traces")
    if not folder.is_dir():
        pytest.fail(f"--traces {folder} is not a folder", pytrace=False)
    return folder


def copy_tree(target: Path) -> Path:
    """A copy of the checkout as a user has it: no .venv, no artifacts, nothing that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ) if shutil.which("git") else None  # fmt: skip
    if listed and listed.returncode == 0:
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target / name)
    else:  # an unpacked archive
        ignored = shutil.ignore_patterns(".venv", ".git", "artifacts", "__pycache__", ".*_cache", ".ipynb_checkpoints")
        shutil.copytree(ROOT, target, ignore=ignored, dirs_exist_ok=True)
    return target


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    """One copy of the checkout for the session, at a path with a space in it: what runs there leaves this one alone."""
    return copy_tree(tmp_path_factory.mktemp("a copy of the workshop"))


@pytest.fixture
def clean_environment(monkeypatch) -> dict[str, str]:
    """The environment without what a developer's shell may add for Jupyter or Matplotlib.

    PYTHONPATH stays: a machine without a network may hold pytest itself there.
    """
    for name in list(os.environ):
        if name.startswith(("JUPYTER", "IPYTHON", "PYTEST_")) or name in ("PYTHONHOME", "MPLBACKEND"):
            monkeypatch.delenv(name)
    return dict(os.environ)


@pytest.fixture(scope="session")
def hardware():
    """This machine, as `detect` sees it."""
    from helpers.hardware import detect

    return detect()


@pytest.fixture
def cpu(monkeypatch):
    """This machine, shown as one without a GPU."""
    from helpers.hardware import detect

    monkeypatch.setenv("WORKSHOP_TIER", "cpu")
    return detect()
