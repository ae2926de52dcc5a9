"""The verdict on machines we do not have: stand-ins that really raise, abort, hang, or say what was reported."""

import importlib.util
import operator
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes import GPU, NEWEST, PIP, PYTHON, REBUILD, REMOVE, SETUP, TE, WHO, Workshop, broken_te, installed

from helpers import probe


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("Wörkshop with spaces") / "w")


def only_advice(report: dict) -> tuple[str, str]:
    assert len(report["advice"]) == 1, report["advice"]
    return report["advice"][0]["problem"], report["advice"][0]["fix"]


# ------------------------------------------------------------------------------------------------ importing TE

HUNG_S = "8"  # the stand-ins need a tenth of a second, on a busy machine more
NO_FILE = "cannot open shared object file: No such file or directory"
BROKEN = {  # what the import does: (what the report says, a word of the advice, the fix)
    f"raise ImportError('libcublas.so.12: {NO_FILE}')": ("ImportError: libcublas.so.12", "TE issue 2040", SETUP),
    "import ctypes; ctypes.CDLL('libcudart.so.99')": ("OSError: libcudart.so.99", "for CUDA 13.0", SETUP),
    "raise OSError('te.so: undefined symbol: _ZN3c105ErrorC2E')": ("OSError: te.so: undefined", "another torch", REBUILD),
    "raise OSError('libtransformer_engine.so: undefined symbol: _ZN18transformer_engine9to_stringE')": (
        "OSError: libtransformer_engine.so", "Two versions", f"{REMOVE}; {REBUILD}"),
    "raise OSError('te.so: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal, version libcublasLt.so.13')": (
        "undefined symbol: cublasLt", "newer cuBLAS", f"{PIP} install --upgrade nvidia-cublas"),
    "raise FileNotFoundError('Could not find shared object file for Transformer Engine torch lib.')": (
        "FileNotFoundError: Could not find", "its PyTorch extension is not", SETUP),
    "next(iter(()))": ("StopIteration: no message", "its PyTorch extension is not", SETUP),
    "assert False, 'Could not find `transformer-engine` PyPI package.'": (
        "AssertionError: Could not find", "several installations", f"{REMOVE}; {SETUP}"),
    "raise RuntimeError('Found empty `transformer-engine` meta package installed. Install with extensions')": (
        "RuntimeError: Found empty", "several installations", f"{REMOVE}; {SETUP}"),
    "raise RuntimeError('Multiple files found: [a.so, b.so]')": (
        "RuntimeError: Multiple files", "Two versions", f"{REMOVE}; {REBUILD}"),
    "raise RuntimeError('curand shared object not found.')": (
        "RuntimeError: curand", "CUDA library", f"{PIP} install nvidia-curand"),
    "raise RuntimeError('a new way to fail')": ("RuntimeError: a new way", "damaged", f"{REMOVE}; {REBUILD}"),
    "import no_such_dependency": ("No module named 'no_such_dependency'", "needs", f"{PIP} install no_such_dependency"),
    "import os; os.abort()": ("ended the process (SIGABRT)", "compiled for another torch", REBUILD),
    "import ctypes; ctypes.string_at(0)": ("ended the process (SIGSEGV)", "compiled for another torch", REBUILD),
    "import os; os.write(2, b'  what():  bad type\\n'); os.abort()": (
        "ended the process (SIGABRT; it last said: what():  bad type)", "compiled for another torch", REBUILD),
    "raise SystemExit(3)": ("ended the process (status 3)", "compiled for another torch", REBUILD),
}  # fmt: skip


@pytest.mark.parametrize("code", BROKEN)
def test_te_that_does_not_import_is_off_and_the_gpu_stays(tmp_path, workshop, code):
    report = workshop.report(path=(GPU, broken_te(tmp_path, code)))
    reason, about, fix = BROKEN[code]
    assert reason in report["te_reason"]
    assert (report["te"], report["backend"], report["fp8"]) == (None, "torch", False)
    assert (report["gpu"], report["tier"]) == ("NVIDIA H100", "bf16")
    problem, command = only_advice(report)
    assert about in problem
    assert command == fix


