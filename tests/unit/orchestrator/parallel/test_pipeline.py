"""No order of messages in a pipeline blocks, under the rules of NCCL: see `rendezvous`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rendezvous import Call, Message, Program, recorded, stuck
from thin import every

from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import SCHEDULES, SEVERAL_STAGES, Layout
from orchestrator.planner.simulation.timeline import order
from orchestrator.train.engines.torch_engine import TorchEngine

sys.path.append(str(Path(__file__).parents[3] / "dist" / "train"))

MODELS: dict[str, dict[str, Any]] = {
    "decoder": {"model": "gpt-tiny"},
    "moe": {"model": "mixtral-tiny", "changes": {"kv_heads": 2, "moe": {"experts": 4, "intermediate": 32}}},
    "pair": {"model": "t5-tiny", "objective": "span_corruption"},
}


def programs(model: str, layout: Layout, evaluates: bool, binds_device: bool) -> dict[int, Program]:
    """What each rank sends and receives in two steps of training, or of evaluation."""
    from rank_cases import job, micro_batches, workload_of

    of = MODELS[model]
    layers = layout.stages if of.get("objective") is None else -(-layout.stages // 2) + 1
    layers += 3 * (layout.first_less + layout.last_less - 1)
    case = {**of, "changes": {"layers": layers, "hidden": 16, "intermediate": 32, **of.get("changes", {})}}
    spec = job(case)
    found = {}
    for rank in range(layout.world):
        with recorded(rank, layout.world, binds_device) as recorder:
            group = dist.group.WORLD
            assert group is not None
            engine = TorchEngine(
                spec.engine, workload_of(spec), layout, Device(torch.device("cpu"), torch.float32, group)
            )
            engine.passes.losses._agreed_names = lambda: ["loss", "count", "correct"]  # type: ignore[method-assign]
            for step in range(2):
                batches = micro_batches(engine._workload, spec, layout, step)
                engine.eval_step(batches) if evaluates else engine.passes.runner.train(batches)
            found[rank] = recorder.program
    return found


def timelines(model: str, layout: Layout) -> list[list[tuple[str, int, int]]]:
    """Kind, stage and micro-batch of what each rank of a pipeline records in a step, in order."""
    from rank_cases import job, micro_batches, workload_of

    changes = {"layers": layout.stages, "hidden": 16, "intermediate": 32}
    spec = job({**MODELS[model], "changes": changes})
    found = []
    for rank in range(layout.world):
        with recorded(rank, layout.world, False):
            group = dist.group.WORLD
            assert group is not None
            device = Device(torch.device("cpu"), torch.float32, group)
            engine = TorchEngine(spec.engine, workload_of(spec), layout, device)
            engine.passes.losses._agreed_names = lambda: ["loss", "count", "correct"]  # type: ignore[method-assign]
            engine.passes.runner.train(micro_batches(engine._workload, spec, layout, 0))
            assert engine.clock.timeline is None
            engine.clock.record()
            engine.passes.runner.train(micro_batches(engine._workload, spec, layout, 1))
            actions = engine.clock.timeline.actions()
            assert all(0 < begin <= end for *_, begin, end in actions)
            ends = [end for *_, end in actions]
            assert ends == sorted(ends)
            found.append([(kind, stage, part) for kind, stage, part, _, _ in actions])
    return found


@pytest.mark.parametrize(
    "layout", [Layout(pp=2, micro_batch=2, schedule=name) for name in SCHEDULES], ids=str
)
def test_a_recorded_step_has_what_was_planned_of_it(layout: Layout) -> None:
    """Where a schedule takes both halves of a backward pass together, they are one action in one of the two."""
    from rank_cases import job

    parts = layout.accumulation(job({"model": "gpt-tiny"}).train.global_batch)
    planned = order(layout.schedule, layout.pp, parts, layout.stages // layout.pp)
    for real, wanted in zip(timelines("decoder", layout), planned, strict=True):
        assert halves(real) == halves(wanted)


def halves(actions: Iterable[tuple[str, int, int]]) -> Counter[tuple[str, int, int]]:
    """With each full backward pass as its two halves."""
    found: Counter[tuple[str, int, int]] = Counter()
    for kind, stage, part in actions:
        found.update((half, stage, part) for half in ("IW" if kind == "B" else kind))
    return found


def layouts(pp: int) -> list[Layout]:
    """A pipeline under each schedule."""
    return [Layout(pp=pp, micro_batch=2 if pp == 2 else 1, schedule=name) for name in SCHEDULES]


QUICK = [("decoder", layout) for layout in layouts(2)] + [
    ("moe", Layout(pp=2, micro_batch=2, schedule="zbv")),
    ("decoder", Layout(pp=2, micro_batch=2, schedule="interleaved", virtual=3, first_less=1, last_less=2)),
]
FULL = [(model, layout) for model in MODELS for pp in (2, 4) for layout in layouts(pp)]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in FULL if case not in QUICK)]


@pytest.mark.parametrize("evaluates", [True, False], ids=["evaluate", "train"])
@pytest.mark.parametrize(("model", "layout"), every(2, CASES, unpack=True), ids=str)
def test_messages_never_wait_for_each_other(model: str, layout: Layout, evaluates: bool) -> None:
    for binds_device in (False, True):
        found = programs(model, layout, evaluates, binds_device)
        assert all(found.values())
        assert stuck(found) == []


def test_a_stage_after_the_other_would_block() -> None:
    """How evaluations were before: each stage of a rank for all micro-batches, then the next one."""
    pair = (1, 0, 1)

    def one(sends: bool, peer: int) -> Call:
        return Call(pair, (Message(sends, peer),))

    first: Program = [one(True, 1), one(True, 1), one(False, 1), 2, one(False, 1), 3, 0, 1]
    second: Program = [one(False, 0), 0, one(True, 0), one(False, 0), 2, one(True, 0), 1, 3]
    assert stuck({0: first, 1: second})
    assert not stuck({0: first, 1: [one(False, 0), 0, one(False, 0), 1, one(True, 0), one(True, 0)]})


def test_a_message_in_another_communicator_is_never_met() -> None:
    batch = Call((1, 0, 1), (Message(True, 1), Message(False, 1)))
    assert stuck({0: [batch, 0], 1: [Call((0, 0, 1), (Message(False, 0),)), 0]})


def test_two_stages_a_rank_are_looked_at() -> None:
    assert {layout.schedule for _, layout in QUICK} >= set(SEVERAL_STAGES)
