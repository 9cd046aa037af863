"""The memory of rollout workers on a cluster: when it is checked, and how nodes divide it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from scripted import FakeGang, Training, fake_cluster

from cluster.workers.machine import Offer
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.controller.run_planner import planner_on
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.demand import Demand, demand_of
from orchestrator.planner.memory import LIBRARIES, MEMORY_SHARE
from orchestrator.planner.planner import Planner
from orchestrator.planner.rollouts import worker_bytes
from orchestrator.planner.shape_of_model import model_shape
from workloads.describe import describe

SHAPE = model_shape(describe("llama-3-8b"), 1024)


def demand(gpu: int = 1) -> Demand:
    return demand_of(parse({
        "name": "rollouts",
        "workload": {"model": "llama-3-8b", "objective": "grpo"},
        "data": {"sources": [{"uri": "a", "field": {"prompt": "q"}}], "tokenizer": "t", "sequence_length": 1024},
        "train": {"steps": 10, "global_batch": 512, "precision": "bf16"},
        "rollout": {"group": 8, "together": 4, "max_tokens": 256, "workers": 4},
        "rewards": [{"kind": "exact_match"}],
        "resources": {"workers": 1, "per_worker": {"gpu": gpu}},
    }))  # fmt: skip


def notes(asked: Demand, offers: Any, resumes: bool = False, shape: ModelShape = SHAPE) -> list[str]:
    cluster = dataclasses.replace(fake_cluster(lambda: FakeGang(Training())), offer=offers)
    _, found = planner_on(cluster, asked, shape, job="", is_stopped=bool, is_busy=bool, resumes=resumes)
    return found


def test_a_worker_of_unknown_memory_is_not_refused() -> None:
    notes(demand(), lambda bundle, most: None)
    notes(demand(), lambda bundle, most: Offer(1e13, "A GPU of tomorrow"))
    with pytest.raises(InputError, match="a rollout worker needs"):
        notes(demand(), lambda bundle, most: Offer(1e13, "A GPU of tomorrow", 16e9))
    with pytest.raises(InputError, match="a rollout worker needs"):
        notes(demand(), lambda bundle, most: Offer(1e13, "T4"))


def test_a_run_with_a_commit_gets_a_note() -> None:
    (note,) = notes(demand(), lambda bundle, most: Offer(1e13, "T4"), resumes=True)
    assert note.startswith("a rollout worker needs")
    assert notes(demand(), lambda bundle, most: Offer(1e13, "H100"), resumes=True) == []


def test_rollout_workers_on_cpus_share_the_memory_of_their_node() -> None:
    asked = demand(gpu=0)
    needed = worker_bytes(asked, SHAPE)
    for_all = 5.0 * (needed + 1e9) / 0.8

    def node(total: float) -> Any:
        return lambda bundle, most: Offer(total / most)

    notes(asked, node(1.1 * for_all))
    with pytest.raises(InputError, match="a rollout worker needs"):
        notes(asked, node(0.9 * for_all - 5e9))
    assert asked.shared_resources.workers.max == 5


def test_layouts_are_chosen_for_the_memory_beside_rollout_workers() -> None:
    """One rank and four rollout workers on a node divide its memory; a run with a commit goes on all the same."""
    asked = demand(gpu=0)
    rollout_worker = 1.02 * (worker_bytes(asked, SHAPE) + LIBRARIES) / MEMORY_SHARE

    def planner(total: float, *, resumes: bool = False) -> tuple[Planner, list[str]]:
        cluster = dataclasses.replace(
            fake_cluster(lambda: FakeGang(Training())), offer=lambda bundle, most: Offer(total / most)
        )
        return planner_on(
            cluster, asked, SHAPE, job="", is_stopped=bool, is_busy=lambda: True, resumes=resumes
        )

    roomy, notes = planner(25 * rollout_worker)
    assert (roomy.plan(1).fits, notes) == (True, [])
    tight, _ = planner(5 * rollout_worker)
    with pytest.raises(InputError, match=r"needs .*, but a worker offers .* beside rollout.workers.max 4"):
        tight.plan(1)
    resumed, notes = planner(5 * rollout_worker, resumes=True)
    assert resumed.plan(1).fits
    assert notes[-1].startswith("no layout fits beside rollout.workers")