@pytest.fixture(scope="module")
def hung(tmp_path_factory, workshop) -> dict:
    """The reports of what hangs, waited for all at once."""
    folder = tmp_path_factory.mktemp("hangs")
    pid = folder / "pid"
    code = f"import os, threading; open({str(pid)!r}, 'w').write(str(os.getpid())); threading.Event().wait()"
    cases = {
        "import": {"path": (GPU, broken_te(folder, code))},
        "claim": {"FAKE_TE_FAILS": {"block": "hang"}},
        "driver": {"FAKE_MACHINE": {"hangs": True}},
    }
    with ThreadPoolExecutor() as pool:
        reports = pool.map(lambda case: workshop.report("--fresh", HUNG_S, **case), cases.values())
        return dict(zip(cases, reports, strict=True)) | {"pid": int(pid.read_text())}


def test_an_import_that_hangs_is_given_up_and_killed(hung):
    report = hung["import"]
    assert report["te_reason"] == f"importing Transformer Engine took more than {HUNG_S} s"
    assert report["tier"] == "bf16"
    assert only_advice(report)[1] == f"{PYTHON} -m helpers.hardware --fresh 600"
    with pytest.raises(ProcessLookupError):
        os.kill(hung["pid"], 0)


def test_mixed_versions_are_named(tmp_path, workshop):
    """As TE finds them: by the packages' metadata."""
    code = "from importlib.metadata import version\nfound = {n: version(n) for n in ('transformer_engine', 'transformer_engine_torch')}\n"
    code += "assert len(set(found.values())) == 1, f'Transformer Engine package version mismatch. Found {found}'"
    installed(broken_te(tmp_path, code), transformer_engine="2.20.2", transformer_engine_torch="2.19.0")
    report = workshop.report(path=(GPU, tmp_path))
    assert (
        "AssertionError: Transformer Engine package version mismatch. Found {'transformer_engine': '2.20.2'"
        in report["te_reason"]
    )
    assert only_advice(report)[1] == f"{REMOVE}; {SETUP}"


def test_old_te_is_refused(tmp_path, workshop):
    report = workshop.report(path=(GPU, broken_te(tmp_path, "", version="2.8.0")))
    assert report["te_reason"] == "Transformer Engine 2.8.0 is older than 2.9; install a newer one"
    assert only_advice(report)[1] == f"{REMOVE} && {SETUP}"


def test_te_that_is_not_installed(tmp_path, workshop):
    (tmp_path / "transformer_engine.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'transformer_engine'\", name='transformer_engine')\n"
    )
    report = workshop.report(path=(GPU, tmp_path))
    assert report["te_reason"] == "Transformer Engine is not installed (No module named 'transformer_engine')"
    assert only_advice(report) == ("Transformer Engine is not installed for this Python:", SETUP)


@pytest.mark.parametrize(
    ("loaded", "torchs", "about", "fix"),
    [
        ("9.10.2", "9.10.2.21", "needs cuDNN 9.12.0; 9.10.2", f'{PIP} install "nvidia-cudnn-cu13>=9.12.0,<10"'),
        ("9.8.0", "9.19.0.56", "system's cuDNN 9.8.0, too old, before torch's 9.19.0.56", "export CUDNN_HOME="),
    ],
)
def test_cudnn_too_old(tmp_path, workshop, loaded, torchs, about, fix):
    """TE takes the system's before torch's, so a newer package does not help where the old one is the system's."""
    code = (
        f"raise RuntimeError('Transformer Engine requires cuDNN 9.12.0 or later, but the cuDNN runtime is {loaded}.')"
    )
    installed(broken_te(tmp_path, code), nvidia_cudnn_cu13=torchs)
    report = workshop.report(path=(GPU, tmp_path))
    assert f"but the cuDNN runtime is {loaded}" in report["te_reason"]
    problem, command = only_advice(report)
    assert about in problem
    assert command.startswith(fix)


# ------------------------------------------------------------------------------------------------ running layers


