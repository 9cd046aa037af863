"""A layout whose trace does not fit gives way to the next, wherever one is chosen."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobs import job, write_text

from orchestrator.config.errors import InputError
from orchestrator.config.spec import dump, parse
from orchestrator.controller import background_trace
from orchestrator.controller.background_trace import verdicts_before
from orchestrator.controller.events import start_event
from orchestrator.parallel.layout import Layout
from orchestrator.planner import choose_layout as planning
from orchestrator.planner.choose_layout import Verdict
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device import Machine
from orchestrator.planner.memory import MEMORY_SHARE, peak_bytes
from orchestrator.planner.planner import Planner
from orchestrator.planner.step_trace import CATEGORIES, Memory, NotTraced, StepTrace
from orchestrator.planner.trace import background_tracer, layout_memory
from orchestrator.planner.trace.layout_memory import TracedMemory, check_fits, plan_with_traces
from orchestrator.resolve.resolved_job import ResolvedJob, resolve

LOW = 0.5
"""What the formula says is this share of what it should."""


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    layout_memory._cached.cache_clear()


@pytest.fixture
def resolved(tmp_path: Path) -> ResolvedJob:
    return _job(tmp_path, {})


def _job(folder: Path, parallel: dict[str, Any]) -> ResolvedJob:
    document = job(write_text(folder, 20_000))
    document["parallel"] = {"pp": 1, **parallel}
    document["workload"]["changes"] = {"hidden": 64, "layers": 4, "max_positions": 256}
    document["data"]["sequence_length"] = 256
    document["train"]["global_batch"] = 16
    document["resources"] = {"workers": {"min": 1, "max": 1}, "per_worker": {"gpu": 1}}
    return resolve(parse(document))


@pytest.fixture
def machine(resolved: ResolvedJob, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A GPU on which micro-batches of four sequences have room, and those of eight by a formula that is too low."""
    largest = peak_bytes(demand_of(resolved.spec), resolved.shape, Layout(micro_batch=4))
    monkeypatch.setattr(
        planning, "peak_bytes", lambda *given, **keywords: LOW * peak_bytes(*given, **keywords)
    )
    return Machine(1.15 * largest / MEMORY_SHARE, 1e12, launch=1e-4)


def test_a_layout_gives_way_to_the_next_whose_trace_fits(resolved: ResolvedJob, machine: Machine) -> None:
    by_formula = planning.plan(demand_of(resolved.spec), resolved.shape, 1, machine).chosen.layout
    found = plan_with_traces(resolved, 1, machine)
    assert found.traced is not None
    assert found.traced.layout == found.plan.chosen.layout != by_formula
    assert found.traced.fits(found.plan, False)
    assert found.traced.largest is not None
    reasons = dict(found.plan.rejected)
    assert "by its trace, which offers" in reasons[by_formula]
    assert set(found.verdicts) <= set(reasons)


