"""Copies the rows and documents of a run directory to MLflow, in a separate thread.

The run directory is the source of truth; the server has a copy that may lag. The caller appends to the directory
first and then notifies the tracker, which never blocks and never raises. While the server is down, only a number is
kept in memory. When it is back, missing rows are read from the run directory.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from orchestrator.config.outcome import Outcome
from orchestrator.config.redact import connection_problem, redact
from orchestrator.observe.config import TrackedJob, TrackingSpec
from orchestrator.observe.formatting import run_name
from orchestrator.observe.last_status import LOST, last_status
from orchestrator.observe.mlflow_inputs import NamedData, data_in, environment, log_commits, log_data
from orchestrator.observe.mlflow_run import MlflowRun, within
from orchestrator.storage.row_line import EVALS, EVENTS, METRICS, NODES, Row
from orchestrator.storage.run_directory import ORIGIN, RunDir

DOCUMENTS = ("job.yaml", "plan.json", "summary.json", "report.html")
ENVIRONMENT = "environment.txt"
KILLED = "KILLED"
"""MLflow's status of a run that was stopped, or whose controller was killed."""
MLFLOW_STATUS: Mapping[str, str] = {
    Outcome.DONE: "FINISHED",
    Outcome.FAILED: "FAILED",
    Outcome.STOPPED: KILLED,
}
PENDING_ROWS = 5000  # if more rows wait, the run directory is read instead
FLUSH_SECONDS = 1.0
BACKOFF_SECONDS = (1.0, 30.0)  # first and longest pause while a server does not answer
CLOSING_BACKOFF = 0.5
HEAD_START = 30.0
"""Seconds that a run has for its first step before MLflow is imported, which takes as long as a small run's start."""


