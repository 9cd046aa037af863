"""Which keys explain the differences between trials."""

from __future__ import annotations

from orchestrator.tune.importance import importance


def test_the_key_that_decides_is_first() -> None:
    configs = [{"lr": n, "other": (n * 7) % 5, "same": 1, "kind": "a" if n < 4 else "b"} for n in range(8)]
    found = importance(configs, [n**3 for n in range(8)])
    assert next(iter(found)) == "lr"
    assert abs(found["lr"] - 1.0) < 1e-9, "ranks see through any monotone curve"
    assert found["same"] == 0.0
    assert 0.7 < found["kind"] < 0.9
    assert found["other"] < 0.3


def test_a_choice_that_decides_alone_explains_all() -> None:
    found = importance([{"kind": k} for k in "aabb"], [1.0, 1.0, 5.0, 5.0])
    assert abs(found["kind"] - 1.0) < 1e-9


def test_too_few_trials_say_nothing() -> None:
    assert importance([{"lr": 1}, {"lr": 2}, {"lr": 3}], [1.0, 2.0, 3.0]) == {}
    assert importance([{"lr": n} for n in range(5)], [1.0] * 5) == {}