@pytest.mark.parametrize(
    ("name", "capability", "tier", "working", "off"),
    [
        ("Tesla T4", (7, 5), "fp32", "", {"delayed": "7.5 is below 8.0"}),
        ("NVIDIA A100-SXM4-40GB", (8, 0), "bf16", "", {"delayed": "8.9 or higher", "nvfp4": "10.0 or higher"}),
        ("NVIDIA L4", (8, 9), "fp8", "delayed current", {"block": "9.0 or higher", "mxfp8": "10.0 or higher"}),
        ("NVIDIA H100", (9, 0), "fp8", "delayed current block", {"mxfp8": "10.0 or higher", "nvfp4": "10.0 or higher"}),
        ("NVIDIA B200", (10, 0), "blackwell", "delayed current block mxfp8 nvfp4", {}),
        ("NVIDIA GeForce RTX 5090", (12, 0), "blackwell", "delayed current block nvfp4", {"mxfp8": "not supported on 12.0"}),
    ],
)  # fmt: skip
def test_each_generation_gets_what_ran(workshop, name, capability, tier, working, off):
    report = workshop.report("--fresh", FAKE_MACHINE={"name": name, "capability": capability})
    assert (report["gpu"], report["tier"]) == (name, tier)
    assert [recipe for recipe, why in report["recipes"].items() if not why] == working.split()
    for recipe, why in off.items():
        assert why in report["recipes"][recipe]
    assert report["te"] == ("2.20.2" if tier != "fp32" else None)
    assert report["advice"] == []  # what a GPU does not have cannot be mended


def test_nvfp4_that_is_claimed_and_fails_on_a_5090(workshop):
    """TE issue 2956. The failed kernel spoils its process, so the others are proven in another."""
    report = workshop.report(
        "--fresh",
        FAKE_MACHINE={"name": "NVIDIA GeForce RTX 5090", "capability": [12, 0]},
        FAKE_TE_FAILS={"nvfp4": "row_cast.cu:1200 in function row_col_rht: CUDA Error: invalid argument"},
    )
    assert report["tier"] == "fp8"
    assert "claimed by TE, but a test layer failed: RuntimeError: row_cast.cu:1200" in report["recipes"]["nvfp4"]
    problem, fix = only_advice(report)
    assert "offers nvfp4 here" in problem
    assert fix == NEWEST


@pytest.mark.parametrize(
    ("failure", "said"), [("boom", "failed: RuntimeError: boom"), ("abort", "ended the process (SIGABRT)")]
)
def test_a_claim_that_fails_leaves_the_others_their_chance(workshop, failure, said):
    report = workshop.report("--fresh", FAKE_TE_FAILS={"delayed": failure, "block": failure})
    assert report["recipes"]["delayed"] == report["recipes"]["block"] == f"claimed by TE, but a test layer {said}"
    assert report["recipes"]["current"] == ""
    assert report["tier"] == "bf16"  # what the notebooks teach first is delayed scaling
    assert "offers delayed, block here" in only_advice(report)[0]


def test_a_claim_that_hangs(hung):
    report = hung["claim"]
    assert report["recipes"]["block"] == f"claimed by TE, but a test layer took more than {HUNG_S} s"
    assert (report["recipes"]["delayed"], report["tier"]) == ("", "fp8")


@pytest.mark.parametrize(
    ("failure", "about", "fix"),
    [
        ("CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH", "two installations", "export CUDNN_HOME="),
        ("CUDA Error: no kernel image is available for execution on the device", "damaged", f"{REMOVE}; {REBUILD}"),
        ("abort", "crashes", REBUILD),
    ],
)
def test_te_that_imports_and_does_not_run(workshop, failure, about, fix):
    report = workshop.report("--fresh", FAKE_TE_FAILS={"bf16": failure})
    assert report["te_reason"].startswith("Transformer Engine 2.20.2 imports, but does not run in BF16:")
    assert (report["te"], report["tier"]) == (None, "bf16")
    problem, command = only_advice(report)
    assert about in problem
    assert command.startswith(fix)


@pytest.mark.parametrize(
    ("failure", "fix"),
    [
        ("Unable to find suitable cuBLAS GEMM algorithm", f"{PIP} install --upgrade nvidia-cublas"),
        ("CUDA Error: no kernel image is available for execution on the device", f"{REMOVE}; {REBUILD}"),
    ],
)
def test_advice_for_a_recipe_that_fails(workshop, failure, fix):
    report = workshop.report("--fresh", FAKE_TE_FAILS={"current": failure})
    assert only_advice(report)[1] == fix


