"""The decision table, every fallback with the exception that is really raised, and the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import hardware

ROOT = Path(__file__).resolve().parent.parent
WORKS = dict.fromkeys(hardware.RECIPES, "")
ONLY_FP8 = WORKS | {"mxfp8": "needs 10.0", "nvfp4": "needs 10.0"}
NONE = dict.fromkeys(hardware.RECIPES, "off")


def fresh(*arguments, path=None, **environment):
    """Runs Python in a fresh process, with `path` first on its module path."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("WORKSHOP_")} | environment
    env["PYTHONPATH"] = os.pathsep.join(str(p) for p in (path, ROOT) if p)
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, cwd=ROOT, timeout=120)


def fake_te(folder: Path, body: str, version="2.20.2", recipe="") -> Path:
    """A throw-away transformer_engine package whose pytorch half runs `body` when it is imported."""
    package = folder / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "common").mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (package / "pytorch" / "__init__.py").write_text(body)
    (package / "common" / "__init__.py").write_text("")
    (package / "common" / "recipe.py").write_text(recipe)
    return folder


@pytest.mark.parametrize(
    ("capability", "te", "recipes", "tier"),
    [
        (None, None, NONE, "cpu"),
        ((7, 5), None, NONE, "fp32"),  # T4
        ((8, 0), "2.20.2", NONE, "bf16"),  # A100
        ((8, 6), "2.20.2", NONE, "bf16"),  # 3090
        ((8, 9), "2.20.2", ONLY_FP8 | {"block": "needs 9.0"}, "fp8"),  # L4, 4090
        ((9, 0), "2.20.2", ONLY_FP8, "fp8"),  # H100, H200
        ((9, 0), None, NONE, "bf16"),  # H100 with a broken TE
        ((10, 0), "2.20.2", WORKS, "blackwell"),  # B200
        ((10, 0), "2.20.2", ONLY_FP8, "fp8"),  # B200 where neither new recipe ran: a claim is not enough
        ((12, 0), "2.20.2", WORKS | {"mxfp8": "not on 12.x"}, "blackwell"),  # 5090, NVFP4 ran
        ((12, 0), "2.20.2", ONLY_FP8, "fp8"),  # 5090, only FP8 ran
    ],
)
def test_tier_follows_from_what_ran(capability, te, recipes, tier):
    assert hardware.choose_tier(capability, te, recipes) == tier


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "ImportError: libcudart.so.13"),
        ("raise OSError('undefined symbol: _ZN3c10')", "OSError: undefined symbol"),
        ("import ctypes; ctypes.CDLL('libno_such_library.so.9')", "OSError: libno_such_library.so.9"),
        ("open('/no/such/_C.so')", "FileNotFoundError"),
        ("next(iter(()))", "StopIteration"),
        (
            "assert False, 'TransformerEngine package version mismatch'",
            "AssertionError: TransformerEngine package version mismatch",
        ),
        ("raise RuntimeError('cuDNN 9.12 or newer is required')", "RuntimeError: cuDNN 9.12"),
        ("import no_such_dependency", "does not import: ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("raise ImportError()", "ImportError: no message"),
    ],
)
def test_broken_te_turns_te_off_with_the_reason(tmp_path, body, expected):
    run = fresh("-m", "helpers.hardware", "--json", path=fake_te(tmp_path, body))
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["te"] is None
    assert report["backend"] == "torch"
    assert expected in report["te_reason"]
    assert not report["fp8"]


def test_old_te_is_refused(tmp_path):
    run = fresh("-m", "helpers.hardware", "--json", path=fake_te(tmp_path, "", version="2.8.0"))
    assert "2.8.0 is older than 2.9" in json.loads(run.stdout)["te_reason"]


def test_te_without_a_gpu_says_so(tmp_path):
    run = fresh("-m", "helpers.hardware", "--json", path=fake_te(tmp_path, ""), CUDA_VISIBLE_DEVICES="")
    assert "needs a GPU" in json.loads(run.stdout)["te_reason"]


def test_te_missing_is_said():
    blocked = "import sys; sys.modules['transformer_engine'] = None; from helpers.hardware import import_te; print(import_te())"
    assert "not installed" in fresh("-c", blocked).stdout


