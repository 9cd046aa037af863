"""Versions of a model in MLflow's registry, each with the metric that chose it, and the alias of the best.

Everything here but `register_export` may raise whatever MLflow and its transport raise.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.checkpoint.evaluations import metrics_of
from orchestrator.config.metric_names import larger_is_better
from orchestrator.config.redact import connection_problem
from orchestrator.data.encoding.auto_tokenizer import FILE, class_to_read
from orchestrator.observe.config import TrackingSpec
from orchestrator.observe.mlflow_delivery import connect
from orchestrator.observe.mlflow_run import within
from orchestrator.storage.run_directory import RunDir
from orchestrator.storage.uri import is_local, local_path

COMPONENT = "components/tokenizer"
"""Where MLflow looks for the tokenizer."""
TOKENIZER = (
    "tokenizer",
    "special_tokens",
    "added_tokens",
    "vocab",
    "merges",
    "spiece",
    "sentencepiece",
    "chat_template",
)
"""Prefixes of a tokenizer's file names."""
EXAMPLE, SERVED_EXAMPLE = "input_example.json", "serving_input_example.json"
"""An input of the model, for readers and for the scoring server, in MLflow's terms."""
OTHER = "feature-extraction"
"""The task of a class without a transformers pipeline; `load_model(..., return_type="components")` loads it."""


def write_flavor(export: str, folder: str) -> bool:
    """Write the files that `mlflow.transformers.load_model` and `mlflow.pyfunc.load_model` need besides an export to
    `folder`.

    Returns False for a folder that names no class, such as an adapter's. Nothing is loaded: MLflow's own `save_model`
    would hold the whole model in memory.
    """
    config = Path(export, "config.json")
    architectures = json.loads(config.read_text()).get("architectures") if config.is_file() else None
    if not architectures:
        return False
    import mlflow.pyfunc
    import transformers
    from mlflow.models import Model
    from mlflow.models.signature import ModelSignature
    from mlflow.types import ColSpec, Schema
    from transformers.pipelines import SUPPORTED_TASKS

    pipelines: dict[str, Any] = SUPPORTED_TASKS
    task = _task_of(architectures[0])
    text = Schema([ColSpec("string")])
    model = Model(signature=ModelSignature(text, text))
    model.add_flavor(
        "transformers",
        task=task,
        instance_type=str(pipelines[task]["impl"]).rpartition(".")[2],
        pipeline_model_type=architectures[0],
        model_binary=".",
        components=["tokenizer"],
        tokenizer_type=_reader(export),
        source_model_name=None,
        torch_dtype="torch.float32",
        transformers_version=transformers.__version__,
        code=None,
    )
    mlflow.pyfunc.add_to_model(model, loader_module="mlflow.transformers")
    os.makedirs(Path(folder, COMPONENT))
    example = [_example(export, task)]
    Path(folder, EXAMPLE).write_text(json.dumps(example))
    Path(folder, SERVED_EXAMPLE).write_text(json.dumps({"inputs": example}))
    model.saved_input_example_info = {
        "artifact_path": EXAMPLE,
        "serving_input_path": SERVED_EXAMPLE,
        "type": "json_object",
    }
    model.save(str(Path(folder, "MLmodel")))
    for name in os.listdir(export):
        if name.startswith(TOKENIZER):
            shutil.copyfile(Path(export, name), Path(folder, COMPONENT, name))
    return True


def _reader(export: str) -> str:
    """Return the transformers class that loads an export's tokenizer."""
    exists = Path(export, FILE).is_file()
    return (class_to_read(export) if exists else "") or "AutoTokenizer"


def _example(export: str, task: str) -> str:
    """Return an example text for the task's pipeline."""
    text = "The first word"
    if task != "fill-mask":
        return text
    config = Path(export, "tokenizer_config.json")
    mask = json.loads(config.read_text()).get("mask_token") if config.is_file() else None
    return f"{text} {mask['content'] if isinstance(mask, dict) else mask or '[MASK]'}"


def _task_of(architecture: str) -> str:
    """Return the task of transformers' pipeline for a class."""
    from transformers.models.auto import modeling_auto as auto

    tasks = {
        "text-generation": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "fill-mask": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "text-classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "token-classification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    }
    return next((task for task, classes in tasks.items() if architecture in classes.values()), OTHER)


