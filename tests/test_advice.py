"""From a symptom to one command: the cases that need no process. The others are in tests/test_probe.py."""

import subprocess
import sys
from pathlib import Path

import pytest
from fakes import PIP, PYTHON, SETUP

from helpers import advice, probe
from helpers.advice import Advice, advise


def facts(device_reason="", te_reason="", capability=(9, 0), cuda="13.0", **recipes) -> dict:
    return {
        "device_reason": device_reason, "te_reason": te_reason, "te": None if te_reason or device_reason else "2.20.2",
        "capability": capability, "cuda": cuda, "torch": "2.11.0+cu130", "recipes": dict.fromkeys(probe.RECIPES, "") | recipes,
    }  # fmt: skip


def here(driver="580.95.05", platform="linux", variables=(), **packages) -> dict:
    return {
        "driver": driver,
        "platform": platform,
        "variables": dict(variables),
        "packages": {name: [version, 0] for name, version in packages.items()},
    }


NO_CUDA = "this torch (2.13.0+cpu) was built without CUDA"


def test_nothing_to_mend_gets_no_advice():
    assert advise(facts(), here()) == []
    assert advise(facts(te_reason="compute capability 7.5 is below 8.0, which Transformer Engine needs"), here()) == []
    assert advise(facts(capability=(8, 6), delayed="Device compute capability 8.9 or higher required"), here()) == []
    assert advise(facts(device_reason="torch finds no NVIDIA GPU"), here(driver=None)) == []


def test_a_cpu_build_of_torch_matters_only_where_a_gpu_is():
    assert advise(facts(device_reason=NO_CUDA), here(driver=None)) == []
    (found,) = advise(facts(device_reason=NO_CUDA), here())
    assert (
        found.fix
        == f"{advice.python()} -m pip uninstall -y torch && {advice.python()} -m pip install torch && {advice.commands(None, {})['setup']}"
    )


def test_te_is_for_linux():
    missing = facts(te_reason="Transformer Engine is not installed (No module named 'transformer_engine')")
    assert [entry.fix for entry in advise(missing, here(platform="win32"))] == ["wsl --install"]
    assert advise(missing, here(platform="darwin")) == []
    assert len(advise(missing, here())) == 1


def test_variables_that_matter_only_while_te_is_compiled_are_not_strays():
    build = {"NVTE_FRAMEWORK": "pytorch", "NVTE_CUDA_ARCHS": "90", "NVTE_BUILD_MAX_JOBS": "2"}
    assert advise(facts(), here(variables=build)) == []
    (found,) = advise(facts(), here(variables=build | {"NVTE_TORCH_COMPILE": "0", "NVTE_FLASH_ATTN": "0"}))
    assert found.fix == "unset NVTE_TORCH_COMPILE NVTE_FLASH_ATTN"
    assert "NVTE_TORCH_COMPILE=0" in found.problem


def test_a_stray_variable_comes_first_only_if_something_fails():
    strays = {"NVTE_FLASH_ATTN": "0"}
    nvfp4 = "claimed by TE, but a test layer failed: RuntimeError: boom"
    newer_cuda = "FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9."
    failing = advise(facts(nvfp4=nvfp4), here(variables=strays))
    assert [entry.fix.split()[0] for entry in failing] == ["unset", *advice.python().split()]
    working = advise(facts(cuda="12.8", block=newer_cuda), here(variables=strays))
    assert [entry.fix.split()[0] for entry in working] == [*advice.python().split(), "unset"]


def test_one_advice_for_each_cause_and_the_gpu_before_all():
    crash, taken = (
        f"claimed by TE, but a test layer failed: {why}"
        for why in ("RuntimeError: boom", "OutOfMemoryError: CUDA out of memory.")
    )
    found = advise(facts(block=crash, mxfp8=crash, nvfp4=taken), here())
    assert [entry.problem.split()[0] for entry in found] == ["Other", "Transformer"]
    assert "offers block, mxfp8 here" in found[1].problem
    no_gpu = facts(
        device_reason="Found no NVIDIA driver on your system.",
        te_reason="Transformer Engine does not import: OSError: x",
    )
    assert [entry.fix for entry in advise(no_gpu, here())] == ["nvidia-smi"]


def test_packages_are_named_for_torchs_cuda():
    old = "Transformer Engine does not import: RuntimeError: Transformer Engine requires cuDNN 9.12.0 or later, but the cuDNN runtime is 9.10.2."
    (found,) = advise(facts(te_reason=old, cuda="12.8"), here(nvidia_cudnn_cu12="9.10.2.21"))
    assert found.fix.endswith('install "nvidia-cudnn-cu12>=9.12.0,<10"')
    symbol = "OSError: x.so: undefined symbol: cublasLtMatmulX, version libcublasLt.so.12"
    (found,) = advise(facts(te_reason=symbol, cuda="12.8"), here())
    assert found.fix.endswith("install --upgrade nvidia-cublas-cu12")


@pytest.mark.parametrize("rules", [advice.GPU, advice.TE, advice.RECIPE], ids=["GPU", "TE", "RECIPE"])
def test_every_rule_makes_one_sentence_and_one_line(rules):
    names = advice.commands("13.0", {}) | {
        "python": "python",
        "cuda": "13.0",
        "torch_version": "2.11.0",
        "recipes": "block",
        "module": "einops",
    }
    for _, problem, fix in rules:
        made = Advice(problem.format(**names), fix.format(**names))
        assert made.problem.endswith(":")
        assert "\n" not in made.problem + made.fix
        assert "{" not in made.problem + made.fix
        assert made.fix == made.fix.strip() != ""


def test_the_commands_are_for_the_python_that_runs(tmp_path):
    """Outside the workshop's .venv colab_setup.sh has to be told which Python; it knows these options."""
    copy = tmp_path / "helpers"
    copy.mkdir()
    (copy / "advice.py").write_bytes(Path(advice.__file__).read_bytes())
    code = "import advice; names = advice.commands('13.0', {}); print(names['setup']); print(names['pip'])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=copy, check=True)
    assert ran.stdout.splitlines() == [SETUP, PIP]
    if Path(sys.prefix) == advice.ROOT / ".venv":
        assert advice.commands("13.0", {})["setup"] == "bash colab_setup.sh --force"
        assert advice.python().startswith(".venv")
    script = (advice.ROOT / "colab_setup.sh").read_text()
    assert all(option in script for option in ("--force)", "--python)"))
    assert PYTHON in SETUP
