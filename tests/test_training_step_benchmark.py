"""benchmarks/: the harness on a CPU, with the smallest case. The variants that need a GPU are run there by hand."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import training_step, variants
from benchmarks.worker import Worker
from helpers import results


@pytest.fixture(scope="module")
def rivals():
    """A rival that runs, and two that cannot here."""
    return training_step.time_group("tiny", ["torch-eager-bf16", "te-bf16", "torchao-fp8"])


def test_a_rival_is_timed_in_turns_and_learns(rivals):
    rival = rivals[0]
    assert rival.error == ""
    assert [len(turn) for turn in rival.turns] == [training_step.STEPS_A_TURN] * training_step.TURNS
    assert min(ms for turn in rival.turns for ms in turn) > 0
    training_step.check_losses(rival, rival)
    assert rival.error == ""
    row = training_step.row_of("tiny", rival, rival, {"bf16": 1.0}, 0, 0)
    assert row["speedup"] == (1.0, 1.0, 1.0)
    assert row["tflops"] == pytest.approx(row["ceiling_share"])
    assert len(row["samples"]) >= 30


def test_a_missing_rival_is_named_and_the_others_go_on(rivals):
    for rival, module in zip(rivals[1:], ("transformer_engine", "torchao"), strict=True):
        assert module in rival.error or "Transformer Engine" in rival.error
        assert rival.turns == []
        row = training_step.row_of("tiny", rival, rivals[0], {}, 0, 0)
        assert row["error"]
        assert "median_ms" not in row


def test_another_training_is_not_timed(rivals):
    losses = [loss + 1 for loss in rivals[0].found["losses"]]
    cheat = SimpleNamespace(variant="cheat", turns=rivals[0].turns, error="", found={"losses": losses})
    training_step.check_losses(cheat, rivals[0])
    assert "not the same training" in cheat.error
    assert "median_ms" not in training_step.row_of("tiny", cheat, rivals[0], {}, 0, 0)


def test_a_loss_that_is_not_finite_ends_the_row_with_its_step():
    worker = Worker("tiny", "torch-eager-bf16")
    worker.losses(1)
    worker.step = lambda inputs, targets: torch.tensor(float("nan"))
    with pytest.raises(FloatingPointError, match="the loss of step 2 is nan"):
        worker.losses(1)


def test_unknown_names_list_the_choices():
    with pytest.raises(ValueError, match="variant 'te' is not known; choose one of walkthrough-bf16"):
        variants.build("te", "tiny", "cpu")
    with pytest.raises(ValueError, match="case 'huge' is not known; choose one of tiny, compact"):
        variants.build("te-bf16", "huge", "cpu")


def test_groups_always_hold_the_reference():
    names = ["a", "b", "ref", "c"]
    assert training_step.groups_of(names, "ref", together=3) == [["ref", "a", "b"], ["ref", "c"]]
    assert training_step.groups_of(names, "ref", together=2) == [["ref", "a"], ["ref", "b"], ["ref", "c"]]
    assert training_step.groups_of(["ref"], "ref", together=4) == [["ref"]]


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ARTIFACTS", tmp_path / "artifacts")
    monkeypatch.setattr(results, "RECORDED", tmp_path / "results")
    return tmp_path


def test_runs_merge_their_rows_each_with_its_provenance(folders, cpu):
    def merge(case, ms, command):
        rows = [{"case": case, "variant": "a", "kind": "measured", "median_ms": ms}]
        return results.merge("benchmarks", cpu, rows, "method", keys=("case", "variant"), command=command)

    merge("one", 1.0, "first")
    merge("two", 2.0, "second")
    path = merge("one", 3.0, "third")
    rows = {row["case"]: row for row in results.read(path)["rows"]}
    assert {case: row["median_ms"] for case, row in rows.items()} == {"one": 3.0, "two": 2.0}
    assert {case: row["provenance"]["command"] for case, row in rows.items()} == {"one": "third", "two": "second"}
    assert rows["two"]["provenance"]["machine"]["torch"] == cpu.torch
    assert list(path.parent.iterdir()) == [path]


def test_a_file_of_another_schema_is_refused_and_kept(folders, cpu):
    path = folders / "artifacts" / "results" / cpu.slug / "benchmarks.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"schema": "another/1", "rows": []}))
    with pytest.raises(ValueError, match=r"benchmarks.json is refused: schema 'another/1'"):
        results.merge("benchmarks", cpu, [{"kind": "measured"}], "method", keys=("case",))
    assert json.loads(path.read_text())["schema"] == "another/1"
