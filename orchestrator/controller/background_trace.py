"""What the layout that trains needs by the trace of its program, found while it trains and written into plan.json."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import IO, Any

from cluster.workers.program import command_of
from orchestrator.config.spec import JobSpec, dump
from orchestrator.parallel.layout import Layout
from orchestrator.planner.device import Machine
from orchestrator.planner.plan import Verdict
from orchestrator.planner.planner import Planner

AFTER = 120.0
"""Seconds that a layout has trained before it is traced, which takes some seconds of a processor: too many for a short
run."""
AT_END = 5.0
"""Seconds that the end of a run waits for a trace that is under way."""
BEFORE = 90.0
"""Seconds that a start waits for the traces of layouts that may be too large."""
LOOK = 0.2
"""Seconds between two looks at them."""


def verdicts_before(
    spec: JobSpec, machine: Machine, is_stopped: Callable[[], bool], workers: int
) -> dict[Layout, Verdict]:
    """What traces say of layouts for so many workers, which a process of its own makes; nothing
    where it fails, takes too long, or the run `is_stopped`: then the formula decides."""
    asked = {"job": dump(spec), "workers": workers, "machine": dataclasses.asdict(machine)}
    end = time.monotonic() + BEFORE
    with tempfile.TemporaryFile() as answer:
        try:
            process = _asked(asked, answer)
        except OSError:
            return {}
        while process.poll() is None and time.monotonic() < end and not is_stopped():
            time.sleep(LOOK)
        process.kill()
        process.wait()
        found = _read(answer).get("verdicts", [])
    return {Layout.from_json(layout): Verdict(**verdict) for layout, verdict in found}


def _asked(asked: dict[str, Any], answer: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start `orchestrator.planner.trace.background_tracer`; it writes its reply to `answer`."""
    process = subprocess.Popen(
        command_of("orchestrator.planner.trace.background_tracer", str(os.getpid())),
        stdin=subprocess.PIPE,
        stdout=answer,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert process.stdin is not None
    with process.stdin as given:
        given.write(json.dumps(asked).encode())
    return process


def _read(answer: IO[bytes]) -> dict[str, Any]:
    """What the process has said; empty if it has failed."""
    answer.seek(0)
    try:
        found: dict[str, Any] = json.loads(answer.read().splitlines()[-1])
    except (IndexError, ValueError):
        return {}
    return found


class TraceBeside:
    """Predicts the layout that starts, and traces once each that trains for long enough. `write` is given what
    plan.json is to hold."""

    def __init__(self, spec: JobSpec, write: Callable[[dict[str, Any]], None]) -> None:
        self._spec, self._write = spec, write
        self._document: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}
        self._layout = Layout()
        self._known: dict[Layout, dict[str, Any]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] | None = None
        self._trains_since: float | None = None
        self._tried: set[Layout] = set()

    def begin(self, planner: Planner, attempt: int, workers: int) -> None:
        """Write the plan for so many workers, with its trace if there is one already."""
        self.stop()
        plan = planner.plan(workers)
        self._layout, self._trains_since = plan.chosen.layout, None
        self._document = {"attempt": attempt, **planner.document(plan)}
        self._asked = {
            "job": dump(self._spec),
            "layout": self._layout.to_json(),
            "by_stage": plan.by_stage,
            "formula": plan.chosen.memory,
            "memory": plan.machine.memory,
        }
        self._tell()

    def look(self, trains: bool) -> None:
        """Trace the layout once it has trained for a while, and write what was found; called often, `trains` where it
        has made a step."""
        if self._process is not None:
            if self._process.poll() is not None:
                self._take()
            return
        now = time.monotonic()
        if trains and self._trains_since is None:
            self._trains_since = now
        if self._trains_since is None or self._layout in self._tried or self._layout in self._known:
            return
        if now - self._trains_since >= AFTER:
            self._start()

    def end(self) -> None:
        """At the end of the run: wait a little for a trace that is under way."""
        if self._process is None:
            return
        try:
            self._process.wait(AT_END)
        except subprocess.TimeoutExpired:
            self.stop()
        else:
            self._take()

    def stop(self) -> None:
        """End the trace that is under way; the layout may be traced when it starts again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._tried.discard(self._layout)
        self._close()

    def _start(self) -> None:
        self._tried.add(self._layout)
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = _asked(self._asked, self._answer)
        except OSError:  # it says no more than the formula does
            self.stop()
            self._tried.add(self._layout)

    def _take(self) -> None:
        """Write the plan with what the process has found; if it has failed, the formula's figures stay."""
        assert self._answer is not None
        found = _read(self._answer)
        self._close()
        if found:
            self._known[self._layout] = found
            self._tell()

    def _close(self) -> None:
        if self._answer is not None:
            self._answer.close()
        self._process = self._answer = None

    def _tell(self) -> None:
        document = dict(self._document)
        if traced := self._known.get(self._layout):
            document["predicted"] = {**document["predicted"], **traced["predicted"]}
            document["memory"] = traced["memory"]
        self._write(document)
