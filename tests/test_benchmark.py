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