@pytest.mark.slow
def test_without_time_for_more_the_one_that_needs_least_is_taken(
    resolved: ResolvedJob, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by the controller, to which the verdicts are all it knows."""
    monkeypatch.setattr(layout_memory, "TRACE_SECONDS", 0.0)
    found = plan_with_traces(resolved, 1, machine)
    layout = found.plan.chosen.layout
    assert found.traced is not None
    assert found.traced.layout == layout
    assert found.traced.fits(found.plan, False)
    assert layout.micro_batch == 1
    assert [not verdict.reason for verdict in found.verdicts.values()] == [False, True]
    reasons = dict(found.plan.rejected)
    assert reasons[layout.but(micro_batch=2)] == f"has no trace, and {layout} fits by its trace"
    planner = Planner(demand_of(resolved.spec), resolved.shape, machine, confirm=lambda _: found.verdicts)
    assert (planner.choose(1), planner.refused) == (layout, 1)


def test_what_has_the_same_shape_is_traced_once(
    resolved: ResolvedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Layout, float]] = []
    nothing = dict.fromkeys(CATEGORIES, 0)

    def traced(asked: layout_memory._TraceRequest) -> TracedMemory:
        layout, seconds = asked.layout, asked.seconds
        made.append((layout, seconds))
        if not seconds:
            return TracedMemory(layout, (NotTraced(0, "it takes too long"),), 0.0)
        return TracedMemory(layout, (StepTrace(0, {}, (), Memory(7, nothing, nothing, "forward")),), seconds)

    def changed(**train: Any) -> ResolvedJob:
        spec = resolved.spec
        train_spec = spec.train.model_copy(update=train)
        return dataclasses.replace(resolved, spec=spec.with_parts(train=train_spec))

    monkeypatch.setattr(layout_memory, "_trace", traced)
    one, two = Layout(micro_batch=1), Layout(micro_batch=2)
    for each, layout, seconds in (
        (resolved, one, 0.0),  # without time there is nothing to remember
        (resolved, one, 1.0),
        (changed(steps=7), one, 0.0),
        (changed(global_batch=8), one, 2.0),
        (resolved, two, 3.0),
    ):
        found = layout_memory.traced_memory(each, layout, seconds)
        assert (found.layout, bool(found.traces)) == (layout, len(made) > 1)
    assert made == [(one, 0.0), (one, 1.0), (one, 2.0), (two, 3.0)]


def test_a_layout_that_is_known_to_fit_leaves_out_those_on_no_more_ranks(tmp_path: Path) -> None:
    job = _job(tmp_path, {"pp": 1, "tp": 1, "cp": 1, "zero": 0, "recompute": "none"})
    known, roomy = Layout(dp=2, micro_batch=1), Machine(1e12, 1e12, launch=1e-4)
    verdicts = {known: Verdict("", 1.5)}

    def chosen(workers: int) -> Layout:
        return planning.plan(demand_of(job.spec), job.shape, workers, roomy, verdicts=verdicts).chosen.layout

    assert chosen(2) == known
    assert chosen(4).dp == 4
    assert chosen(1).dp == 1


@pytest.mark.slow
def test_where_none_fits_in_the_time_the_first_stays_and_is_refused(
    resolved: ResolvedJob, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = _job(tmp_path, {"micro_batch": 8, "recompute": "none"})
    with pytest.raises(InputError, match=r"dp1 zero0 mb8 needs 0\.07 GiB per worker, which offers 0\.04 GiB"):
        check_fits(pinned, machine)
    check_fits(resolved, machine)
    monkeypatch.setattr(layout_memory, "TRACE_SECONDS", 0.0)
    monkeypatch.setattr(layout_memory, "LAST_TRACE_SECONDS", 0.0)
    found = plan_with_traces(resolved, 1, machine)
    assert found.plan.chosen.layout.micro_batch == 8
    assert found.verdicts == {}
    assert found.traced is not None
    assert not found.traced.fits(found.plan, False)


def test_what_the_formula_alone_refuses_is_taken_where_its_trace_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `plan`, by `submit` and by the controller; not where the formula would be off by more than it ever was."""
    pinned = _job(tmp_path, {"micro_batch": 4, "recompute": "none"})
    layout = Layout(micro_batch=4)
    traced = layout_memory.traced_memory(pinned, layout).largest
    assert traced is not None
    tight = Machine(1.01 * traced.memory.peak / MEMORY_SHARE, 1e12, launch=1e-4)
    monkeypatch.setattr(planning, "peak_bytes", lambda *_, **__: 1.2 * traced.memory.peak)
    with pytest.raises(InputError, match="GiB per rank, but a worker offers"):
        planning.plan(demand_of(pinned.spec), pinned.shape, 1, tight)
    found = plan_with_traces(pinned, 1, tight)
    assert (found.plan.chosen.layout, found.plan.fits) == (layout, True)
    check_fits(pinned, tight)

    planner = Planner(demand_of(pinned.spec), pinned.shape, tight, confirm=lambda _: found.verdicts)
    assert (planner.choose(1), planner.refused) == (layout, 0)
    unsure = Planner(demand_of(pinned.spec), pinned.shape, tight, confirm=lambda _: {})
    assert unsure.choose(1) is None

    smaller = dataclasses.replace(tight, memory=0.95 * tight.memory)
    with pytest.raises(InputError, match="GiB per rank, but a worker offers"):
        plan_with_traces(pinned, 1, smaller)
    monkeypatch.setattr(planning, "peak_bytes", lambda *_, **__: 1.5 * traced.memory.peak)
    with pytest.raises(InputError, match="GiB per rank, but a worker offers"):
        plan_with_traces(pinned, 1, tight)


def test_the_run_starts_with_what_fits(
    resolved: ResolvedJob, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the controller's process is asked, and what it does with the answer."""
    asked: list[int] = []

    def confirm(workers: int) -> dict[Layout, Verdict]:
        asked.append(workers)
        given = {
            "job": dump(resolved.spec),
            "workers": workers,
            "machine": dataclasses.asdict(machine),
            "row_tokens": (),
        }
        said = json.dumps(background_tracer.answer(json.loads(json.dumps(given))))
        program = [sys.executable, "-c", f"import sys; sys.stdin.read(); print({said!r})"]
        monkeypatch.setattr(background_trace, "command_of", lambda *_, **__: program)
        return verdicts_before(dump(resolved.spec), machine, lambda: False, None, workers)

    busy = [True]
    planner = Planner(
        demand_of(resolved.spec), resolved.shape, machine, confirm=confirm, is_busy=lambda: busy[0]
    )
    by_formula = planner.choose(1)
    assert asked == []
    busy[0] = False
    layout = planner.choose(1)
    assert layout != by_formula
    assert layout is not None
    assert layout.micro_batch == 4
    plan = planner.plan(1)
    assert plan.chosen.layout == layout
    assert any("by its trace" in reason for _, reason in plan.rejected)
    assert asked == [1]
    assert start_event(resolved.spec.train, layout, None, None, planner.refused)[0].endswith(
        "1 layout does not fit by the trace, see plan.json"
    )
    roomy = Planner(
        demand_of(resolved.spec), resolved.shape, dataclasses.replace(machine, memory=1e12), confirm=confirm
    )
    assert roomy.choose(1) is not None
    assert asked == [1]


@pytest.mark.parametrize("program", [["false"], ["/nowhere/python"], ["sleep", "30"]], ids=str)
def test_what_says_nothing_leaves_the_formula(
    program: list[str], resolved: ResolvedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_trace, "command_of", lambda *_, **__: program)
    monkeypatch.setattr(background_trace, "BEFORE", 0.3)
    assert verdicts_before(dump(resolved.spec), Machine(1e9, 1e12), lambda: False, None, 1) == {}
    monkeypatch.setattr(background_trace, "BEFORE", 30.0)
    assert verdicts_before(dump(resolved.spec), Machine(1e9, 1e12), lambda: True, None, 1) == {}


class Elsewhere:
    """A call in another process, which takes `looks` looks."""

    def __init__(self, looks: float, function: Callable[..., Any], *arguments: Any) -> None:
        self._looks = looks
        self._call = function, pickle.loads(pickle.dumps(arguments))
        self.cancelled = False

    def done(self) -> bool:
        """See `RemoteTask.done`."""
        self._looks -= 1
        return self._looks < 0

    def result(self) -> Any:
        """See `RemoteTask.result`."""
        function, arguments = self._call
        return pickle.loads(pickle.dumps(function(*arguments)))

    def cancel(self) -> None:
        """See `RemoteTask.cancel`."""
        self.cancelled = True


def test_a_process_with_the_imports_done_traces_them(
    resolved: ResolvedJob, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another interpreter would import torch again, which takes longer than the trace."""
    monkeypatch.setattr(background_trace, "command_of", lambda *_, **__: pytest.fail("another interpreter"))
    monkeypatch.setattr(background_trace, "LOOK", 0.01)
    begun: list[Elsewhere] = []

    def run(looks: float, *call: Any) -> Elsewhere:
        begun.append(Elsewhere(looks, *call))
        return begun[-1]

    asked = dump(resolved.spec)
    found = verdicts_before(asked, machine, lambda: False, partial(run, 2), 1)
    given = {"job": asked, "workers": 1, "machine": dataclasses.asdict(machine), "row_tokens": ()}
    assert {str(layout) for layout in found} == {
        str(Layout.from_json(layout)) for layout, _ in background_tracer.answer(given)["verdicts"]
    }
    assert found
    assert verdicts_before("no job", machine, lambda: False, partial(run, 0), 1) == {}
    assert verdicts_before(asked, machine, lambda: True, partial(run, math.inf), 1) == {}
    monkeypatch.setattr(background_trace, "BEFORE", 0.05)
    assert verdicts_before(asked, machine, lambda: False, partial(run, math.inf), 1) == {}
    assert [each.cancelled for each in begun] == [False, False, True, True]
