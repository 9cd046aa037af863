"""A layout that trains is traced in a process of its own, and plan.json has what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import job, write_text

from orchestrator.config.spec import JobSpec, dump, parse
from orchestrator.controller import background_trace
from orchestrator.controller.background_trace import BackgroundTrace
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device import Machine
from orchestrator.planner.planner import Planner
from orchestrator.resolve.resolved_job import resolve

MACHINE = Machine(64e9, 1e12)


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    return parse(job(write_text(tmp_path, 20_000)))


@pytest.fixture
def planner(spec: JobSpec) -> Planner:
    return Planner(demand_of(spec), resolve(spec).shape, MACHINE)


def test_a_trace_replaces_the_formula(
    spec: JobSpec, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_trace, "AFTER", 0.0)
    monkeypatch.setattr(background_trace, "AT_END", 120.0)
    written: list[dict[str, Any]] = []
    beside = BackgroundTrace(dump(spec), written.append)
    beside.begin(planner, 1, spec.resources.workers.max)
    before = written[-1]
    assert before["memory"] == {"source": "formula"}
    assert before["predicted"]["memory_bytes"] == max(before["predicted"]["memory_bytes_by_rank"])
    beside.look(trains=False)
    beside.end()
    assert len(written) == 1
    beside.look(trains=True)
    beside.end()
    after = written[-1]
    assert after["memory"]["source"] == "trace"
    assert after["memory"]["ranks"][0]["peak"] == max(after["predicted"]["peak_bytes_by_rank"])
    assert after["memory"]["formula_error"] == pytest.approx(0.0, abs=0.5)
    assert all(after[key] == before[key] for key in ("attempt", "chosen", "candidates"))
    beside.begin(planner, 2, spec.resources.workers.max)  # of a layout that is known nothing is traced again
    assert written[-1] == {**after, "attempt": 2}
    beside.look(trains=True)
    beside.end()
    assert len(written) == 3


def test_a_short_run_traces_nothing(spec: JobSpec, planner: Planner) -> None:
    written: list[dict[str, Any]] = []
    beside = BackgroundTrace(dump(spec), written.append)
    beside.begin(planner, 1, spec.resources.workers.max)
    for _ in range(3):
        beside.look(trains=True)
    beside.end()
    assert len(written) == 1


def test_a_process_that_fails_leaves_the_formula(
    spec: JobSpec, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_trace, "AFTER", 0.0)
    monkeypatch.setattr(background_trace, "AT_END", 60.0)
    monkeypatch.setattr(background_trace, "command_of", lambda *_, **__: ["false"])
    written: list[dict[str, Any]] = []
    beside = BackgroundTrace(dump(spec), written.append)
    beside.begin(planner, 1, spec.resources.workers.max)
    for _ in range(3):
        beside.look(trains=True)
        beside.end()
    assert [each["memory"] for each in written] == [{"source": "formula"}]
