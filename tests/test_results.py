import json

import pytest

from helpers import results

ROWS = [{"variant": "a", "median_ms": 1.5, "kind": "measured"}]


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ARTIFACTS", tmp_path / "artifacts")
    monkeypatch.setattr(results, "RECORDED", tmp_path / "results")
    return tmp_path


def test_saved_results_carry_their_provenance(folders, cpu):
    path = results.save("timing", cpu, ROWS, "median of 3", command="me")
    content = results.read(path)
    assert path == folders / "artifacts" / "results" / "cpu" / "timing.json"
    assert content["rows"] == ROWS
    assert content["machine"]["torch"] == cpu.torch
    assert content["method"] == "median of 3"
    assert content["created"].endswith("+00:00")
    assert [p.name for p in path.parent.iterdir()] == ["timing.json"]


def test_a_row_says_how_it_came_to_be(folders, cpu):
    with pytest.raises(ValueError, match="kind 'guessed'; choose one of measured, emulated, modelled"):
        results.save("timing", cpu, [{"kind": "guessed"}], "")


@pytest.mark.parametrize("text", ["{}", '{"schema": "other/9"}', "no json"])
def test_a_file_without_provenance_is_refused_by_name(folders, text):
    path = folders / "odd.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"odd.json"):
        results.read(path)


def test_recorded_results_say_recorded(folders, cpu):
    content = json.loads(results.save("timing", cpu, ROWS, "").read_text())
    content["machine"] |= {"gpu": "NVIDIA H200", "te": "2.20.2", "driver": "580"}
    target = folders / "results" / "nvidia-h200" / "timing.json"
    target.parent.mkdir(parents=True)
    target.write_text(json.dumps(content))
    rows, caption = results.recorded("timing")
    assert caption.startswith("RECORDED on one NVIDIA H200")
    assert rows["median_ms"].tolist() == [1.5]
    with pytest.raises(ValueError, match=r"no recorded results 'speed' of 'nvidia-h200'; there are timing"):
        results.recorded("speed")
