"""What a pipeline holds of its messages, and of its weights in 16 bits, by traces of its step."""

from __future__ import annotations

import pytest
from traced_cases import case_of, job_of, trace, workload_of

from orchestrator.parallel.layout import Layout
from orchestrator.planner.step_trace import Memory, StepTrace

HIDDEN, LENGTH = 64, 8
SENT = 4 * HIDDEN * LENGTH
"""Bytes of what one stage hands to the next."""
BATCH = 3 * 8 * LENGTH
"""Bytes of a micro-batch, at most: the trace holds those of a step."""


def traced(schedule: str, micro_batches: int, precision: str = "fp32", gpu: int = 0) -> Memory:
    """A step of the second of two ranks, of a decoder of four layers."""
    case = case_of(0)
    changes = {"hidden": HIDDEN, "heads": 4, "intermediate": HIDDEN, "layers": 4, "max_positions": LENGTH}
    case["job"]["workload"] = {"model": "gpt-tiny", "changes": changes, "objective": "causal_lm"}
    case["job"]["data"] |= {"sequence_length": LENGTH, "labels": []}
    case["job"]["checkpoint"] = {}
    case["job"]["train"] = {"steps": 2, "global_batch": micro_batches, "precision": precision}
    case["job"]["resources"] = {"workers": 2, "per_worker": {"cpu": 1, "gpu": gpu}}
    found = trace(job_of(case), workload_of(case), Layout(pp=2, micro_batch=1, schedule=schedule), 1)
    assert isinstance(found, StepTrace), found
    return found.memory


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    ["1f1b", *(pytest.param(s, marks=pytest.mark.slow) for s in ("zbv", "interleaved", "zero_bubble"))],
)
def test_more_micro_batches_need_no_more_memory(schedule: str) -> None:
    few, many = traced(schedule, 4, gpu=1), traced(schedule, 6, gpu=1)
    assert many.at_peak["communication"] == few.at_peak["communication"] > 0
    assert many.steady["communication"] == 0
    assert many.peak - few.peak <= 2 * BATCH


@pytest.mark.slow
def test_gloo_holds_the_gradients_that_two_stages_have_sent() -> None:
    few, many = traced("interleaved", 4), traced("interleaved", 6)
    assert 2 * SENT < many.peak - few.peak <= 2 * (2 * SENT + BATCH)


def test_a_weight_is_cast_once_for_all_micro_batches_that_wait() -> None:
    """Of sequences this short a copy of the weights would be more than half of what waits."""
    half, full = (traced("gpipe", 6, p).peak - traced("gpipe", 4, p).peak for p in ("bf16", "fp32"))
    assert 0 < half < full
