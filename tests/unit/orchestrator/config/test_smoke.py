"""A try of a job is the job in small."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import job

from orchestrator.config.smoke import smoke_of
from orchestrator.config.spec import parse


def large(**train: Any) -> dict[str, Any]:
    asked = job("a.txt", steps=10_000, global_batch=96, optimizer={"warmup": "10%"}, **train)
    asked["data"]["validation"] = {"share": 0.01}
    asked["evaluate"] = {"every": 1000}
    asked["stop_when"] = {"metric": "validation.loss", "patience": 3}
    asked["checkpoint"] = {
        "every": 500,
        "keep_every": 1000,
        "keep_best": "validation.loss",
        "export_to": "/mine",
    }
    asked["tracking"] = {"register_as": "model"}
    return asked


def test_it_is_short_and_touches_nothing_of_the_job() -> None:
    whole = parse(large())
    small = smoke_of(whole, lambda _: True)
    assert (small.name, small.train.steps, small.train.optimizer.warmup) == ("small-smoke", 12, 1)
    assert (small.checkpoint.every, small.checkpoint.keep_every, small.checkpoint.export_to) == (
        6,
        None,
        None,
    )
    assert small.evaluate is not None
    assert (small.evaluate.every, small.evaluate.batches, small.stop_when) == (6, 4, None)
    assert small.tracking is not None
    assert small.tracking.register_as is None
    assert (small.workload, small.data, small.resources) == (whole.workload, whole.data, whole.resources)


@pytest.mark.parametrize(("batches", "epochs", "half"), [(1, 1, 6), (2, 2, 8), (5, 1, 10), (5, 5, 25)])
def test_it_has_whole_rollouts(batches: int, epochs: int, half: int) -> None:
    document = large() | {"rewards": [{"kind": "exact_match"}]}
    document["rollout"] = {"group": 4, "max_tokens": 8, "steps": batches, "epochs": epochs}
    document["workload"]["objective"] = "grpo"
    document["data"]["sources"][0]["field"] = {"prompt": "q"}
    document["data"]["tokenizer"] = "t"
    del document["stop_when"], document["checkpoint"]["keep_best"]
    small = smoke_of(parse(document), lambda _: True)
    assert (small.train.steps, small.checkpoint.every) == (2 * half, half)


def test_what_no_longer_fits_so_few_steps_is_left_out() -> None:
    document = large(thaw={20: ["layers.0.*"]}, freeze=["layers.0.*"])
    document["train"]["optimizer"] = {"schedule": "wsd", "warmup": "4%", "decay": "96%"}
    small = smoke_of(parse(document), lambda _: True)
    assert small.train.thaw == {}
    optimizer = small.train.optimizer
    assert (optimizer.warmup, optimizer.decay) == (1, 11)


@pytest.mark.parametrize(
    ("determinism", "least", "batch"),
    [("rerun", 2, 2), ("rerun", 7, 8), ("bitwise", 2, 8), ("bitwise", 9, 16)],
)
def test_the_batch_is_the_smallest_that_is_alike(determinism: str, least: int, batch: int) -> None:
    whole = parse(large(determinism=determinism))
    assert smoke_of(whole, lambda tried: tried.train.global_batch >= least).train.global_batch == batch


def test_a_job_without_a_layout_keeps_its_batch() -> None:
    whole = parse(large())
    assert smoke_of(whole, lambda tried: tried.train.global_batch == 96).train.global_batch == 96


def test_weights_are_pruned_at_the_same_shares_of_the_steps() -> None:
    whole = large() | {"prune": {"sparsity": 0.5, "steps": [2500, 7500], "choose_every": 1000}}
    whole["workload"] |= {"init_from": "base", "shrink": {"importance": "gradient"}}
    small = smoke_of(parse(whole), lambda _: True)
    assert small.prune is not None
    assert (small.prune.steps, small.prune.choose_every, small.prune.sparsity) == ((3, 9), 1, 0.5)
    assert small.workload.shrink is not None
    assert small.workload.shrink.samples == 16
    at_once = smoke_of(parse(whole | {"prune": {"pattern": "2:4", "steps": [1, 1]}}), lambda _: True)
    assert at_once.prune is not None
    assert at_once.prune.steps == (1, 1)
