"""Traces of the engine's own step: what is held, what is sent, and that they are always the same."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from traced_cases import case_of, job_of, workload_of

from orchestrator.planning.layout import Layout
from orchestrator.planning.step_trace import NotTraced, StepTrace, Wait
from orchestrator.tracing.step import trace


def traced(layout: dict[str, Any], rank: int = 0, **train: Any) -> StepTrace:
    """A trace of a small decoder, made once."""
    return _traced(json.dumps([layout, rank, train]))


@functools.cache
def _traced(asked: str) -> StepTrace:
    return traced_anew(*json.loads(asked))


def traced_anew(layout: dict[str, Any], rank: int, train: dict[str, Any]) -> StepTrace:
    """A trace of a small decoder."""
    case = case_of(0)
    case["job"]["workload"] = {
        "model": "gpt-tiny",
        "changes": {"hidden": 32, "heads": 4, "intermediate": 64, "layers": 2, "max_positions": 64},
        "objective": "causal_lm",
    }
    case["job"]["data"] |= {"sequence_length": 32, "labels": []}
    case["job"]["checkpoint"] = {}
    case["job"]["train"] = {"steps": 2, "global_batch": 4, **train}
    found = trace(job_of(case), workload_of(case), Layout(**{"micro_batch": 1, **layout}), rank)
    assert isinstance(found, StepTrace), found
    return found


def test_weights_gradients_and_state_are_those_of_the_layout() -> None:
    alone, sharded = traced({}).memory.steady, traced({"dp": 2, "zero": 1}).memory.steady
    assert alone["gradients"] == alone["weights"]
    assert (
        alone["weights"] * 2 <= alone["optimizer"] < alone["weights"] * 2.01
    )  # two slots, and counts of steps
    assert sharded["weights"] == alone["weights"]
    assert sharded["optimizer"] < 0.51 * alone["optimizer"]
    full = traced({"dp": 2, "zero": 3}).memory
    assert full.steady["weights"] < 0.51 * alone["weights"]
    assert full.at_peak["communication"] > 0


def test_the_parts_at_the_peak_are_the_peak() -> None:
    for layout in ({}, {"pp": 2}, {"dp": 2, "zero": 3}):
        memory = traced(layout).memory
        assert sum(memory.at_peak.values()) == memory.peak
        assert memory.phase == "backward"


def test_recomputation_keeps_less() -> None:
    assert traced({"recompute": "full"}).memory.peak < traced({}).memory.peak


def test_a_trace_is_always_the_same() -> None:
    assert traced({"pp": 2}) == traced_anew({"pp": 2}, 0, {})


def test_messages_name_their_group_and_what_waits_for_them() -> None:
    found = traced({"dp": 2, "tp": 2, "zero": 1}, 1)
    axes = {(c.message, c.axis) for c in found.collectives}
    assert {("all_reduce", "tp"), ("reduce_scatter", "data"), ("all_gather", "data")} <= axes
    piped = traced({"pp": 2})
    sent = [c for c in piped.collectives if c.message in ("send", "receive")]
    assert {c.peer for c in sent} == {1}
    assert {c.number for c in sent} == {e.number for e in piped.events if isinstance(e, Wait)}


def test_what_cannot_be_traced_says_why() -> None:
    case = case_of(0)
    found = trace(job_of(case), workload_of(case), Layout(engine="deepspeed", dp=2, zero=1), 0)
    assert isinstance(found, NotTraced)
    assert "DeepSpeed" in found.reason


@pytest.mark.parametrize("layout", [{}, {"dp": 2, "zero": 3}])
def test_everything_frozen_but_one_tensor(layout: dict[str, Any]) -> None:
    found = traced(layout, freeze=["layers.*", "tokens.*", "embeddings.*"]).memory
    assert 0 < found.steady["optimizer"] < 0.02 * found.steady["weights"]
