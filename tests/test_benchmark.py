import pytest

from helpers import benchmark


def test_quartiles():
    assert benchmark.quartiles([1.0, 2.0, 3.0, 4.0, 100.0]) == (3.0, 2.0)


def test_rivals_take_turns_after_warm_up():
    calls = []
    table = benchmark.time_in_turns(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, "cpu", warmup=2, repeats=3
    )
    assert "".join(calls) == "aabb" + "ababab"
    assert table["variant"].tolist() == ["a", "b"]
    assert [len(samples) for samples in table["samples"]] == [3, 3]
    assert (table["median_ms"] >= 0).all()


@pytest.mark.parametrize(("rivals", "repeats"), [({}, 5), ({"a": lambda: None}, 1)])
def test_too_few_are_refused(rivals, repeats):
    with pytest.raises(ValueError, match=f"{len(rivals)} rivals and {repeats} repeats given"):
        benchmark.time_in_turns(rivals, "cpu", repeats=repeats)


def test_paired_speedup_is_a_ratio_with_an_interval():
    reference = [[2.0, 2.2, 2.1], [2.4, 2.2, 2.3], [1.9, 2.0, 2.1], [2.2, 2.1, 2.0]]
    ratio, low, high = benchmark.paired_speedup(reference, [[ms / 2 for ms in turn] for turn in reference])
    assert ratio == pytest.approx(2.0)
    assert low == pytest.approx(2.0)  # what disturbs a turn of both cancels
    assert high == pytest.approx(2.0)
    noisy = [[2.6, 1.7, 2.2], [1.8, 2.5, 2.1], [2.4, 1.9, 2.0], [1.7, 2.3, 2.2]]
    ratio, low, high = benchmark.paired_speedup(reference, noisy)
    assert low < 1.0 < high


def test_paired_speedup_wants_pairs():
    with pytest.raises(ValueError, match="3 and 2 turns given"):
        benchmark.paired_speedup([[1.0]] * 3, [[1.0]] * 2)
