"""Predict the memory of layouts by tracing their program in a separate process, and write plan.json."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from cluster.workers.cluster import RemoteTask
from cluster.workers.program import command_of
from orchestrator.parallel.layout import Layout
from orchestrator.planner.choose_layout import Verdict
from orchestrator.planner.device import Machine
from orchestrator.planner.planner import Planner
from orchestrator.planner.trace.background_tracer import answer as traced_answer

AFTER = 120.0
"""Seconds that a layout trains before it is traced. A trace takes seconds of CPU time, too much for a short run."""
AT_END = 5.0
"""Seconds that the end of a run waits for a trace in progress."""
BEFORE = 90.0
"""Seconds that a start waits for traces of layouts that may not fit in memory."""
LOOK = 0.2
"""Seconds between two polls of those traces."""


def verdicts_before(
    job: str,
    machine: Machine,
    is_stopped: Callable[[], bool],
    run_imported: Callable[..., RemoteTask] | None,
    workers: int,
    row_tokens: Sequence[tuple[int, float]] = (),
) -> dict[Layout, Verdict]:
    """Trace layouts before a start, in a separate process, and return the verdicts.

    Returns nothing if the process fails or takes too long, or if the run is stopped. The formula decides then.

    Args:
        job: the job as YAML.
        machine: one worker.
        is_stopped: returns whether the run is to stop.
        run_imported: calls a function in a process that has the imports done; None without such a process.
        workers: the number of workers to plan for.
        row_tokens: see `ModelShape`.
    """
    request = {
        "job": job,
        "row_tokens": row_tokens,
        "workers": workers,
        "machine": dataclasses.asdict(machine),
    }
    end = time.monotonic() + BEFORE
    if run_imported is not None:
        reply = _reply_of(run_imported, request, lambda: time.monotonic() > end or is_stopped())
        return _verdicts_in(reply)
    with tempfile.TemporaryFile() as answer:
        try:
            process = _start_tracer(request, answer)
        except OSError:
            return {}
        while process.poll() is None and time.monotonic() < end and not is_stopped():
            time.sleep(LOOK)
        process.kill()
        process.wait()
        return _verdicts_in(_read(answer))


def _verdicts_in(reply: dict[str, Any]) -> dict[Layout, Verdict]:
    verdicts = reply.get("verdicts", [])
    return {Layout.from_json(layout): Verdict(**verdict) for layout, verdict in verdicts}


def _reply_of(
    run_imported: Callable[..., RemoteTask], request: dict[str, Any], is_over: Callable[[], bool]
) -> dict[str, Any]:
    """Return the reply of the tracer in another process; empty if it fails, or if `is_over` before it replies."""
    try:
        task = run_imported(traced_answer, request)
        while not task.done():
            if is_over():
                task.cancel()
                return {}
            time.sleep(LOOK)
        reply: dict[str, Any] = task.result()
        return reply
    except Exception:  # whatever fails there, the formula decides
        return {}


def _start_tracer(request: dict[str, Any], answer: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start `orchestrator.planner.trace.background_tracer`. It writes its reply to the file `answer`."""
    process = subprocess.Popen(
        command_of("orchestrator.planner.trace.background_tracer", str(os.getpid())),
        stdin=subprocess.PIPE,
        stdout=answer,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps(request).encode())
    return process


def _read(answer: IO[bytes]) -> dict[str, Any]:
    """Return the reply of the process, empty if it has failed."""
    answer.seek(0)
    try:
        reply: dict[str, Any] = json.loads(answer.read().splitlines()[-1])
    except (IndexError, ValueError):
        return {}
    return reply


class BackgroundTrace:
    """Writes the plan of the layout that starts, and traces each layout once it has trained for long enough."""

    def __init__(self, job: str, write: Callable[[dict[str, Any]], None]) -> None:
        """`write` gets the content of plan.json."""
        self._job = job
        self._write = write
        self._layout = Layout()
        """The layout that starts or trains."""
        self._document: dict[str, Any] = {}
        """Its plan by the formula."""
        self._request: dict[str, Any] = {}
        """The request to trace it."""
        self._trains_since: float | None = None
        """The monotonic time of its first step, None before that."""
        self._traced: dict[Layout, dict[str, Any]] = {}
        """The results of traces."""
        self._tried: set[Layout] = set()
        """Layouts whose trace was started."""
        self._process: subprocess.Popen[bytes] | None = None
        """The trace in progress."""
        self._answer: IO[bytes] | None = None
        """The file with its reply."""

    def begin(self, planner: Planner, attempt: int, workers: int) -> None:
        """Write the plan of a layout that starts, with its trace if it was traced before.

        Args:
            planner: plans the layout.
            attempt: the attempt that starts.
            workers: the number of its workers.
        """
        self.stop()
        plan = planner.plan(workers)
        self._layout = plan.chosen.layout
        self._trains_since = None
        self._document = {"attempt": attempt, **planner.document(plan)}
        self._request = {
            "job": self._job,
            "layout": self._layout.to_json(),
            "by_stage": plan.by_stage,
            "formula": plan.chosen.memory,
            "memory": plan.machine.memory,
        }
        self._write_plan()

    def look(self, trains: bool) -> None:
        """Trace the layout once it has trained for AFTER seconds, and write the result. Call it often.

        `trains` says that the layout has made a step since the last call.
        """
        if self._process is not None:
            if self._process.poll() is not None:
                self._take()
            return
        now = time.monotonic()
        if trains and self._trains_since is None:
            self._trains_since = now
        if self._trains_since is None or self._layout in self._tried or self._layout in self._traced:
            return
        if now - self._trains_since >= AFTER:
            self._start()

    def end(self) -> None:
        """Wait a little for a trace in progress, at the end of the run."""
        if self._process is None:
            return
        try:
            self._process.wait(AT_END)
        except subprocess.TimeoutExpired:
            self.stop()
        else:
            self._take()

    def stop(self) -> None:
        """Stop the trace in progress. The layout may be traced again when it starts again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._tried.discard(self._layout)
        self._close()

    def _start(self) -> None:
        self._tried.add(self._layout)
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = _start_tracer(self._request, self._answer)
        except OSError:  # the formula's value stays
            self.stop()
            self._tried.add(self._layout)

    def _take(self) -> None:
        """Write the plan with the result of the trace. If the trace has failed, the formula's figures stay."""
        assert self._answer is not None
        result = _read(self._answer)
        self._close()
        if result:
            self._traced[self._layout] = result
            self._write_plan()

    def _close(self) -> None:
        if self._answer is not None:
            self._answer.close()
        self._process = self._answer = None

    def _write_plan(self) -> None:
        document = dict(self._document)
        if traced := self._traced.get(self._layout):
            document["predicted"] = {**document["predicted"], **traced["predicted"]}
            document["memory"] = traced["memory"]
        self._write(document)
