"""An MLflow run with nested runs, for a search or a chain, kept up to date while these run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from orchestrator.observe.config import TrackingSpec
from orchestrator.observe.formatting import run_name
from orchestrator.observe.mlflow_delivery import BACKOFF_SECONDS, born_of
from orchestrator.observe.mlflow_run import PARENT_TAG, MlflowRun, as_key, run_of, within
from orchestrator.storage.run_directory import RunDir

EVERY = 5.0
"""Seconds between two updates."""
LAST = 10.0
"""Seconds that the end of an interrupted search or chain waits for a server."""


class ParentRun:
    """The MLflow run of a directory. It differs from that of a previous occupant of the directory, see `MlflowRun`.

    Everything may raise whatever MLflow and its transport raise. `nested` are the ids of the nested runs by the URI
    of their run directory.
    """

    def __init__(
        self, tracking: TrackingSpec, name: str, run_dir: RunDir, born: float, params: Mapping[str, Any]
    ) -> None:
        called = run_name(name, run_dir.name)
        self._run = MlflowRun(
            tracking.uri, tracking.experiment, name=called, run_uri=run_dir.uri, born=born, params=params
        )
        self.client = self._run.client
        self.run_id = self._run.run_id
        self.nested: dict[str, str] = {}
        self._run_dir = run_dir
        self._figures: dict[str, float] = dict(self.client.get_run(self.run_id).data.metrics)

    def nest(self, runs: Iterable[RunDir]) -> None:
        """Nest those of these runs that the server has."""
        for run in runs:
            born = None if run.uri in self.nested else born_of(run)
            run_id = None if born is None else run_of(self.client, self._run.experiment, run.uri, born)
            if run_id is not None:
                self.client.set_tag(run_id, PARENT_TAG, self.run_id)
                self.nested[run.uri] = run_id

    def log_figures(self, figures: Mapping[str, float | None], step: int, **tags: str) -> None:
        """Log the figures that have a value and have changed, and the tags."""
        from mlflow.entities import Metric, RunTag

        values = {as_key(key): value for key, value in figures.items() if value is not None}
        new = {key: value for key, value in values.items() if self._figures.get(key) != value}
        now = int(time.time() * 1000)
        if new:
            metrics = [Metric(key, float(value), now, step) for key, value in new.items()]
            self._run.log_batch(metrics, tags=[RunTag(*tag) for tag in tags.items()])
            self._figures |= new

    def log_documents(self, names: Iterable[str]) -> None:
        """Log those of these files that exist in the directory."""
        for name in names:
            if (text := self._run_dir.read_text(name)) is not None:
                self._run.log_document(name, text)

    def set_status(self, status: str, at: float | None = None) -> None:
        """See `MlflowRun.set_status`."""
        self._run.set_status(status, at)

    def end_nested(self, runs: Iterable[RunDir] | None = None) -> None:
        """Mark nested runs that still count as running as killed: these, or all."""
        uris = self.nested if runs is None else [run.uri for run in runs if run.uri in self.nested]
        for run_id in map(self.nested.__getitem__, uris):
            if self.client.get_run(run_id).info.status == "RUNNING":
                self.client.set_terminated(run_id, "KILLED")


class Follower:
    """Keeps a parent run up to date in a separate thread that never raises. Use it with `with`, around the work.

    `begin` finds the run or creates it, `update` brings it up to date. If the work ends with an exception, the run is
    marked as failed, or as killed for a KeyboardInterrupt.
    """

    def __init__(self, begin: Callable[[], ParentRun], update: Callable[[ParentRun], None]) -> None:
        self._begin = begin
        self._update = update
        self._parent: ParentRun | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow-parent", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        parent = self._parent
        if kind is None or parent is None:
            self._thread.join(LAST)
            return
        with contextlib.suppress(Exception):  # telemetry: MLflow may raise anything
            status = "KILLED" if issubclass(kind, KeyboardInterrupt) else "FAILED"
            within(LAST, lambda: self._end(parent, status))

    def _end(self, parent: ParentRun, status: str) -> None:
        self._thread.join()
        parent.end_nested()
        parent.set_status(status)

    def _work(self) -> None:
        pause = 0.0
        while not self._closing.wait(pause):
            try:
                self._parent = self._parent or self._begin()
                self._update(self._parent)
                pause = EVERY
            except Exception:  # telemetry: MLflow may raise anything; the end of the work reports the problem
                pause = min(max(2 * pause, BACKOFF_SECONDS[0]), BACKOFF_SECONDS[1])