PROBES = """
def is_fp8_available(return_reason=False):
    return {answer}
"""
PROVE = "from helpers.hardware import *; import transformer_engine.pytorch as te; print(repr(prove(te, 'delayed')))"


def test_te_own_reason_is_shown(tmp_path):
    path = fake_te(tmp_path, PROBES.format(answer="False, 'Device compute capability 8.9 or higher required'"))
    assert "compute capability 8.9 or higher required" in fresh("-c", PROVE, path=path).stdout


def test_a_claim_that_crashes_is_not_believed(tmp_path):
    body = (
        PROBES.format(answer="True, ''")
        + "class Linear:\n    def __init__(self, *a, **k): raise RuntimeError('cublasLt: no algorithm')\n"
    )
    path = fake_te(tmp_path, body, recipe="class DelayedScaling: pass")
    assert (
        "claimed by TE, but a test layer failed: RuntimeError: cublasLt: no algorithm"
        in fresh("-c", PROVE, path=path).stdout
    )


def test_report_and_json_agree():
    text, data = fresh("-m", "helpers.hardware"), fresh("-m", "helpers.hardware", "--json")
    report = json.loads(data.stdout)
    assert report["mode"] == text.stdout.splitlines()[0]
    assert report["torch"] in text.stdout
    assert set(report["recipes"]) == {"delayed", "current", "block", "mxfp8", "nvfp4"}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORKSHOP_TIER": "tpu"}, "WORKSHOP_TIER='tpu' is not known; choose one of cpu, fp32, bf16, fp8, blackwell"),
        ({"WORKSHOP_PRESET": "huge"}, "WORKSHOP_PRESET='huge' is not known; choose one of laptop, compact, scale_up"),
        ({"WORKSHOP_TIER": "blackwell", "CUDA_VISIBLE_DEVICES": ""}, "is above this machine (cpu)"),
    ],
)
def test_wrong_environment_is_one_clear_line(environment, message):
    run = fresh("-m", "helpers.hardware", **environment)
    assert run.returncode == 1
    assert message in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_unknown_argument_is_refused():
    run = fresh("-m", "helpers.hardware", "--yaml")
    assert run.returncode == 1
    assert "--yaml" in run.stderr


def machine(capability=(9, 0), te="2.20.2", recipes=ONLY_FP8):
    """The facts of a machine we do not have."""
    return {
        "device": "cuda", "device_reason": "", "gpu": "NVIDIA H100", "capability": capability, "memory_gb": 80.0, "driver": "580",
        "cuda": "13.0", "cudnn": "9.19.0", "torch": "2.11.0", "python": "3.12", "te": te, "te_reason": "", "recipes": recipes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tier", "te", "device", "working"),
    [
        ("cpu", None, "cpu", []),
        ("fp32", None, "cuda", []),
        ("bf16", "2.20.2", "cuda", []),
        ("fp8", "2.20.2", "cuda", ["delayed", "current", "block"]),
    ],
)
def test_a_lower_tier_takes_away_what_it_lacks(tier, te, device, working):
    facts = machine(capability=(10, 0), recipes=WORKS)
    facts |= hardware.lower(facts, tier)
    assert (facts["te"], facts["device"]) == (te, device)
    assert [name for name, why in facts["recipes"].items() if why == ""] == working
    assert all(why in ("", f"WORKSHOP_TIER={tier}") for why in facts["recipes"].values())


def test_card_carries_tier_and_fp8_for_the_runner():
    hw = hardware.Hardware(tier="fp8", machine_tier="fp8", preset="compact", **machine())
    bundle = hw.card("real", "all <b> below")._repr_mimebundle_()
    assert bundle[hardware.CARD_MIME] == {"tier": "fp8", "fp8": "real"}
    assert "REAL" in bundle["text/html"]
    assert "&lt;b&gt;" in bundle["text/html"]
    with pytest.raises(ValueError, match="real, emulated, recorded, off"):
        hw.card("imagined")


def test_bf16_is_decided_by_capability_not_by_torch():
    t4 = hardware.Hardware(tier="fp32", machine_tier="fp32", preset="compact", **machine((7, 5), None, NONE))
    assert not t4.bf16
    assert t4.backend == "torch"
