"""The inputs and outputs of an MLflow run: its data as datasets, and its commits as logged models.

Everything here may raise whatever MLflow and its transport raise; `tracker` handles it.
"""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import CommitManifest, CorruptCommit
from orchestrator.config.metric_names import by_name
from orchestrator.config.redact import redact
from orchestrator.observe.mlflow_run import MlflowRun
from orchestrator.resolve.prepared_data import data_of
from orchestrator.storage.row_line import EVALS, EVENTS, Row
from orchestrator.storage.run_directory import RunDir

CONTEXT = "mlflow.data.context"
TRAINING = "training"
"""The dataset name of the training data. Held-out sets have their own names."""
HELD_OUT = "validation"
"""The context of held-out sets, and the name of the set that is a share of the training data."""
STEP_TAG = "orchestrator.step"
URI_TAG = "orchestrator.commit_uri"
MODEL_TYPE = "commit"
LOSS = "commit.loss"
"""A metric that every commit has: the mean training loss since the commit before."""


@dataclass(frozen=True)
class NamedData:
    """Prepared data that a run reads. `context` is training or validation."""

    name: str
    digest: str
    uri: str
    context: str
    profile: Mapping[str, Any]


def data_in(run: RunDir, share: float | None = None) -> list[NamedData]:
    """Return the data that a run started with; empty before it begins. Unreadable data is left out.

    If a `share` of the training data is held out, it is a separate dataset.
    """
    began = next((event for event in run.rows(EVENTS) if event.get("data")), None)
    if began is None:
        return []
    uri_by_name = {TRAINING: began["data"], **(began.get("sets") or {})}
    datasets = []
    for name, uri in uri_by_name.items():
        try:
            manifest = data_of(run, uri).manifest
        except Exception:  # it may be deleted, or be on another machine
            continue
        profile = {"tokens": manifest.tokens, "documents": manifest.documents, "bytes": manifest.bytes}
        context = TRAINING if name == TRAINING else HELD_OUT
        datasets.append(NamedData(name, manifest.digest[:36], redact(uri), context, profile))
        if share and name == TRAINING:
            profile_of_share = {"share of": TRAINING, "share": share}
            datasets.append(
                NamedData(HELD_OUT, manifest.digest[:36], redact(uri), HELD_OUT, profile_of_share)
            )
    return datasets


def log_data(run: MlflowRun, data: Iterable[NamedData]) -> None:
    """Log the datasets as inputs. Repeated calls have no further effect."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = [
        DatasetInput(
            Dataset(
                each.name,
                each.digest,
                "local",
                json.dumps({"uri": each.uri}),
                profile=json.dumps(dict(each.profile)),
            ),
            [InputTag(CONTEXT, each.context)],
        )
        for each in data
    ]
    if inputs:
        run.client.log_inputs(run.run_id, datasets=inputs)


def log_commits(run: MlflowRun, name: str, run_dir: RunDir, data: Iterable[NamedData]) -> None:
    """Create a logged model for each kept commit, with metrics linked to data; delete those of removed commits."""
    store = Store(run_dir.commits)
    kept = set(store.steps())
    models = _known(run)
    for step in models.keys() - kept:
        run.client.delete_logged_model(models.pop(step).model_id)
    evaluations = {row["step"]: row for row in run_dir.log(EVALS).rows()} if kept else {}
    of_set = {each.name: each for each in data}
    for step in sorted(kept):
        if step in models and _is_whole(models[step], evaluations.get(step)):
            continue  # a run may keep hundreds of commits, whose manifests are not needed for each new one
        try:
            commit = store.manifest(step)
        except (CorruptCommit, OSError):  # reported when it is needed and read
            continue
        model = models.get(step) or _create(run, name, commit, store)
        _log_metrics(run, model, commit, evaluations.get(step), of_set)


def _is_whole(model: Any, evaluation: Row | None) -> bool:
    """Return whether a logged model has everything known about its commit."""
    has = {metric.key for metric in model.metrics or ()}
    return LOSS in has and (evaluation is None or by_name(evaluation["sets"]).keys() <= has)


def _known(run: MlflowRun) -> dict[int, Any]:
    """Return the logged models of the run's commits, by step."""
    models: dict[int, Any] = {}
    token = None
    while True:
        page = run.client.search_logged_models(
            [run.experiment], f"source_run_id = '{run.run_id}'", page_token=token
        )
        models |= {int(model.tags[STEP_TAG]): model for model in page if STEP_TAG in model.tags}
        token = page.token
        if not token:
            return models


def _create(run: MlflowRun, name: str, commit: CommitManifest, store: Store) -> Any:
    """Create a logged model. `mlflow.create_external_model` would require the tracking URI of the whole process."""
    from mlflow.models.utils import get_external_mlflow_model_spec
    from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

    tags = {
        MLFLOW_MODEL_IS_EXTERNAL: "true",
        STEP_TAG: str(commit.step),
        URI_TAG: redact(f"{store.uri}/step-{commit.step:08d}"),
        "receipt": commit.receipt,
    }
    model = run.client.create_logged_model(
        run.experiment,
        name=f"{name.replace('.', '-')}-step-{commit.step}",  # MLflow does not accept dots there
        source_run_id=run.run_id,
        tags=tags,
        params={"step": str(commit.step), "layout": json.dumps(commit.meta.get("layout"))},
        model_type=MODEL_TYPE,
    )
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        get_external_mlflow_model_spec(model).save(str(Path(folder, "MLmodel")))
        run.client.log_model_artifacts(model.model_id, folder)
    return run.client.finalize_logged_model(model.model_id, "READY")


def _log_metrics(
    run: MlflowRun, model: Any, commit: CommitManifest, evaluation: Row | None, data: Mapping[str, NamedData]
) -> None:
    """Log the metrics that the model lacks, with the row's time, so that they coincide with the run's own."""
    from mlflow.entities import Metric

    has = {metric.key for metric in model.metrics or ()}
    values: list[tuple[str, float, float, str]] = []
    if isinstance(loss := commit.meta.get("loss"), int | float):
        made = datetime.fromisoformat(commit.created).timestamp()
        values.append((LOSS, float(loss), made, TRAINING))
    if evaluation is not None:
        for key, value in by_name(evaluation["sets"]).items():
            values.append((key, float(value), float(evaluation["time"]), key.partition(".")[0]))
    new = []
    for key, value, at, name in values:
        if key not in has:
            of = data.get(name)
            linked = {"dataset_name": of.name, "dataset_digest": of.digest} if of else {}
            new.append(
                Metric(
                    key,
                    value,
                    int(at * 1000),
                    commit.step,
                    model_id=model.model_id,
                    run_id=run.run_id,
                    **linked,
                )
            )
    if new:
        run.client.log_batch(run.run_id, metrics=new)


def environment() -> str:
    """Return Python, platform and every installed distribution, one per line."""
    names = sorted(
        {f"{each.metadata['Name']}=={each.version}" for each in metadata.distributions()}, key=str.lower
    )
    return "\n".join([f"# Python {platform.python_version()}, {platform.platform()}", *names, ""])
