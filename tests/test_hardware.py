"""The decision table, what the notebooks get in their own process, tiers, and the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import GPU, Workshop, broken_te

from helpers import hardware
from helpers.advice import Advice

ROOT = Path(__file__).resolve().parent.parent
WORKS = dict.fromkeys(hardware.RECIPES, "")
ONLY_FP8 = WORKS | {"mxfp8": "needs 10.0", "nvfp4": "needs 10.0"}
NONE = dict.fromkeys(hardware.RECIPES, "off")


def fresh(*arguments, **environment):
    """Runs this checkout in a fresh process, with the real torch."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("WORKSHOP_")} | environment
    env["PYTHONPATH"] = str(ROOT)
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, cwd=ROOT, timeout=120)


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


# ------------------------------------------------------------------------------------------------ in a notebook's process


@pytest.fixture
def workshop(tmp_path) -> Workshop:
    return Workshop(tmp_path / "workshop")


LOOK = """
import json, sys
from helpers import hardware
{before}
hw = hardware.detect()
loaded = "transformer_engine.pytorch" in sys.modules
te, why = hardware.import_te()
limit = sys.modules["torch"]._dynamo.config.recompile_limit if "torch" in sys.modules else None
print(json.dumps([hw.te, hw.te_reason, hw.fp8, [a.fix for a in hw.advice], loaded, te is not None, why, limit]))
"""


def look(workshop, before="", **options):
    ran = workshop.python("-c", LOOK.format(before=before), **options)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_te_that_works_is_imported_at_once_and_may_compile(workshop):
    """At once: it has to come before anything that touches cuDNN. The verdict is read, or decided, all the same."""
    for _ in range(2):
        assert look(workshop) == ["2.20.2", "", True, [], True, True, "2.20.2", 64]


def test_te_that_crashes_is_never_imported_here(tmp_path, workshop):
    te, why, fp8, _, loaded, got, said, _ = look(workshop, path=(GPU, broken_te(tmp_path, "import os; os.abort()")))
    assert (te, fp8, loaded, got) == (None, False, False, False)
    assert why == said == "importing Transformer Engine ended the process (SIGABRT)"


def test_torch_installed_while_the_kernel_runs(workshop):
    """pip replaced it on disk; this process still has the old one, which TE must not be loaded into."""
    te, why, fp8, fixes, loaded, got, said, _ = look(workshop, before="import torch; torch.__version__ = '2.9.0+cu128'")
    assert (te, fp8, loaded, got) == (None, False, False, False)
    assert why == said == "torch 2.11.0+cu130 was installed while this process runs 2.9.0+cu128: restart the kernel"
    assert fixes == ["Kernel > Restart Kernel"]


def test_te_that_works_elsewhere_and_not_here(workshop):
    """As when something else has loaded another cuDNN into this process."""
    before = "sys.modules['transformer_engine.common'] = None"
    te, why, fp8, fixes, _, got, said, _ = look(workshop, before=before)
    assert (te, fp8, got) == (None, False, False)
    assert why == said
    assert why.endswith("In a fresh process it works: restart the kernel")
    assert fixes == ["Kernel > Restart Kernel"]


def test_the_command_line_imports_neither_torch_nor_te(workshop):
    """Only the probing process does: the report of a kept verdict comes in milliseconds."""
    code = "import sys; from helpers import hardware; sys.argv[1:] = []; hardware.main(); print({'torch', 'transformer_engine'} & set(sys.modules))"
    for _ in range(2):
        assert workshop.python("-c", code).stdout.endswith("\nset()\n")


# ------------------------------------------------------------------------------------------------ the command line


def test_report_and_json_agree():
    text, data = fresh("-m", "helpers.hardware"), fresh("-m", "helpers.hardware", "--json")
    report = json.loads(data.stdout)
    assert report["mode"] == text.stdout.splitlines()[0]
    assert report["torch"] in text.stdout
    assert set(report["recipes"]) == {"delayed", "current", "block", "mxfp8", "nvfp4"}
    assert text.stderr == data.stderr == ""


def test_the_report_says_first_what_to_do(tmp_path, workshop):
    te = broken_te(tmp_path, "raise OSError('undefined symbol: _ZN3c10 <b>')")
    ran = workshop.python("-m", "helpers.hardware", path=(GPU, te))
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("tier bf16 | TE OFF (")
    assert lines[1].startswith("To fix, most useful first")
    assert "compiled for another torch" in lines[2]
    assert "pip cache remove" in lines[3]
    assert lines[4].split() == ["tier", "bf16"]
    assert sum("undefined symbol" in line for line in lines) == 2  # not again for each recipe
    assert "delayed, current, block, mxfp8, nvfp4: they need Transformer Engine" in ran.stdout
    html = workshop.python(
        "-c", "from helpers import hardware; print(hardware.detect()._repr_html_())", path=(GPU, te)
    ).stdout
    assert "<ol><li>Transformer Engine was compiled for another torch" in html
    assert "<code>" in html
    assert "<b>)" not in html


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


@pytest.mark.parametrize("wrong", ["--yaml", "--fresh=soon"])
def test_wrong_argument_is_refused(wrong):
    run = fresh("-m", "helpers.hardware", wrong)
    assert run.returncode == 2
    assert wrong.split("=")[-1] in run.stderr


# ------------------------------------------------------------------------------------------------ tiers


