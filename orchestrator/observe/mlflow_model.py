"""What makes an exported folder a model in MLflow's transformers flavour, beside its files as they are."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from orchestrator.data.encoding.auto_tokenizer import FILE, class_to_read

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
"""How the names of a tokenizer's files begin."""
EXAMPLE, SERVED_EXAMPLE = "input_example.json", "serving_input_example.json"
"""An input of the model, for readers and for the scoring server, as MLflow names them."""
OTHER = "feature-extraction"
"""The task of a class that no pipeline of transformers serves; `load_model(..., return_type="components")` gives it."""


def write_flavor(export: str, folder: str) -> bool:
    """Write to `folder` what has to lie beside the files of an export so that `mlflow.transformers.load_model` and
    `mlflow.pyfunc.load_model` read them. Returns False for a folder that names no class, such as an adapter's.

    Nothing is loaded: MLflow's own `save_model` would hold the whole model in memory.
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
    """The class of transformers that makes of an export's tokenizer what its file says."""
    there = Path(export, FILE).is_file()
    return (class_to_read(export) if there else "") or "AutoTokenizer"


def _example(export: str, task: str) -> str:
    """A text that the task's pipeline takes."""
    text = "The first word"
    if task != "fill-mask":
        return text
    config = Path(export, "tokenizer_config.json")
    mask = json.loads(config.read_text()).get("mask_token") if config.is_file() else None
    return f"{text} {mask['content'] if isinstance(mask, dict) else mask or '[MASK]'}"


def _task_of(architecture: str) -> str:
    """The task of the pipeline that transformers has for a class."""
    from transformers.models.auto import modeling_auto as auto

    known = {
        "text-generation": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "fill-mask": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "text-classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "token-classification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    }
    return next((task for task, classes in known.items() if architecture in classes.values()), OTHER)
