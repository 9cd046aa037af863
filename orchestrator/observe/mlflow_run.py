"""One run on an MLflow server: found by its run directory or created, and continued after its last logged step.

Everything here may raise whatever MLflow and its transport raise; `tracker` handles it. MLflow is imported when the
first object is created. The import takes seconds, so this must not happen in the controller's thread.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import subprocess
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from cluster.workers.node_metrics import SECONDS
from cluster.workers.program import ROOT
from orchestrator.config.metric_names import by_name
from orchestrator.config.redact import redact
from orchestrator.observe.mlflow_client import SQLITE, client_of
from orchestrator.observe.sink_cursor import Received
from orchestrator.storage.row_line import OF_LAYERS, Row, evaluations_in, layers_in

VERSION_TAG = "orchestrator.version"
COMMIT_TAG = "mlflow.source.git.commit"
NAME_TAG = "mlflow.source.name"
TYPE_TAG = "mlflow.source.type"
TIMEOUT = 5.0


def code_tags() -> dict[str, str]:
    """Return the program's version and, for a checkout, the commit, with `-dirty` if files have changed since.

    For the user's own code, every commit of the run has a hash.
    """
    tags = {
        VERSION_TAG: metadata.version("training-orchestrator"),
        NAME_TAG: "orchestrator",
        TYPE_TAG: "PROJECT",
    }
    if (ROOT / ".git").exists():
        try:
            commit = _git("rev-parse", "HEAD")
            tags[COMMIT_TAG] = f"{commit}-dirty" if _git("status", "--porcelain", "-uno") else commit
        except (OSError, subprocess.SubprocessError):
            pass  # git is missing, or refuses
    return tags


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    return done.stdout.strip()


T = TypeVar("T")

METRICS_A_BATCH = 900  # 1000 including the tags
PARAMS_A_BATCH = 100
VALUE_LENGTH = 6000
KEY_LENGTH = 250
INTEGERS = ("step", "attempt", "tokens", "memory_bytes")
"""Row metrics that are integers; MLflow stores all metrics as floats."""
URI_TAG = "orchestrator.run_uri"
BORN_TAG = "orchestrator.born"
LAST_TAG, SAMPLES_TAG = "orchestrator.last_step", "orchestrator.last_samples"
"""The last logged step, and the samples after the last steps (see `Received`)."""
ATTEMPTS_TAG = "orchestrator.attempts"
"""The first step of each attempt, as JSON: [[step, attempt], ...]."""
ORIGIN_TAG, ORIGIN_RUN_TAG = "orchestrator.continued_from", "orchestrator.continued_run_id"
"""The commit of another run that a run continues, and that run on this server, if it is there."""
LAST_NODE_TAG = "orchestrator.last_node_row"
"""The number of the last logged row of nodes.jsonl."""
SYSTEM = "system/"
"""Prefix of MLflow's system metrics. The node and the metric's name follow."""
PARENT_TAG = "mlflow.parentRunId"
KIND_TAG, KIND = "mlflow.experimentKind", "custom_model_development"
"""The kind of view of an experiment: model training."""
ATTEMPTS_KEPT = 200
"""Number of newest attempts in that tag."""
NO_METRICS = frozenset({"time", "step", "attempt"})
"""Row fields that are coordinates of its metrics."""
# Set unless the user has set them. MLflow's defaults allow minutes for one call, and enable telemetry.
_CLIENT_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class MlflowRun:
    """The run tagged with `run_uri` and `born` (unix seconds of its first event) in `experiment`.

    Two successive runs in the same directory differ in `born`.

    Attributes:
        received: the steps that the server has.
        last_node: the last row of nodes.jsonl that it has.
        client: the MLflow client.
        refused: names of metrics and parameters that the server does not accept.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        name: str,
        run_uri: str,
        born: float,
        params: Mapping[str, Any] | None,
    ) -> None:
        """Find the run or create it. Without `params`, only find it, and raise LookupError if it is missing."""
        for variable, value in _CLIENT_DEFAULTS.items():
            os.environ.setdefault(variable, value)
        import mlflow  # noqa: F401  (sets the level of its logger)

        for chatty in ("mlflow", "alembic"):
            logging.getLogger(chatty).setLevel(logging.ERROR)
        self.client = client_of(uri)
        self.experiment = _experiment(self.client, uri, experiment)
        if run_id := run_of(self.client, self.experiment, run_uri, born):
            run = self.client.get_run(run_id)
        elif params is None:
            raise LookupError(f"there is no run of {run_uri}")
        else:
            tags = _identity(run_uri, born) | code_tags()
            run = self.client.create_run(self.experiment, int(born * 1000), tags, name)
        self.run_id = run.info.run_id
        self.refused: frozenset[str] = frozenset()
        stored_tags = run.data.tags
        # Earlier versions logged the step as a metric.
        last = int(max(float(stored_tags.get(LAST_TAG, -1)), run.data.metrics.get("step", -1)))
        self.received = Received.from_text(last, stored_tags.get(SAMPLES_TAG, "[]"))
        self._attempts: list[list[int]] = json.loads(stored_tags.get(ATTEMPTS_TAG, "[]"))
        self.last_node = int(stored_tags.get(LAST_NODE_TAG, 0))
        beside = (SYSTEM, *(f"{kind}/" for kind in OF_LAYERS))
        self._keys = tuple(key for key in run.data.metrics if not key.startswith(beside))
        if params is not None:
            self._log_params(params, known=run.data.params)

    def log_rows(self, rows: Iterable[Row]) -> None:
        """Log the rows that the server lacks, in order, in batches of full rows; `received` is updated after each
        batch.

        A step that was computed again after a rollback is logged once, as first reported, unless it used other
        samples. Generated texts are one artifact for each evaluation.
        """
        for batch, received in _batches(rows, self.received):
            self._log_samples(evaluations_in(batch))
            metrics = [metric for row in batch for metric in _metrics(row)]
            tags = {key: batch[-1].get(key) for key in ("layout", "samples") if batch[-1].get(key)}
            tags |= {LAST_TAG: received.last, SAMPLES_TAG: received.to_text()}
            tags |= {ATTEMPTS_TAG: self._attempts_with(batch)}
            # A store writes metrics first. So whatever the tags claim exists, even if it is killed in between.
            # One row with statistics of many layers may be more than the server takes at once.
            last = max(len(metrics) - 1, 0) // METRICS_A_BATCH * METRICS_A_BATCH
            for start in range(0, last, METRICS_A_BATCH):
                self.log_batch(metrics[start : start + METRICS_A_BATCH])
            self.log_batch(metrics[last:], tags=_tags(tags))
            self.received = received

    def log_batch(
        self, metrics: Sequence[Any] = (), params: Sequence[Any] = (), tags: Sequence[Any] = ()
    ) -> None:
        """Log these, except names that the server refuses: it refuses everything logged together with such a name.

        Each name is tried alone once, because the accepted names depend on the server's version and store.
        """

        def logged() -> None:
            taken = [[each for each in group if each.key not in self.refused] for group in (metrics, params)]
            self.client.log_batch(self.run_id, metrics=taken[0], params=taken[1], tags=tags)

        try:
            logged()
        except Exception as error:
            if not _is_refusal(error):
                raise
            alone = {each.key: {"metrics": [each]} for each in metrics}
            alone |= {each.key: {"params": [each]} for each in params}
            new = {key for key, batch in alone.items() if key not in self.refused and self._refuses(batch)}
            if not new:
                raise
            self.refused |= new
            logged()

    def _refuses(self, batch: Mapping[str, Any]) -> bool:
        try:
            self.client.log_batch(self.run_id, **batch)
        except Exception as error:
            if not _is_refusal(error):
                raise
            return True
        return False

    def _attempts_with(self, rows: Iterable[Row]) -> str:
        for row in rows:
            attempt = row.get("attempt")
            if isinstance(attempt, int) and (not self._attempts or self._attempts[-1][1] != attempt):
                self._attempts = [*self._attempts, [row["step"], attempt]][-ATTEMPTS_KEPT:]
        return json.dumps(self._attempts)

    def log_nodes(self, rows: Iterable[Row]) -> None:
        """Log the rows of nodes.jsonl after `last_node` as MLflow's system metrics of each node."""
        batch: list[Any] = []
        for row in rows:
            metrics = _node_metrics(row)
            if batch and len(batch) + len(metrics) > METRICS_A_BATCH:
                self._log_node_batch(batch)
                batch = []
            batch += metrics
            self.last_node = row["number"]
        if batch:
            self._log_node_batch(batch)

    def _log_node_batch(self, metrics: list[Any]) -> None:
        self.log_batch(metrics, tags=_tags({LAST_NODE_TAG: self.last_node}))

    def log_evaluations(self, rows: Iterable[Row]) -> None:
        """Log the metrics and samples of these rows of evals.jsonl. Logging them again has no effect."""
        rows = list(rows)
        self._log_samples(rows)
        metrics = [metric for row in rows for metric in _evaluation_metrics(row)]
        for start in range(0, len(metrics), METRICS_A_BATCH):
            self.log_batch(metrics[start : start + METRICS_A_BATCH])

    def rows(self, steps: Sequence[tuple[int, int]], closing: threading.Event) -> list[Row]:
        """Return the logged numbers for these ranges of steps, ends included, as rows; none if `closing` is set in
        the meantime.
        """
        by_step: dict[int, Row] = {}
        for key in self._keys:
            if closing.is_set():
                return []
            logged = self.client.get_metric_history(self.run_id, key)
            for metric in sorted(
                logged, key=lambda each: each.timestamp
            ):  # the time at which a step was last computed
                if "." not in key and any(first <= metric.step <= last for first, last in steps):
                    row = by_step.setdefault(metric.step, self._coordinates(metric))
                    row[key] = int(metric.value) if key in INTEGERS else _as_logged(metric.value)
        return [
            by_step[step]
            for step in sorted(by_step)
            if {"step", "attempt", "step_seconds"} <= by_step[step].keys()
        ]

    def _coordinates(self, metric: Any) -> Row:
        index = bisect_right(self._attempts, metric.step, key=lambda each: each[0])
        coordinates = {"attempt": self._attempts[index - 1][1]} if index else {}
        return {"step": metric.step, "time": metric.timestamp / 1000, **coordinates}

    def log_document(self, name: str, text: str) -> None:
        """Log a text as an artifact, or replace it."""
        self.client.log_text(self.run_id, redact(text), name)

    def _log_samples(self, evaluations: Iterable[Row]) -> None:
        for evaluation in evaluations:
            texts = [
                f"{sample['prompt']}\n=> {sample['text']}\n" for sample in evaluation.get("samples") or ()
            ]
            if texts:
                self.log_document(f"samples/step-{evaluation['step']:08d}.txt", "\n".join(texts))

    def log_origin(self, run_uri: str, step: int) -> None:
        """Record the commit and run that this one continues, and link to that run if it is in the experiment."""
        uri = quotable(redact(run_uri))
        wanted = f"tags.`{URI_TAG}` = '{uri}'"
        runs = self.client.search_runs(
            [self.experiment], wanted, max_results=1, order_by=["attributes.start_time DESC"]
        )
        linked = {ORIGIN_RUN_TAG: runs[0].info.run_id} if runs else {}
        self.client.log_batch(self.run_id, tags=_tags({ORIGIN_TAG: f"{uri}@{step}"} | linked))

    def set_status(self, status: str, at: float | None = None) -> None:
        """Set the status RUNNING, FINISHED, FAILED or KILLED, at unix seconds `at`."""
        if status == "RUNNING":
            self.client.update_run(self.run_id, status)
        else:
            self.client.set_terminated(self.run_id, status, None if at is None else int(at * 1000))

    def _log_params(self, params: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """Log parameters that the server lacks. They cannot be changed later, so an edited job keeps its first
        values.
        """
        from mlflow.entities import Param

        flat = {as_key(key): str(value)[:VALUE_LENGTH] for key, value in flatten(redact(dict(params)))}
        new = [Param(key, value) for key, value in flat.items() if key not in known]
        for start in range(0, len(new), PARAMS_A_BATCH):
            self.log_batch(params=new[start : start + PARAMS_A_BATCH])


def _as_logged(value: float) -> float:
    """Return a number as it was before MLflow's SQL store replaced infinity by the largest float."""
    return math.copysign(math.inf, value) if abs(value) == sys.float_info.max else value


def _is_refusal(error: Exception) -> bool:
    """Return whether a server refuses a name or value permanently."""
    return getattr(error, "error_code", "") == "INVALID_PARAMETER_VALUE"


def run_of(client: Any, experiment: str, run_uri: str, born: float) -> str | None:
    """Return the id of the run with these tags (see `MlflowRun`); None if there is none."""
    wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in _identity(run_uri, born).items())
    runs = client.search_runs([experiment], wanted, order_by=["attributes.start_time ASC"])
    return str(runs[0].info.run_id) if runs else None


