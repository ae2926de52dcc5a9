"""The verdict is kept and read again, notices what changed, and no broken file or unwritable folder stops it."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes import GPU, TE, Workshop, broken_te, installed

from helpers import verdict


@pytest.fixture
def workshop(tmp_path) -> Workshop:
    return Workshop(tmp_path / "workshop")


@pytest.fixture
def log(tmp_path) -> Path:
    """Gets a line for each process that imports torch."""
    (tmp_path / "log").touch()
    return tmp_path / "log"


def lines(log: Path) -> int:
    return len(log.read_text().splitlines())


def test_the_second_look_starts_no_process(workshop, log):
    first = workshop.report(FAKE_LOG=str(log))
    assert lines(log) == 1
    kept = workshop.file.read_bytes()
    assert workshop.report(FAKE_LOG=str(log)) == first
    assert lines(log) == 1
    assert workshop.file.read_bytes() == kept
    workshop.report("--fresh", FAKE_LOG=str(log))
    assert lines(log) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"CUDA_VISIBLE_DEVICES": "1"},
        {"NVTE_FUSED_ATTN": "0"},
        {"LD_LIBRARY_PATH": "/opt/cudnn/lib"},
        {"CUDNN_HOME": "/opt/cudnn"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_another_environment_has_another_verdict(workshop, log, changed):
    workshop.report(FAKE_LOG=str(log))
    workshop.report(FAKE_LOG=str(log), **changed)
    assert lines(log) == 2
    workshop.report(FAKE_LOG=str(log))  # and the first one is kept beside it
    assert lines(log) == 2


@pytest.mark.parametrize(
    "unchanged", [{"NVTE_CUDA_INCLUDE_DIR": "/set/by/te"}, {"WORKSHOP_TIER": "bf16"}, {"HOME": "/"}], ids=str
)
def test_what_does_not_matter_does_not_matter(workshop, log, unchanged):
    workshop.report(FAKE_LOG=str(log))
    workshop.report(FAKE_LOG=str(log), **unchanged)
    assert lines(log) == 1


def test_what_pip_does_is_noticed(workshop, log, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(TE, site)
    installed(site, transformer_engine="2.20.2", nvidia_cudnn_cu13="9.19.0.56", tqdm="4.0")

    def looks(change=lambda: None) -> int:
        before = lines(log)
        change()
        workshop.report(path=(GPU, site), FAKE_LOG=str(log))
        return lines(log) - before

    def again():  # compiled anew, in the same version
        os.utime(site / "transformer_engine-2.20.2.dist-info", (1, 1))

    def edited():
        os.utime(site / "transformer_engine" / "__init__.py", (1, 1))

    def upgraded():
        (site / "nvidia_cudnn_cu13-9.19.0.56.dist-info").rename(site / "nvidia_cudnn_cu13-9.20.0.48.dist-info")

    def other():
        (site / "tqdm-4.0.dist-info").rename(site / "tqdm-5.0.dist-info")

    def removed():
        shutil.rmtree(site / "transformer_engine")

    assert [looks(), looks(), looks(again), looks(edited), looks(upgraded), looks(other)] == [1, 0, 1, 1, 1, 0]
    assert looks(removed) == 1


def test_another_cudnn_of_the_system_is_noticed(workshop, log, tmp_path):
    library = tmp_path / "cudnn" / "lib" / "libcudnn.so.9"
    library.parent.mkdir(parents=True)
    for version, looks in (("9.8.0", 1), ("9.8.0", 1), ("9.14.0", 2)):
        library.unlink(missing_ok=True)
        library.with_name(f"libcudnn.so.{version}").touch()
        library.symlink_to(f"libcudnn.so.{version}")
        workshop.report(FAKE_LOG=str(log), CUDNN_HOME=str(tmp_path / "cudnn"))
        assert lines(log) == looks


NVML = """
#include <stdlib.h>
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, getenv("FAKE_DRIVER"), size); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) { *gpu = &nvmlShutdown; return 0; }
int nvmlDeviceGetUUID(void *gpu, char *text, unsigned size) { strncpy(text, getenv("FAKE_UUID"), size); return 0; }
"""


@pytest.mark.skipif(
    not shutil.which("cc") or sys.platform != "linux" or Path("/proc/driver/nvidia").exists(),
    reason="compiles a stand-in for NVIDIA's library, for a machine without its driver",
)
def test_another_driver_and_another_gpu_are_noticed(workshop, log, tmp_path):
    source = tmp_path / "nvml.c"
    source.write_text(NVML)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", source], check=True)
    machine = {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_LOG": str(log), "FAKE_DRIVER": "580.95.05", "FAKE_UUID": "GPU-1"}
    assert workshop.report(**machine)["driver"] == "580.95.05"
    workshop.report(**machine)
    assert lines(log) == 1
    assert workshop.report(**machine | {"FAKE_DRIVER": "590.10"})["driver"] == "590.10"
    workshop.report(**machine | {"FAKE_UUID": "GPU-2"})
    assert lines(log) == 3


BROKEN = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"[1]",
    b"{}",
    b'{"state": {}}',
    b'[{"state": {}}]',
    b'[{"state": 1, "facts": 2}]',
    b"\xff\xfe\x00",
]


@pytest.mark.parametrize("content", BROKEN, ids=repr)
def test_a_broken_file_is_made_again(workshop, content):
    workshop.file.parent.mkdir()
    workshop.file.write_bytes(content)
    assert workshop.report()["tier"] == "fp8"
    assert json.loads(workshop.file.read_text())[0]["facts"]["te"] == "2.20.2"


def test_a_file_cut_short_is_made_again(workshop, log):
    workshop.report()
    whole = workshop.file.read_bytes()
    workshop.file.write_bytes(whole[: len(whole) // 2])
    workshop.report(FAKE_LOG=str(log))
    assert lines(log) == 1
    assert json.loads(workshop.file.read_text())


def test_a_place_that_cannot_be_written_costs_only_time(workshop, log):
    (workshop.folder / "artifacts").write_text("a file where the folder should be")
    for count in (1, 2):
        ran = workshop.python("-m", "helpers.hardware", FAKE_LOG=str(log))
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout.startswith("tier fp8")
        assert lines(log) == count
    (workshop.folder / "artifacts").unlink()
    workshop.file.mkdir(parents=True)  # found out only when the new file is put in its place
    assert workshop.report()["tier"] == "fp8"
    assert [path.name for path in workshop.file.parent.iterdir()] == ["hardware.json"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(workshop):
    workshop.folder.chmod(0o555)
    try:
        ran = workshop.python("-m", "helpers.hardware")
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout.startswith("tier fp8")
    finally:
        workshop.folder.chmod(0o755)


def test_processes_that_decide_at_once(workshop):
    """Each gets its own verdict, and the file is whole whoever comes last."""
    machines = [{"capability": [8, minor], "name": f"GPU {minor}"} for minor in range(6)]
    with ThreadPoolExecutor() as pool:
        ask = lambda i: workshop.report(FAKE_MACHINE=machines[i], CUDA_VISIBLE_DEVICES=str(i))["gpu"]  # noqa: E731
        assert list(pool.map(ask, range(6))) == [f"GPU {i}" for i in range(6)]
    kept = json.loads(workshop.file.read_text())
    assert kept
    assert all(entry["facts"]["gpu"] == f"GPU {entry['state']['variables']['CUDA_VISIBLE_DEVICES']}" for entry in kept)
    assert [path.name for path in workshop.file.parent.iterdir()] == ["hardware.json"]


def test_old_verdicts_are_forgotten(workshop, log):
    count = verdict.KEPT + 2
    for i in range(count):
        workshop.report(CUDA_VISIBLE_DEVICES=str(i))
    kept = [entry["state"]["variables"]["CUDA_VISIBLE_DEVICES"] for entry in json.loads(workshop.file.read_text())]
    assert kept == [str(i) for i in reversed(range(2, count))]


def test_deciding_for_another_path_keeps_nothing(workshop, tmp_path):
    """What notebook 01 does with a package that aborts."""
    crash = broken_te(tmp_path, "import os; os.abort()")
    code = (
        f"import sys; from helpers import verdict; print(verdict.decide(path=[{str(crash)!r}, *sys.path])['te_reason'])"
    )
    ran = workshop.python("-c", code)
    assert ran.stdout == "importing Transformer Engine ended the process (SIGABRT)\n", ran.stderr
    assert not workshop.file.exists()


def test_nothing_is_left_behind(workshop, tmp_path):
    """No core file, no report, no log."""
    (tmp_path / "tmp").mkdir()
    crash = broken_te(tmp_path / "te", "import ctypes; ctypes.string_at(0)")
    workshop.report(path=(GPU, crash), TMPDIR=str(tmp_path / "tmp"))
    assert list((tmp_path / "tmp").iterdir()) == []
    assert sorted(path.name for path in workshop.folder.iterdir()) == ["artifacts", "helpers"]