def test_block_scaling_wants_a_newer_cuda(workshop):
    report = workshop.report("--fresh", FAKE_MACHINE={"cuda": "12.8", "torch": "2.10.0+cu128"})
    assert (
        report["recipes"]["block"]
        == "FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9."
    )
    assert only_advice(report)[1] == f"{PIP} install --upgrade torch && {SETUP}"


def test_a_stray_variable(workshop):
    harmless = workshop.report("--fresh", NVTE_FUSED_ATTN="0")
    assert harmless["tier"] == "fp8"
    assert only_advice(harmless)[1] == "unset NVTE_FUSED_ATTN"
    harmful = workshop.report("--fresh", NVTE_BACKWARD_OVERRIDE="banana")
    assert "NVTE_BACKWARD_OVERRIDE must be unset" in harmful["recipes"]["delayed"]
    assert harmful["tier"] == "bf16"
    assert harmful["advice"][0]["fix"] == "unset NVTE_BACKWARD_OVERRIDE"  # first: it is the cause


# ------------------------------------------------------------------------------------------------ the GPU

TAKEN = {  # the first computation fails: (what the report says, a word of the advice)
    ("RuntimeError", "CUDA error: CUDA-capable device(s) is/are busy or unavailable"): "compute mode allows one",
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 15.77 GiB of which 3.38 MiB "
     "is free. Process 4711 has 15.76 GiB memory in use."): "nearly all of the GPU's memory",
    ("RuntimeError", "CUDA error: out of memory"): "nearly all of the GPU's memory",
}  # fmt: skip


@pytest.mark.parametrize("error", TAKEN, ids=operator.itemgetter(1))
def test_a_gpu_taken_by_another_process(workshop, error):
    taken = workshop.report("--fresh", FAKE_MACHINE={"error": error})
    assert (taken["device"], taken["tier"]) == ("cpu", "cpu")
    assert error[1][:60] in taken["device_reason"]
    problem, fix = only_advice(taken)
    assert TAKEN[error] in problem
    assert fix == WHO
    # That passes: it is not kept, and the next look finds the GPU.
    assert workshop.report()["tier"] == "fp8"


def test_memory_that_suffices_for_a_number_and_not_for_a_layer(workshop):
    report = workshop.report("--fresh", FAKE_TE_FAILS={"delayed": "CUDA out of memory. Tried to allocate 32.00 MiB."})
    assert only_advice(report)[1] == WHO
    assert workshop.report()["recipes"]["delayed"] == ""


OLD = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version {}). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: https://pytorch.org to "
    "install a PyTorch version that has been compiled with your version of the CUDA driver. (Triggered internally at CUDAFunctions.cpp:109.)"
)
UNEXPECTED = (
    "CUDA initialization: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() "
    "that might have already set an error? Error {} (Triggered internally at CUDAFunctions.cpp:109.)"
)
NO_GPU = {  # torch's warning: (the reason, a word of the advice, the fix)
    OLD.format(12020): ("too old (found version 12020).", "needs driver 580", f'{PIP} install "torch==2.10.*" && {SETUP}'),
    OLD.format(11040): ("too old (found version 11040).", "needs driver 580", "sudo apt-get install nvidia-driver-580 && sudo reboot"),
    "CUDA initialization: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
    "http://www.nvidia.com/Download/index.aspx": ("Found no NVIDIA driver on your system.", "--gpus all", "nvidia-smi"),
    UNEXPECTED.format("802: system not yet initialized"): (
        "Error 802: system not yet initialized", "Fabric Manager", "sudo systemctl restart nvidia-fabricmanager"),
    UNEXPECTED.format("803: system has unsupported display driver / cuda driver combination"): (
        "Error 803", "update without a restart", "sudo reboot"),
    "CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable "
    "CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero.": (
        "CUDA unknown error", "update without a restart", "sudo reboot"),
}  # fmt: skip


