"""Tables in README come from results files; the collector takes only whole runs with provenance."""

import json
import sys
from dataclasses import replace

import pytest

from helpers import report, results

sys.path.insert(0, str(results.ROOT / "tools"))
import collect_results

MARKED = "before\n<!-- results: training -->\nold\n<!-- /results -->\nafter\n"


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ARTIFACTS", tmp_path / "artifacts")
    monkeypatch.setattr(results, "RECORDED", tmp_path / "results")
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    report.README.write_text(MARKED)
    return tmp_path


@pytest.fixture
def h200(cpu):
    return replace(cpu, gpu="NVIDIA H200", te="2.20.2", driver="580")


def run_on_gpu(folders, h200, status="passed", exact=64):
    """What a run on a GPU machine leaves under artifacts/."""
    rows = [{"precision": "BF16", "final_loss": 0.0231, "exact": exact, "kind": "measured"}]
    results.save("04_training", h200, rows, "one run", command="notebook 04")
    run = folders / "artifacts" / "run"
    run.mkdir(exist_ok=True)
    (run / "04_training.ipynb").write_text("{}")
    (run / "summary.json").write_text(
        json.dumps([{"notebook": "04_training", "status": status, "seconds": 3.2, "tier": "fp8", "fp8": "real"}])
    )


def test_results_become_a_table_and_drift_is_seen(folders, h200):
    run_on_gpu(folders, h200)
    collect_results.collect(folders / "artifacts")
    assert report.drifted() == ["training"]
    report.render()
    text = report.README.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| BF16 | 0.023 | 64 of 64 |" in text
    assert "RECORDED on one NVIDIA H200" in text
    assert report.drifted() == []
    report.README.write_text(text.replace("0.023", "0.021"))
    assert report.drifted() == ["training"]


def test_an_unknown_table_is_refused(folders):
    report.README.write_text(MARKED.replace("training", "weather"))
    with pytest.raises(ValueError, match="'weather' that is not known; there are runs, training, benchmark"):
        report.drifted()


def test_collect_takes_notebooks_and_summary_and_fills_in_the_commit(folders, h200):
    run_on_gpu(folders, h200)
    path = folders / "artifacts" / "results" / "nvidia-h200" / "04_training.json"
    content = json.loads(path.read_text()) | {"commit": None, "dirty": None}
    path.write_text(json.dumps(content))
    written = {p.name for p in collect_results.collect(folders / "artifacts")}
    assert written == {"04_training.json", "04_training.ipynb", "summary.json"}
    collected = results.read(folders / "results" / "nvidia-h200" / "04_training.json")
    assert collected["commit"] == results.git("rev-parse", "HEAD")


def test_a_failed_run_is_not_recorded(folders, h200):
    run_on_gpu(folders, h200, status="failed")
    with pytest.raises(ValueError, match="04_training failed; only a whole run is recorded"):
        collect_results.collect(folders / "artifacts")


def test_nothing_to_collect_says_what_to_do(folders):
    with pytest.raises(ValueError, match=r"it holds none. Run `make run` on a GPU machine first"):
        collect_results.collect(folders / "artifacts")


def test_a_huge_notebook_is_refused(folders, h200):
    run_on_gpu(folders, h200)
    (folders / "artifacts" / "run" / "04_training.ipynb").write_text("x" * 1_100_000)
    with pytest.raises(ValueError, match=r"1.1 MB; at most 1 MB"):
        collect_results.collect(folders / "artifacts")


def test_readme_quotes_what_the_results_files_say():
    assert report.drifted() == [], "run `python -m helpers.report`"