@pytest.mark.parametrize(
    ("tier", "gpu", "te", "working"),
    [
        ("cpu", None, None, []),
        ("fp32", "NVIDIA B200", None, []),
        ("bf16", "NVIDIA B200", "2.20.2", []),
        ("fp8", "NVIDIA B200", "2.20.2", ["delayed", "current", "block"]),
        ("blackwell", "NVIDIA B200", "2.20.2", list(hardware.RECIPES)),
    ],
)
def test_a_b200_shows_every_tier(workshop, tier, gpu, te, working):
    report = workshop.report(WORKSHOP_TIER=tier, FAKE_MACHINE={"name": "NVIDIA B200", "capability": [10, 0]})
    assert (report["tier"], report["machine_tier"]) == (tier, "blackwell")
    assert (report["gpu"], report["te"]) == (gpu, te)
    assert report["device"] == ("cpu" if tier == "cpu" else "cuda")
    assert report["preset"] == ("laptop" if tier == "cpu" else "compact")
    assert [name for name, why in report["recipes"].items() if why == ""] == working
    assert all(why in ("", f"WORKSHOP_TIER={tier}") for why in report["recipes"].values())


def test_results_of_a_lower_tier_lie_apart(monkeypatch):
    facts = machine() | {"gpu": "NVIDIA H200"}
    folders = {}
    for tier in ("cpu", "fp32", "bf16", "fp8"):
        monkeypatch.setenv("WORKSHOP_TIER", tier)
        folders[tier] = hardware.as_hardware(facts).slug
    assert folders == {"cpu": "cpu", "fp32": "nvidia-h200-as-fp32", "bf16": "nvidia-h200-as-bf16", "fp8": "nvidia-h200"}


def test_a_tier_above_the_machine_is_refused(workshop):
    ran = workshop.python("-m", "helpers.hardware", WORKSHOP_TIER="blackwell")
    assert ran.returncode == 1
    assert (
        ran.stderr
        == "hardware: WORKSHOP_TIER='blackwell' is above this machine (fp8); it can show cpu, fp32, bf16, fp8\n"
    )


def machine(capability=(9, 0), te="2.20.2", recipes=ONLY_FP8, advice=()):
    """The facts of a machine we do not have."""
    return {
        "device": "cuda", "device_reason": "", "gpu": "NVIDIA H100", "capability": capability, "memory_gb": 80.0, "driver": "580",
        "cuda": "13.0", "cudnn": "9.19.0", "torch": "2.11.0", "python": "3.12", "te": te, "te_reason": "", "recipes": recipes,
        "advice": advice, "decided": "2026-12-01T00:00:00+00:00",
    }  # fmt: skip


def test_card_carries_tier_and_fp8_for_the_runner():
    hw = hardware.Hardware(tier="fp8", machine_tier="fp8", preset="compact", **machine())
    bundle = hw.card("real", "all <b> below")._repr_mimebundle_()
    assert bundle[hardware.CARD_MIME] == {"tier": "fp8", "fp8": "real"}
    assert "REAL" in bundle["text/html"]
    assert "&lt;b&gt;" in bundle["text/html"]
    assert "helpers.hardware" not in bundle["text/html"]
    with pytest.raises(ValueError, match="real, emulated, recorded, off"):
        hw.card("imagined")


def test_card_points_to_the_report_if_something_can_be_mended():
    hw = hardware.Hardware(tier="fp8", machine_tier="fp8", preset="compact", **machine(advice=(Advice("x:", "y"),)))
    bundle = hw.card("real")._repr_mimebundle_()
    assert "python -m helpers.hardware" in bundle["text/html"]
    assert "python -m helpers.hardware" in bundle["text/plain"]


def test_bf16_is_decided_by_capability_not_by_torch():
    t4 = hardware.Hardware(tier="fp32", machine_tier="fp32", preset="compact", **machine((7, 5), None, NONE))
    assert not t4.bf16
    assert t4.backend == "torch"


# ------------------------------------------------------------------------------------------------ on a Hopper GPU


@pytest.fixture
def hopper():
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a test of what a Hopper GPU does")


@pytest.mark.gpu
def test_hopper_runs_fp8_and_says_why_not_the_rest(hopper, tmp_path):
    """Decided by real processes, in a workshop of its own."""
    report = Workshop(tmp_path / "workshop").report(path=(), timeout=600)
    assert (report["tier"], report["te_reason"], report["device"]) == ("fp8", "", "cuda")
    assert [report["recipes"][name] for name in ("delayed", "current", "block")] == ["", "", ""]
    assert report["recipes"]["mxfp8"] == "Device compute capability 10.0 or higher required for MXFP8 execution."
    assert report["recipes"]["nvfp4"] == "Device compute capability 10.0 or higher required for NVFP4 execution."
    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    assert report["driver"] in subprocess.run(smi, capture_output=True, text=True, check=True).stdout
    assert report["advice"] == []


@pytest.mark.gpu
def test_a_second_process_reads_the_kept_verdict(hopper, tmp_path):
    workshop = Workshop(tmp_path / "workshop")
    first = workshop.report(path=(), timeout=600)
    written = workshop.file.stat().st_mtime_ns
    code = "from helpers import hardware; hw = hardware.detect(); te, version = hardware.import_te(); "
    code += "print(hw.decided, version, hw.fp8, te.Linear(16, 16, device='cuda').weight.shape[0])"
    ran = workshop.python("-c", code, path=(), timeout=600)
    assert ran.stdout.split() == [first["decided"], first["te"], "True", "16"], ran.stderr
    assert workshop.file.stat().st_mtime_ns == written


@pytest.mark.gpu
def test_an_empty_cuda_visible_devices_on_a_gpu_machine(tmp_path):
    report = Workshop(tmp_path / "workshop").report(path=(), CUDA_VISIBLE_DEVICES="", timeout=600)
    assert report["tier"] == "cpu"
    assert [entry["fix"] for entry in report["advice"]] == ["unset CUDA_VISIBLE_DEVICES"]