@pytest.mark.parametrize("warning", NO_GPU, ids=lambda warning: re.sub(r"\W+", "-", warning)[21:60])
def test_no_gpu_and_torch_says_why(workshop, warning):
    reason, about, fix = NO_GPU[warning]
    report = workshop.report("--fresh", FAKE_MACHINE={"warning": warning})
    assert reason in report["device_reason"]
    assert "Triggered" not in report["device_reason"]
    assert (report["device"], report["tier"], report["te"]) == ("cpu", "cpu", None)
    problem, command = only_advice(report)
    assert about in problem
    assert command == fix
    # What a restart mends leaves no trace in any version, so it is not kept.
    kept = workshop.report()["device_reason"] == report["device_reason"]
    assert kept == (fix not in ("sudo reboot", "sudo systemctl restart nvidia-fabricmanager"))


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_variable_that_hides_the_gpu(workshop, hidden):
    report = workshop.report(CUDA_VISIBLE_DEVICES=hidden)
    assert report["device_reason"] == f"CUDA_VISIBLE_DEVICES={hidden!r} hides it"
    assert report["te_reason"] == "Transformer Engine 2.20.2 needs a GPU"
    assert report["recipes"]["delayed"] == f"no GPU: {report['device_reason']}"
    assert only_advice(report)[1] == "unset CUDA_VISIBLE_DEVICES"


def test_a_gpu_too_new_or_too_old_for_this_torch(workshop):
    error = [
        "RuntimeError",
        "CUDA error: no kernel image is available for execution on the device\nCompile with TORCH_USE_CUDA_DSA",
    ]
    report = workshop.report("--fresh", FAKE_MACHINE={"error": error})
    assert report["device_reason"] == (
        "NVIDIA H100 (9.0): CUDA error: no kernel image is available for execution on the device"
    )
    assert only_advice(report)[1] == f"{PIP} install --upgrade torch && {SETUP}"
    old = {"name": "Tesla P100-PCIE-16GB", "capability": [6, 0], "error": error}
    assert only_advice(workshop.report("--fresh", FAKE_MACHINE=old))[1] == f'{PIP} install "torch==2.7.*"'


def test_a_driver_that_hangs(hung):
    report = hung["driver"]
    assert report["device_reason"] == f"asking torch for a GPU took more than {HUNG_S} s"
    assert (report["tier"], only_advice(report)[1]) == ("cpu", "sudo reboot")


def test_a_t4_has_other_worries_than_a_broken_te(tmp_path, workshop):
    te = broken_te(tmp_path, "import os; os.abort()")
    report = workshop.report(path=(GPU, te), FAKE_MACHINE={"name": "Tesla T4", "capability": [7, 5]})
    assert (report["tier"], report["advice"]) == ("fp32", [])
    assert "compute capability 7.5 is below 8.0" in report["te_reason"]


def test_torch_that_does_not_import_is_one_line(tmp_path, workshop):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    ran = workshop.python("-m", "helpers.hardware", path=(tmp_path,))
    assert ran.returncode == 1
    assert ran.stderr.splitlines() == [
        "hardware: torch does not import here: importing torch ended the process (status 1; it last said: "
        "ImportError: libcudart.so.13: cannot open shared object file)"
    ]


# ------------------------------------------------------------------------------------------------ the stand-ins themselves


def load(path: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stand_in_for_torch_has_nothing_that_torch_has_not():
    import torch

    fake = load(GPU / "torch" / "__init__.py", "fake_torch")
    names = "bfloat16 ones isfinite OutOfMemoryError version.cuda cuda.is_available cuda.get_device_properties cuda.synchronize "
    names += "cuda.get_device_capability backends.cudnn.version _dynamo.config.recompile_limit "
    names += "Tensor.chunk Tensor.reshape Tensor.contiguous Tensor.sum Tensor.item Tensor.all Tensor.backward"
    for name in names.split():
        operator.attrgetter(name)(fake)
        operator.attrgetter(name)(torch)


@pytest.mark.gpu
def test_the_stand_in_for_te_answers_as_te_does_on_this_gpu(monkeypatch):
    import torch
    import transformer_engine.pytorch as te

    fakes = [name for name in sys.modules if name.startswith("transformer_engine")]
    real = {name: getattr(te, answer)(return_reason=True) for name, (answer, _) in probe.RECIPES.items()}
    layers = [hasattr(te, name) for name in ("Linear", "LayerNormLinear", "DotProductAttention", "autocast")]
    for name in fakes:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(TE)
    fake = load(TE / "transformer_engine" / "pytorch" / "__init__.py", "fake_te")
    assert all(layers)
    assert fake.torch is torch
    assert {name: getattr(fake, answer)(return_reason=True) for name, (answer, _) in probe.RECIPES.items()} == real
