"""Profiles of a rank's next steps, requested during training: traces, and tables of the operators that took longest.

torch's profiler changes no number. It is imported on the first request.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from cluster.workers.worker_context import WorkerContext
from orchestrator.parallel.step_clock import StepClock
from orchestrator.train.flight_record import PROFILES, TIMELINE, write
from orchestrator.train.task import Task

TIMELINE_STEP = 8
"""The step of an attempt whose timeline is recorded; earlier ones are slower."""
MAX_ACTIONS = 5000
"""Maximum actions of a timeline; a longer one is not written."""
OPERATORS = 40
"""Number of operators in a table: those that took longest."""
COMMUNICATION = ("c10d::", "gloo:", "nccl:", "ncclDevKernel", "ncclKernel")
"""Prefixes of the names of collectives."""
MEMORY_EVENTS = 100_000
"""Maximum allocations in a GPU memory snapshot."""


class StepProfiler:
    """Profiles the steps requested by `WorkerContext.ask_profile`, {"id", "ranks", "steps"}.

    It is a context manager: on exit it writes a profile in progress. A profile that fails is reported in the rank's log
    and changes nothing else.
    """

    def __init__(self, context: WorkerContext, task: Task, clock: Callable[[], StepClock]) -> None:
        """Create a profiler. `clock` returns the clock of the current engine.

        It also writes the timeline of a pipeline in one early step.
        """
        self._context = context
        self._run = task.run
        self._clock = clock
        self._attempt, self._steps = task.attempt, 0
        self._request: dict[str, Any] = {}
        self._profile: Any = None
        self._first, self._start_time = 0, 0.0

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is not None:
            self._guarded(lambda: self._end(self._context.step))

    def next(self, step: int) -> None:
        """Start or end profiles and timelines before step number `step` begins."""
        self._steps += 1
        if self._steps == TIMELINE_STEP:
            self._clock().record()
        elif self._steps == TIMELINE_STEP + 1:
            self._guarded(lambda: self._write_timeline(step - 1))
        if self._profile is not None and step >= self._first + int(self._request["steps"]):
            self._guarded(lambda: self._end(step - 1))
        request = self._context.take_profile()
        if request and self._profile is None and self._context.rank_info.rank in request["ranks"]:
            self._request, self._first = request, step
            self._guarded(self._begin)

    def _write_timeline(self, step: int) -> None:
        """Write the timeline in a background thread, so that training does not wait."""
        timeline, self._clock().timeline = self._clock().timeline, None
        actions = timeline.actions() if timeline is not None else []
        if not actions or len(actions) > MAX_ACTIONS:
            return
        content_json = {"attempt": self._attempt, "step": step, "actions": actions}
        name = f"rank-{self._context.rank_info.rank}.json"
        content = json.dumps(content_json).encode()

        def work() -> None:
            # the store may raise anything, and nothing depends on the timeline
            with contextlib.suppress(Exception):
                write(f"{self._run}/{TIMELINE}", {name: content})

        threading.Thread(target=work, name="timeline", daemon=True).start()

    def _guarded(self, call: Any) -> None:
        """Make a call that may take longer than a step, and may fail without harm."""
        self._context.set_waiting(True)
        try:
            call()
        except Exception as error:
            self._profile = None
            print(f"the profile failed: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            self._context.set_waiting(False)

    def _begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self._profile = profile(activities=activities)
        self._profile.start()
        self._start_time = time.perf_counter()

    def _end(self, last: int) -> None:
        """Stop after step `last`, and write the profile."""
        seconds = time.perf_counter() - self._start_time
        profile, self._profile = self._profile, None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profile.stop()
        rank = self._context.rank_info.rank
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / f"rank-{rank}.trace.json.gz"
            profile.export_chrome_trace(str(trace))
            files = [trace]
            if torch.cuda.is_available():
                files.append(Path(folder) / f"rank-{rank}.memory.pickle")
                torch.cuda.memory._dump_snapshot(str(files[-1]))
                torch.cuda.memory._record_memory_history(enabled=None)
            summary = {
                "rank": rank,
                "steps": [self._first, last],
                "seconds": seconds,
                "files": [file.name for file in files],
                **tables(profile.key_averages()),
            }
            self._write(files, summary)

    def _write(self, files: Iterable[Path], summary: Mapping[str, Any]) -> None:
        """Write the files, then the tables. The tables mark the profile as complete."""
        from orchestrator.storage.run_directory import RunDir

        run = RunDir(self._run)
        folder = f"{PROFILES}/{self._request['id']}"
        write(run.at(folder), {file.name: file.read_bytes() for file in files})
        run.write_json(f"{folder}/rank-{summary['rank']}.json", summary)


def tables(averages: Iterable[Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the operators with the longest own time, and the collectives, from torch's averages by name."""
    rows = [
        {
            "name": str(average.key),
            "calls": int(average.count),
            "cpu_seconds": average.self_cpu_time_total / 1e6,
            "device_seconds": average.self_device_time_total / 1e6,
            "whole_seconds": max(average.cpu_time_total, average.device_time_total) / 1e6,
        }
        for average in averages
    ]
    collectives = [row for row in rows if row["name"].startswith(COMMUNICATION)]
    rows.sort(key=lambda row: -(row["device_seconds"] or 0.0) - row["cpu_seconds"])
    collectives.sort(key=lambda row: -row["whole_seconds"])
    return {"operators": rows[:OPERATORS], "communication": collectives[:OPERATORS]}
