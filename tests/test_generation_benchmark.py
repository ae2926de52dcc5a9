"""benchmarks/generation.py on a CPU. The variants that need a GPU are run there by hand."""

import sys

import pytest

from benchmarks import generation
from helpers import checkpoints, models, precision, results


def test_wrong_tokens_and_missing_hardware_are_named_and_not_timed(cpu, tmp_path):
    fp8 = precision.choose("fp8", cpu)
    untrained = fp8.build(models.preset("laptop").config)
    checkpoints.save(tmp_path / "model.safetensors", untrained, precision.choose("fp32", cpu), 0)
    for variant, reason in (
        ("growing-torch-b1", "ValueError: 0 of 1 prompts are continued exactly"),
        ("cache-graph-b64", "a CUDA graph needs a GPU"),
    ):
        row = generation.run(variant, "laptop", tmp_path / "model.safetensors")
        assert reason in row["error"]
        assert "median_ms" not in row
        assert (row["case"], row["variant"], row["kind"]) == ("laptop", variant, "measured")


@pytest.mark.slow
def test_a_variant_is_timed_and_its_row_kept(cpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "ARTIFACTS", tmp_path)
    monkeypatch.setattr(results, "RECORDED", tmp_path / "recorded")
    monkeypatch.setattr(sys, "argv", ["generation", "--case", "laptop", "--variants", "growing-torch-b1"])
    generation.main()
    (row,) = results.read(tmp_path / "results" / cpu.slug / "generation.json")["rows"]
    assert (row["case"], row["variant"], row["exact"], row["error"]) == ("laptop", "growing-torch-b1", 1, "")
    assert len(row["samples"]) == generation.SAMPLES
    assert 0 < row["median_ms"] <= max(row["samples"])
    assert "growing-torch-b1" in capsys.readouterr().out
