"""examples/train_fp8.py as people would run it: a fresh process, from another folder, with nothing of the workshop around."""

import os
import re
import subprocess
import sys

import pytest
import torch

SMALL = ["--width", "64", "--length", "32", "--batch", "4", "--steps", "40"]


@pytest.fixture
def train(root, tmp_path):
    """Runs a copy of the example; returns the process, its losses by step and its last line."""
    script = tmp_path / "train_fp8.py"
    script.write_text((root / "examples" / "train_fp8.py").read_text())
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or "site" in v} | {"OMP_NUM_THREADS": "1"}

    def run(*arguments, ranks=1):
        launch = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *launch, str(script), *SMALL, *arguments]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        losses = {int(s): float(loss) for s, loss in re.findall(r"step +(\d+) +loss ([\d.]+)", ran.stdout)}
        return ran, losses, ran.stdout.rstrip("\n").rsplit("\n", 1)[-1]

    return run


def test_it_is_short_and_stands_alone(root):
    text = (root / "examples" / "train_fp8.py").read_text()
    assert len(text.splitlines()) <= 150
    assert "helpers" not in text


def test_it_learns_and_generates(train):
    ran, losses, text = train()
    assert ran.returncode == 0, ran.stderr
    assert list(losses) == [20, 40]
    assert losses[40] < losses[20] < 4.56  # ln 96: knowing nothing
    assert len(text) >= 16


def test_a_resumed_run_is_the_uninterrupted_one_and_another_is_refused(train, tmp_path):
    _, whole, generated = train("--checkpoint", "whole.safetensors")
    train("--checkpoint", "parts.safetensors", "--steps", "20")
    ran, resumed, generated_again = train("--checkpoint", "parts.safetensors")
    assert ran.returncode == 0, ran.stderr
    assert resumed == {40: whole[40]}
    assert generated_again == generated
    assert sorted(p.name for p in tmp_path.glob("*.safetensors*")) == ["parts.safetensors", "whole.safetensors"]
    ran, losses, _ = train("--checkpoint", "whole.safetensors", "--heads", "2")
    assert ran.returncode == 1
    assert losses == {}
    assert "'heads': 4" in ran.stderr
    assert "'heads': 2" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_two_ranks_train_as_one(train):
    _, alone, _ = train()
    ran, together, _ = train("--batch", "2", ranks=2)  # the same batch, halved
    assert ran.returncode == 0, ran.stderr
    assert together == pytest.approx(alone, abs=0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fp8_without_a_gpu_says_so(train):
    ran, _, _ = train("--precision", "delayed")
    assert ran.returncode == 1
    assert ran.stderr.strip() == "--precision delayed needs a GPU of compute capability 8.9 or higher; use bf16"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "delayed", "current", "block"])
def test_on_a_gpu(train, precision):
    arguments = ["--precision", precision, "--width", "256", "--batch", "16"]
    ran, whole, _ = train(*arguments, "--steps", "60")
    assert ran.returncode == 0, ran.stderr
    assert whole[60] < whole[20]
    train(*arguments, "--checkpoint", "run.safetensors", "--steps", "40")
    _, resumed, _ = train(*arguments, "--checkpoint", "run.safetensors", "--steps", "60")
    assert resumed[60] == pytest.approx(whole[60], abs=1e-2)
