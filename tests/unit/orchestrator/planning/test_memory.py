"""What ranks hold by the closed formula: micro-batches in flight, as the schedules themselves order their passes."""

from __future__ import annotations

import pytest

from orchestrator.job.spec import parse
from orchestrator.planning.layout import Layout
from orchestrator.planning.memory import held
from orchestrator.planning.model_shape import model_shape
from orchestrator.planning.simulation.schedules import order
from workloads.describe import describe


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"])
def test_micro_batches_in_flight_are_those_of_the_schedule(schedule: str) -> None:
    ranks, parts = 4, 16
    spec = parse({
        "name": "paper",
        "workload": {"model": "gpt-tiny", "changes": {"layers": 8}},
        "data": {"sources": [{"uri": "a"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 64},
        "train": {"steps": 10, "global_batch": parts},
    })  # fmt: skip
    shape = model_shape(describe("gpt-tiny", {"layers": 8}), 64)
    layout = Layout(pp=ranks, micro_batch=1, schedule=schedule)
    for rank, actions in enumerate(order(schedule, ranks, parts)):
        now = most = 0
        for kind, _, _ in actions:
            now += {"F": 1, "I": 0, "B": -1, "W": -1}[kind]
            most = max(most, now)
        chunks = len({stage for _, stage, _ in actions})
        (found,) = held(spec, shape, layout, [rank])
        assert found.in_flight == most / chunks