def _identity(run_uri: str, born: float) -> dict[str, str]:
    return {URI_TAG: quotable(redact(run_uri)), BORN_TAG: f"{born:.6f}"}


def within(timeout: float, call: Callable[[], T]) -> T:
    """Return the result of a call to a server. Raises its errors, and TimeoutError after `timeout` seconds.

    A call that exceeds the timeout is left running in its thread. MLflow's own timeout does not end an answer that
    arrives byte by byte.
    """
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="mlflow-call", daemon=True).start()
    return answer.result(timeout)


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Return the leaves of nested mappings and lists with their dotted keys. An empty mapping or list is a leaf."""
    if isinstance(value, Mapping) and value:
        children: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple) and value:
        children = enumerate(value)
    else:
        yield key, value
        return
    for name, child in children:
        yield from flatten(child, f"{key}.{name}" if key else str(name))


def _experiment(client: Any, uri: str, name: str) -> str:
    from mlflow.exceptions import MlflowException

    if experiment := client.get_experiment_by_name(name):
        return str(experiment.experiment_id)
    try:
        tags = {KIND_TAG: KIND}
        return str(client.create_experiment(name, artifact_location=_artifacts(uri, name), tags=tags))
    except MlflowException:  # another run has created it in the meantime
        if experiment := client.get_experiment_by_name(name):
            return str(experiment.experiment_id)
        raise


def _artifacts(uri: str, experiment: str) -> str | None:
    """Return the artifact folder: next to a database file, whatever the current folder; None if a server decides
    itself.
    """
    database = SQLITE.fullmatch(uri)
    if not database:
        return None
    return (Path(database[1]).resolve().parent / "mlartifacts" / re.sub(r"[^\w.-]", "_", experiment)).as_uri()


def _batches(rows: Iterable[Row], received: Received) -> Iterator[tuple[list[Row], Received]]:
    batch: list[Row] = []
    size = 0
    for row, with_row in received.lacking(rows):
        count = (
            len(_metric_keys(row)) + len(layers_in(row)) + sum(map(_evaluated_values, evaluations_in([row])))
        )
        if batch and size + count > METRICS_A_BATCH:
            yield batch, received
            batch = []
            size = 0
        batch.append(row)
        received = with_row
        size += count
    if batch:
        yield batch, received


def _metric_keys(row: Row) -> list[str]:
    """Return the keys with a number. NaN is included, because the user must see it."""
    keys = [
        key for key, value in row.items() if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return [key for key in keys if key not in NO_METRICS][:METRICS_A_BATCH]


def _metrics(row: Row) -> list[Any]:
    from mlflow.entities import Metric

    # With the row's own time, a row that is logged twice remains one point on the server.
    at = int(float(row.get("time") or 0) * 1000)
    numbers = {key: row[key] for key in _metric_keys(row)} | layers_in(row)
    row_metrics = [Metric(as_key(key), float(value), at, row["step"]) for key, value in numbers.items()]
    return row_metrics + [
        metric for evaluation in evaluations_in([row]) for metric in _evaluation_metrics(evaluation)
    ]


def _node_metrics(row: Row) -> list[Any]:
    from mlflow.entities import Metric

    at = int(row["time"] * 1000)
    step = row["step"]
    return [
        Metric(as_key(f"{SYSTEM}{row['node']}/{key}"), float(value), at, step)
        for key, value in row["values"].items()
        if isinstance(value, int | float) and key != SECONDS
    ][:METRICS_A_BATCH]


def _evaluated_values(evaluation: Row) -> int:
    return sum(map(len, evaluation["sets"].values()))


def _evaluation_metrics(evaluation: Row) -> list[Any]:
    """Return the metrics of an evaluation, named like validation.loss."""
    from mlflow.entities import Metric

    at = int(float(evaluation.get("time") or 0) * 1000)
    step = evaluation["step"]
    return [Metric(as_key(key), float(value), at, step) for key, value in by_name(evaluation["sets"]).items()]


def _tags(tags: Mapping[str, Any]) -> list[Any]:
    from mlflow.entities import RunTag

    return [RunTag(key, str(value)[:VALUE_LENGTH]) for key, value in tags.items()]


def as_key(key: Any) -> str:
    """Return the name of a metric or parameter without characters that MLflow never accepts."""
    return re.sub(r"[^\w.\-/ ]", "_", str(key))[:KEY_LENGTH]


def quotable(text: str) -> str:
    """Return `text` with quotes percent-encoded, because MLflow's filter syntax cannot escape them."""
    return text.replace("'", "%27").replace('"', "%22").replace("`", "%60")