@dataclass(frozen=True)
class Delivery:
    """The result of a delivery: the number of rows `missing` on the server, the last `problem` as one line, and the
    `refused` names of metrics and parameters, which only the run directory has.
    """

    missing: int
    problem: str | None = None
    refused: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Return one line about what the server has refused; empty if nothing."""
        if not self.refused:
            return ""
        names = ", ".join(self.refused)
        return f"MLflow takes no metric or parameter named {names}: the run directory alone has them"


@dataclass
class _Waiting:
    """The data that the run directory has and the server may lack, besides rows.

    Attributes:
        documents: names of text files.
        evaluations: whether evals.jsonl has rows of evaluations by extra workers.
        nodes: whether nodes.jsonl has rows.
        commits: whether a commit was published or removed.
    """

    documents: set[str]
    evaluations: bool = False
    nodes: bool = False
    commits: bool = False

    def __bool__(self) -> bool:
        return bool(self.documents) or self.evaluations or self.nodes or self.commits


class Tracker:
    """Copies all attempts of a run to one MLflow run. Does nothing if the job names no server."""

    def __init__(
        self,
        job: TrackedJob,
        run_dir: RunDir,
        status: str = "RUNNING",
        ended: float | None = None,
        begins: Callable[[MlflowRun], None] | None = None,
    ) -> None:
        """Start to copy.

        Args:
            job: what MLflow shows of the job, and where.
            run_dir: the run directory.
            status: the status of the MLflow run, see `status`.
            ended: when the run ended, in unix seconds; None for the time of its last event.
            begins: called with the MLflow run each time that it is found or made.
        """
        self._ended = ended
        self._begins = begins
        self.problem: str | None = None
        self._job = job
        self._run_dir = run_dir
        self._changed = threading.Condition()
        self._rows: deque[Row] = deque()
        self._behind = True  # some rows are not in self._rows and must be read from the run directory
        self._beside = job.evaluates_beside
        self._waiting = self._everything()
        self._data = list[NamedData]()
        self._status = status
        self._sent_status = ""
        self._newest = self._last = -1
        self._deadline: float | None = None
        self._run: MlflowRun | None = None
        self._refused: frozenset[str] = frozenset()
        self._thread = threading.Thread(target=self._work, name="mlflow-tracker", daemon=True)
        if job.tracking:
            self._thread.start()

    def rows(self, rows: Iterable[Row]) -> None:
        """Notify that these rows were appended to metrics.jsonl."""
        with self._changed:
            for row in rows:
                self._newest = max(self._newest, row.get("step", -1))
                if not self._behind:
                    self._rows.append(row)
            if len(self._rows) > PENDING_ROWS:
                self._fall_behind()
            self._changed.notify()

    def evaluated(self) -> None:
        """Notify that rows of evaluations by extra workers were appended to evals.jsonl."""
        with self._changed:
            self._waiting.evaluations = True
            self._waiting.commits = True
            self._changed.notify()

    def nodes(self) -> None:
        """Notify that rows were appended to nodes.jsonl."""
        with self._changed:
            self._waiting.nodes = True
            self._changed.notify()

    def committed(self) -> None:
        """Notify that a commit was published or removed."""
        with self._changed:
            self._waiting.commits = True
            self._changed.notify()

    def document(self, name: str) -> None:
        """Notify that a text file of the run directory was written: one of DOCUMENTS, or another."""
        with self._changed:
            self._waiting.documents.add(name)
            self._changed.notify()

    def status(self, status: str) -> None:
        """Set the status of the MLflow run: RUNNING, FINISHED, FAILED or KILLED."""
        with self._changed:
            self._status = status
            self._changed.notify()

    def close(self, timeout: float) -> Delivery:
        """Deliver the rest, for at most `timeout` seconds. Return what could not be delivered."""
        if not self._job.tracking:
            return Delivery(0)
        with self._changed:
            self._deadline = time.monotonic() + timeout
            self._changed.notify()
        self._thread.join(timeout)
        late = None if self._idle() else f"no answer within {timeout:g} s"
        missing = max(0, self._newest - max(self._last, 0))
        return Delivery(missing, self.problem or late, tuple(sorted(self._refused)))

    def _work(self) -> None:
        backoff = BACKOFF_SECONDS[0]
        with self._changed:
            self._changed.wait_for(lambda: self._newest >= 0 or self._closing(), HEAD_START)
        while True:
            try:
                self._deliver()
                self.problem = None
                pause = FLUSH_SECONDS
                backoff = BACKOFF_SECONDS[0]
            except Exception as error:  # telemetry must not stop a run, and MLflow may raise anything
                self.problem = connection_problem(error)
                with self._changed:
                    self._run = None
                    self._sent_status = ""
                    self._waiting = self._everything(self._waiting.documents)
                    self._fall_behind()
                pause = backoff
                backoff = min(2 * backoff, BACKOFF_SECONDS[1])
            if not self._wait(pause):
                return

    def _wait(self, pause: float) -> bool:
        """Wait `pause` seconds, and then for something to deliver. Return False when the thread should end."""
        with self._changed:
            if not self._changed.wait_for(self._closing, pause):
                self._changed.wait_for(lambda: self._closing() or not self._idle())
                return True
            if self._idle() or time.monotonic() >= (self._deadline or 0):
                return False
            if self.problem:
                self._changed.wait(CLOSING_BACKOFF)
            return True

    def _closing(self) -> bool:
        return self._deadline is not None

    def _idle(self) -> bool:
        return not (self._rows or self._behind or self._waiting or self._status != self._sent_status)

    def _everything(self, documents: Set[str] = frozenset()) -> _Waiting:
        """Return that all of the run waits, and these documents besides the usual ones."""
        return _Waiting({*DOCUMENTS, *documents}, evaluations=self._beside, nodes=True, commits=True)

    def _fall_behind(self) -> None:
        self._rows.clear()
        self._behind = True

    def _deliver(self) -> None:
        """Deliver once: connect if needed, then rows, then documents, then the status."""
        if self._newest < 0:
            self._newest = (self._run_dir.log(METRICS).last() or {}).get("step", -1)
        if self._run is None:
            self._run = connect(
                self._job.name,
                self._job.tracking,
                self._run_dir,
                self._job.parameters,
            )
            self._run.log_document(ENVIRONMENT, environment())
            if (origin := self._run_dir.read_json_or_empty(ORIGIN)).get("run"):
                self._run.log_origin(origin["run"], origin["step"])
            if self._begins is not None:
                self._begins(self._run)
        run = self._run
        self._deliver_rows(run)
        with self._changed:
            waiting = self._waiting
            status = self._status
            self._waiting = _Waiting(set())
        if waiting.evaluations:
            run.log_evaluations(self._run_dir.log(EVALS).rows())
        if waiting.nodes:
            run.log_nodes(self._run_dir.log(NODES).after(run.last_node, "number"))
        self._refused |= run.refused
        for name in sorted(waiting.documents):
            if (text := self._run_dir.read_text(name)) is not None:
                run.log_document(name, text)
        if status != self._sent_status:
            self._deliver_status(run, status)
        if waiting.commits:
            self._deliver_commits(run)

    def _deliver_rows(self, run: MlflowRun) -> None:
        log = self._run_dir.log(METRICS)
        with self._changed:
            waiting: Iterable[Row] = list(self._rows)
            behind = self._behind
            cuts = log.cuts
            self._behind = False
        if behind:
            # Rows are in the run directory before the tracker is notified, so this reads all of them.
            waiting = itertools.takewhile(lambda _: log.cuts == cuts, log.after(run.received.since))
        run.log_rows(waiting)
        self._last = run.received.last
        with self._changed:
            if behind and log.cuts != cuts:  # rows were removed while they were read
                self._fall_behind()
            while self._rows and not run.received.lacks(self._rows[0]):
                self._rows.popleft()
            if not (self._rows or self._behind):
                self._newest = self._last  # rolled back steps are no longer missing

    def _deliver_status(self, run: MlflowRun, status: str) -> None:
        if status != "RUNNING":
            events = list(self._run_dir.log(EVENTS).rows())
            run.log_evaluations(event["tasks"] for event in events if event.get("tasks"))
            run.log_document(EVENTS, "".join(f"{json.dumps(event)}\n" for event in redact(events)))
        run.set_status(status, self._ended or (self._run_dir.log(EVENTS).last() or {}).get("time"))
        self._sent_status = status

    def _deliver_commits(self, run: MlflowRun) -> None:
        """Last, because a server of an earlier version has no logged models."""
        if not self._data and (data := data_in(self._run_dir, self._job.held_out)):
            log_data(run, data)
            self._data = data
        try:
            log_commits(run, run_name(self._job.name, self._run_dir.name), self._run_dir, self._data)
        except Exception as error:
            if getattr(error, "error_code", "") != "ENDPOINT_NOT_FOUND":
                raise


def deliver(job: TrackedJob, run_dir: RunDir, timeout: float = 60.0) -> Delivery:
    """Update the server from a run directory, and wait until it is complete. Never raises.

    For a run whose server was down at its end, which was trained on another machine, or which no controller drives any
    more.
    """
    status = last_status(run_dir)
    if status.get("phase") == LOST:
        return Tracker(job, run_dir, KILLED, ended=status["time"]).close(timeout)
    phase = (run_dir.log(EVENTS).last() or {}).get("phase")
    return Tracker(job, run_dir, MLFLOW_STATUS.get(str(phase), "RUNNING")).close(timeout)


def rows_on_server(
    name: str,
    tracking: TrackingSpec | None,
    run_dir: RunDir,
    missing: Sequence[tuple[int, int]],
    timeout: float,
) -> list[Row]:
    """Return the rows of these steps as far as the server has them: numbers only, no texts.

    Never raises. Empty if the server does not answer within `timeout` seconds.
    """
    closing = threading.Event()
    try:
        return within(timeout, lambda: connect(name, tracking, run_dir, None).rows(missing, closing))
    except Exception:  # telemetry: MLflow may raise anything
        return []
    finally:
        closing.set()


def connect(
    name: str, tracking: TrackingSpec | None, run_dir: RunDir, params: Mapping[str, Any] | None
) -> MlflowRun:
    """Return the MLflow run of a run directory.

    Args:
        name: the name of the job.
        tracking: the tracking server.
        run_dir: the run directory.
        params: the job as plain data, for a run that is made if it does not exist; None not to make it.
    """
    if (born := born_of(run_dir)) is None:
        raise LookupError("the run has no events yet")
    assert tracking
    name = run_name(name, run_dir.name)
    return MlflowRun(
        tracking.uri, tracking.experiment, name=name, run_uri=run_dir.uri, born=born, params=params
    )


def born_of(run_dir: RunDir) -> float | None:
    """Return when a run began, which distinguishes it from earlier runs in the same directory; None before it begins.

    An extended run is a separate run in MLflow, because MLflow never replaces parameters or rows.
    """
    born: float | None = None
    for event in run_dir.log(EVENTS).rows():
        if born is None or event.get("extended"):
            born = event["time"]
    return born
