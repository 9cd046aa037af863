"""Copies of a run outside its directory: in MLflow, and in the job's other sinks."""

from __future__ import annotations

import dataclasses

from orchestrator.observe.config import TrackedJob
from orchestrator.observe.mlflow_dead_runs import end_other_dead_runs
from orchestrator.observe.mlflow_delivery import Tracker
from orchestrator.observe.sinks.config import SinkSpec
from orchestrator.observe.sinks.sink_process import SinkProcess
from orchestrator.storage.run_directory import RunDir


class RunCopies:
    """Copies a run once it is known to be able to start, so that no server shows a run whose job is wrong.

    Attributes:
        tracker: the copy in MLflow. It does nothing before `begin`.
    """

    def __init__(self, job: TrackedJob, sinks: SinkSpec | None, run: RunDir) -> None:
        """Copy nothing yet.

        Args:
            job: what MLflow shows of the job, and where.
            sinks: the other sinks.
            run: the run directory.
        """
        self._job = job
        self._spec = sinks
        self._run = run
        self.tracker = Tracker(dataclasses.replace(job, tracking=None), run)
        self._sinks = SinkProcess(None, run)

    def begin(self) -> None:
        """Start to copy."""
        self._sinks = SinkProcess(self._spec, self._run)
        self.tracker = Tracker(self._job, self._run, begins=end_other_dead_runs)

    def close(self) -> None:
        """End the process of the sinks. `finish` closes the tracker, which may have much left to send."""
        self._sinks.close()
