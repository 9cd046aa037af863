"""What a job says of its pruning: the schedule, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import changed, job

from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.parallel.engine_rules import engine_problems
from orchestrator.parallel.layout import Layout
from orchestrator.prune.config import PruneSpec, gates_notes

HALF = {"sparsity": 0.5, "steps": [2, 10], "choose_every": 3}


def test_the_share_grows_by_the_cube_of_what_is_left() -> None:
    spec = PruneSpec(sparsity=0.8, steps=(100, 500), choose_every=100)
    due = [step for step in range(1, 700) if spec.is_due(step)]
    assert due == [100, 200, 300, 400, 500]
    wanted = [0.0, 0.4625, 0.7, 0.7875, 0.8]  # 0.8 (1 - (1 - t / 4)^3) for t = 0 to 4
    assert [spec.share(step) for step in due] == pytest.approx(wanted, abs=1e-12)


def test_the_last_step_is_due_even_between_two_choices() -> None:
    spec = PruneSpec(**HALF)
    assert [step for step in range(20) if spec.is_due(step)] == [2, 5, 8, 10]
    assert spec.share(10) == 0.5
    at_once = PruneSpec(sparsity=0.3, steps=(4, 4))
    assert [(step, at_once.share(step)) for step in range(20) if at_once.is_due(step)] == [(4, 0.3)]


def test_a_pattern_by_magnitude_is_chosen_once_and_by_movement_again_and_again() -> None:
    once, often = (
        PruneSpec(pattern="2:4", method=each, steps=(3, 9), choose_every=2)
        for each in ("magnitude", "movement")
    )
    assert [step for step in range(20) if once.is_due(step)] == [3]
    assert [step for step in range(20) if often.is_due(step)] == [3, 5, 7, 9]


@pytest.mark.parametrize(
    ("prune", "words"),
    [
        ({}, "nothing to prune; give sparsity or pattern"),
        ({**HALF, "pattern": "2:4"}, "leave out sparsity or pattern"),
        ({"sparsity": 0.5}, "give steps"),
        ({"keep": True, "steps": [1, 2]}, "give sparsity or pattern"),
        ({**HALF, "steps": [10, 2]}, "ends before it begins"),
        ({**HALF, "steps": [2, 13]}, r"prune.steps ends after step 12"),
        ({**HALF, "method": "movement", "keep": True}, "use method magnitude"),
        ({"pattern": "4:4", "steps": [1, 2]}, "keeps all weights"),
        ({"pattern": "2:4", "steps": [1, 2], "scope": "layer"}, "leave it out"),
        ({"pattern": "two of four", "steps": [1, 2]}, "pattern"),
        ({**HALF, "sparsity": 1.0}, "less than 1"),
        ({**HALF, "steps": [0, 2]}, "greater than or equal to 1"),
    ],
)
def test_what_makes_no_sense_is_refused(prune: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse(job("text") | {"prune": prune})


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"workload": {"init_from": "run", "adapter": {"kind": "lora"}}},
            "an adapter does not train those of the base",
        ),
        ({"train": {"freeze": ["tokens.*"], "thaw": {4: ["tokens.*"]}}}, "train.thaw changes which are"),
        ({"checkpoint": {"average": {"last": 2}}}, "use ema"),
    ],
)
def test_what_does_not_go_with_it_is_refused(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        changed(job("text"), prune=HALF, **parts)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"workload": {"init_from": "run", "adapter": {"kind": "lora"}}},
            "an adapter leaves them as they are",
        ),
        ({"workload": {"model": "mine:Model"}}, "head_penalty is for models of this project"),
        ({"quantize": {"weights": "int8"}}, "quantise in a run that begins with that export"),
    ],
)
def test_what_does_not_go_with_gates_of_heads_is_refused(parts: dict[str, Any], words: str) -> None:
    workload = {**parts.get("workload", {}), "head_penalty": 0.1}
    with pytest.raises(InputError, match=words):
        changed(job("text"), **{**parts, "workload": workload})


def test_a_note_says_if_no_gate_can_close_and_what_lets_them() -> None:
    slow = changed(job("text"), workload={"head_penalty": 0.1})
    (note,) = gates_notes(slow.workload, slow.train)
    assert note.endswith('train.optimizer.groups: [{match: ["*.gates.*"], lr_scale: 300}]')
    optimizer = {"lr": 3e-3, "groups": [{"match": ["*.gates.*"], "lr_scale": 300}]}
    fast = changed(job("text"), workload={"head_penalty": 0.1}, train={"optimizer": optimizer})
    assert gates_notes(fast.workload, fast.train) == []
    assert gates_notes(changed(job("text")).workload, slow.train) == []


def test_deepspeed_does_not_run_it_and_the_torch_engine_does() -> None:
    jobs = {
        "prune": changed(job("text"), prune=HALF),
        "workload.head_penalty": changed(job("text"), workload={"head_penalty": 0.1}),
    }
    for key, spec in jobs.items():
        for engine, found in (("torch", 0), ("deepspeed", 1)):
            layout = Layout(dp=2, zero=1, engine=engine)
            problems = engine_problems(spec.train, spec.workload, 0.0, layout, prunes=spec.prune is not None)
            assert len(problems) == found, problems
            assert all(f"{key} changes gradients" in problem for problem in problems)


def test_a_run_is_the_same_run_only_with_the_same_pruning() -> None:
    plain = changed(job("text"))
    assert "prune" not in plain.identity()
    pruned = changed(job("text"), prune=HALF).identity()
    assert parse({"name": "again", **pruned}).identity() == pruned
    assert pruned != changed(job("text"), prune={**HALF, "sparsity": 0.6}).identity()
    assert "head_penalty" not in plain.identity()["workload"]
    assert changed(job("text"), workload={"head_penalty": 0.1}).identity() != plain.identity()