ALIAS = "best"
MODEL = "model"
"""The artifact folder of the model."""
METRIC = "metric"
VALUE = "value"
STEP = "step"
"""Tags of a version."""
PATIENCE = 300.0
"""Seconds that a server may take, besides the time for sending the model."""
SLOWEST = 10e6
"""Minimum speed for sending a model, in bytes per second."""


@dataclass(frozen=True)
class Candidate:
    """A model that becomes a version: its commit's step and, if a metric chose it, the metric with its value."""

    step: int
    metric: str = ""
    value: float | None = None
    larger: bool = False

    @property
    def tags(self) -> dict[str, str]:
        """Return the tags of the version."""
        chosen = {} if self.value is None else {METRIC: self.metric, VALUE: repr(self.value)}
        return {STEP: str(self.step), **chosen}

    def is_better_than(self, tags: Mapping[str, str]) -> bool:
        """Return whether it is better than the version with these tags. A version without a metric does not compete."""
        if self.value is None or math.isnan(self.value):
            return False
        if METRIC not in tags:
            return True
        if tags[METRIC] != self.metric:
            return False
        return self.value > float(tags[VALUE]) if self.larger else self.value < float(tags[VALUE])


def register(
    client: Any, name: str, run_id: str, model: Candidate, source: Callable[[], str], **tags: str
) -> None:
    """Register the model as a version, unless its run has one of that step. It gets the alias if it is better than
    the version that has it.

    `source` returns where MLflow finds the model, and puts it there if needed.
    """
    from mlflow.exceptions import MlflowException

    with contextlib.suppress(MlflowException):  # the name exists already
        client.create_registered_model(name)
    mine = (v for v in client.search_model_versions(f"name = '{name}'") if v.run_id == run_id)
    version = next((v for v in mine if v.tags.get(STEP) == str(model.step)), None)
    if version is None:
        version = client.create_model_version(name, source(), run_id, tags={**model.tags, **tags})
    best = client.get_registered_model(name).aliases.get(ALIAS)
    if model.is_better_than(client.get_model_version(name, best).tags if best else {}):
        client.set_registered_model_alias(name, ALIAS, version.version)


def send(client: Any, run_id: str, export: str) -> str:
    """Send an exported folder as an artifact of a run, in a form that MLflow loads. Returns its location."""
    client.log_artifacts(run_id, export, MODEL)
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        if write_flavor(export, folder):
            client.log_artifacts(run_id, folder, MODEL)
    return f"{client.get_run(run_id).info.artifact_uri}/{MODEL}"


def register_export(
    name: str,
    tracking: TrackingSpec | None,
    checkpoint: CheckpointSpec,
    params: Mapping[str, Any],
    run_dir: RunDir,
) -> str | None:
    """Register the run's last export according to its summary. Never raises: returns the problem as one line, or
    None.
    """
    exported = run_dir.read_json_or_empty("summary.json").get("export")
    if tracking is None or tracking.register_as is None or not exported:
        return None
    uri = exported["uri"]
    timeout = PATIENCE
    try:
        if is_local(uri):
            timeout += sum(file.stat().st_size for file in os.scandir(local_path(uri))) / SLOWEST
        within(
            timeout,
            lambda: _register_export(
                name=name,
                tracking=tracking,
                checkpoint=checkpoint,
                params=params,
                run_dir=run_dir,
                step=exported["step"],
                uri=uri,
            ),
        )
    except TimeoutError:
        return f"the model was not registered: no answer within {timeout:.0f} s"
    except Exception as error:  # MLflow and its transport may raise anything
        return f"the model was not registered: {connection_problem(error)}"
    return None


def _register_export(
    name: str,
    tracking: TrackingSpec | None,
    checkpoint: CheckpointSpec,
    params: Mapping[str, Any],
    run_dir: RunDir,
    step: int,
    uri: str,
) -> None:
    assert tracking is not None
    assert tracking.register_as is not None
    run = connect(name, tracking, run_dir, params)

    def source() -> str:
        return send(run.client, run.run_id, local_path(uri)) if is_local(uri) else uri

    register(run.client, tracking.register_as, run.run_id, _candidate(checkpoint, run_dir, step), source)


def _candidate(checkpoint: CheckpointSpec, run_dir: RunDir, step: int) -> Candidate:
    metric = checkpoint.best_metric
    if metric is None:
        return Candidate(step)
    store = Store(run_dir.commits)
    value = metrics_of(store, store.manifest(step)).get(metric)
    return Candidate(step, metric, value, larger_is_better(metric))
