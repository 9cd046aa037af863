"""Evaluation of a folder in the Hugging Face format: like the commit that it was exported from, or with defaults.

An export's export.json records how it was trained, so that its numbers equal those of its commit. For any other
folder, the class determines how it can be evaluated.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.config.errors import InputError
from orchestrator.config.overrides import override
from orchestrator.config.records import LABELLED, REFERENCED, TALKING
from orchestrator.config.resources import PerWorker
from orchestrator.config.spec import JobSpec, parse
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.data.store.manifest import FORMAT
from orchestrator.evaluate.of_commit import row_of
from orchestrator.export.target import MARK
from orchestrator.resolve.chat import Chat
from orchestrator.resolve.prepared_data import EARLIER, PreparedData
from orchestrator.resolve.resolved_job import is_framed, resolve, special_tokens_of, wrong_input
from orchestrator.storage.row_types import EvaluationRow
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.task import Task
from workloads.hf.files.hf_config import ADAPTER

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from workloads.workload import Workload

LONGEST = 512
"""Tokens of a sample if export.json is silent, as long as the model has positions for them."""
BATCH = 8
"""Samples that are evaluated at once if export.json is silent."""
OBJECTIVES = {"decoder": "causal_lm", "encoder": "masked_lm", "encoder-decoder": "denoising"}
"""The objective for evaluation if export.json is silent; a model with sentinels is treated like T5."""
CLASS_WEIGHTS = "class_weights"
"""The option of an objective that weighs the labels in the loss."""
SAYS = "seq2seq"
"""The objective by which an encoder-decoder answers prompts if export.json is silent."""


def is_export(folder: str) -> bool:
    """Return whether a local path is a folder in the Hugging Face format, of a model or of an adapter (which is
    refused later).
    """
    return any(Path(folder, name).is_file() for name in ("config.json", ADAPTER))


def spec_of_export(
    folder: str, sets: Mapping[str, str], overrides: Sequence[str] = ()
) -> tuple[JobSpec, int]:
    """Return the job that evaluates the model in a folder on text, and the model's step; 0 if unknown.

    Args:
        folder: the local folder of the export.
        sets: the URI of the text of each set, by name.
        overrides: changes of the job, of the form a.b=c.

    Raises:
        InputError: the model is unknown here, or cannot be evaluated.
    """
    facts = _facts(folder)
    known = facts.get("evaluation")
    workload = _own(folder)
    if workload and not isinstance(known, dict):
        hint = "give the run, or export it with --form hf if it reads text"
        raise InputError("is an export of an own model without text", folder, hint)
    if not isinstance(known, dict):
        described = _described(folder)
        pair = described.architecture == "encoder-decoder" and not sets
        known = {
            # Prompts are sources with the tokenizer's special tokens; plain text has none.
            "objective": SAYS if pair else objective_of(folder, described.architecture),
            "sequence_length": min(described.max_positions, LONGEST),
            "global_batch": BATCH,
        }
    field = known.get("field", "text")
    named = {name: {"sources": [{"uri": uri, "field": field}]} for name, uri in sets.items()}
    document: dict[str, Any] = {
        "name": "evaluation",
        "seed": known.get("seed", 0),
        "workload": {
            "model": f"hf:{folder}",
            "objective": known["objective"],
            "options": known.get("options", {}),
            **workload,
        },
        "data": {
            # Nothing is trained; the first set stands in for the training text.
            "sources": next(iter(named.values()), {"sources": [{"uri": folder}]})["sources"],
            "tokenizer": folder,
            "sequence_length": known["sequence_length"],
            "labels": known.get("labels", []),
            "special_tokens": known.get("special_tokens", "text"),
            "chat_date": known.get("chat_date"),
        },
        "train": {
            "steps": 1,
            "global_batch": known["global_batch"],
            "optimizer": {"warmup": 0},
            "precision": known.get("precision", "fp32"),
        },
        "quantize": _rounding(folder, facts.get("quantized") or {}),
        "evaluate": {"sets": named} if named else None,
        "checkpoint": {"export": None},
    }
    for text in overrides:
        override(document, text)
    objective = document["workload"]["objective"]
    _check_outside(objective, folder)
    if _lacks_weights(document["workload"]["options"]):
        # The sets have other labels than the records of training, so counting in them would give other weights.
        options = document["workload"]["options"]
        document["workload"]["options"] = {key: options[key] for key in options if key != CLASS_WEIGHTS}
    day = document["data"]["chat_date"]
    if objective in LABELLED and not document["data"]["labels"]:
        document["data"]["labels"] = _labels_of(folder)
    if objective == SAYS and not isinstance(field, dict):
        sources = document["data"]["sources"]
        document["data"]["sources"] = [
            {**source, "field": {"source": "source", "target": "target"}} for source in sources
        ]
    if objective not in TALKING and day == known.get("chat_date"):  # no template asks for it
        document["data"]["chat_date"] = None
    if named and objective in REFERENCED:
        problem = f"was trained with {objective}, whose reference an export lacks"
        raise InputError(
            problem, folder, "evaluate the run's commit, or by another --set workload.objective=NAME"
        )
    return parse(document, folder), int(facts.get("step") or 0)


def notes_of_export(folder: str, workload: WorkloadSpec) -> list[str]:
    """Return lines for the user: how the numbers of an evaluation differ from the commit's.

    Args:
        folder: the local folder of the export.
        workload: the key `workload` of the job from `spec_of_export`.
    """
    known = _facts(folder).get("evaluation")
    options = known.get("options", {}) if isinstance(known, dict) else {}
    if not _lacks_weights(options) or CLASS_WEIGHTS in workload.options:
        return []
    return [
        f"{folder} lacks the class weights of its training (balanced), so losses are not weighted; export the "
        "checkpoint again, or --set 'workload.options.class_weights=[1, 2]'"
    ]


def _lacks_weights(options: Mapping[str, Any]) -> bool:
    """Return whether an export does not store the weights that training counted, as exports of earlier versions."""
    return options.get(CLASS_WEIGHTS) == "balanced"


def format_of_export(folder: str) -> int:
    """Return the format of the data that the model in `folder` was trained on, which decides how texts are framed and
    read; the newest if export.json is silent.

    Exports of versions before it was recorded are of runs that framed no text.
    """
    known = _facts(folder).get("evaluation")
    return int(known.get("data_format", EARLIER)) if isinstance(known, dict) else FORMAT


def workload_of_export(spec: JobSpec, needs_weights: bool = True) -> Workload:
    """Return the workload of an export.

    Args:
        spec: the job from `spec_of_export`.
        needs_weights: whether the folder must have weights that transformers reads; an ONNX model has none.

    Raises:
        InputError: the workload cannot be made, or the folder lacks the weights of a part of the model, which would be
            random.
    """
    from orchestrator.models.base import Base
    from orchestrator.resolve.training_inputs import load_workload, vocabulary_before_data
    from workloads.hf.files.weight_names import check_none_unread, has_weights
    from workloads.model.stored import ExtendedTable, listed

    folder = _folder(spec.workload)
    with wrong_input(folder):
        check_none_unread(folder)
        complete = has_weights(folder)
    if needs_weights and not complete:
        raise InputError("has a configuration but no weights", folder, "give a folder with model.safetensors")
    job = resolve(spec)
    data_format = format_of_export(folder)
    workload = load_workload(
        spec=spec.workload,
        data=spec.data,
        train=spec.train,
        seed=spec.seed,
        vocabulary=vocabulary_before_data(job, data_format),
        data_format=data_format,
        model=job.model,
        base=Base(folder, None, "") if spec.workload.init_from else None,
    )
    if not needs_weights or spec.workload.init_from:
        return workload
    # A class that is run unchanged refuses a folder without weights itself, except for the head's.
    stored = getattr(workload, "pretrained", None)
    fresh = list(getattr(workload, "new", ()))
    tensors = {name: stored.find(name) for name in workload.shapes} if stored else {}
    objective = spec.workload.objective
    if missing := fresh + [name for name, tensor in tensors.items() if tensor is None]:
        hint = f"{objective} needs it; give a model that was trained with it"
        raise InputError(f"has no weights for {listed(missing)}", folder, hint)
    if any(isinstance(tensor, ExtendedTable) for tensor in tensors.values()):
        hint = "name another with --set workload.objective=NAME"
        raise InputError(f"its tokenizer lacks tokens that {objective} needs", folder, hint)
    return workload


def tokenizer_of_export(data: DataSpec, workload: WorkloadSpec) -> Tokenizer:
    """Return the tokenizer of an export.

    Args:
        data: the key `data` of the job from `spec_of_export`.
        workload: its key `workload`.

    Raises:
        InputError: the folder has no tokenizer.
    """
    from tokenizers import Tokenizer

    from orchestrator.data.encoding import tokenizer
    from orchestrator.data.encoding.framing import unframed

    assert isinstance(data.tokenizer, str)
    data_format = format_of_export(_folder(workload))
    special_tokens = special_tokens_of(data, workload)
    result = Tokenizer.from_str(tokenizer.load(data.tokenizer, special_tokens, (), data_format)[0])
    return result if data_format > EARLIER or not is_framed(data, workload) else unframed(result)


def chat_of_export(data: DataSpec, workload: WorkloadSpec, tokenizer: Tokenizer) -> Chat | None:
    """Return how to write prompts as messages for the model of an export.

    If export.json does not say whether the model was trained on conversations, a model with a chat template counts as
    such.

    Args:
        data: the key `data` of the job from `spec_of_export`.
        workload: its key `workload`.
        tokenizer: the tokenizer of the export.

    Returns:
        None for a model that was trained on plain text, or if its folder has no chat template.
    """
    from orchestrator.data.prepare.chat_template import dated, find_template

    folder = _folder(workload)
    objective = workload.objective
    known = _facts(folder).get("evaluation")
    talks = known.get("chat", objective in TALKING) if isinstance(known, dict) else True
    named_template = find_template(folder, None) if talks else None
    if named_template is None:
        return None
    template, tokens = named_template if data.chat_date is None else dated(named_template, data.chat_date)
    return Chat(template, dict(tokens), tokenizer)


def evaluate_export(
    job: dict[str, Any], data: PreparedData, step: int, *, model: str, global_batch: int, worker: PerWorker
) -> EvaluationRow:
    """Return the metrics of the model of a job from `spec_of_export`, on its sets, whose prepared data is `data`.

    Args:
        job: the job as JSON, which the evaluating process reads.
        data: the prepared data of its sets.
        step: the step of the model.
        model: the model's folder, as the job names it.
        global_batch: samples of a global batch.
        worker: what the process occupies.

    Raises:
        RuntimeError: if the evaluation fails.
    """
    micro_batch = (_facts(model.removeprefix("hf:")).get("evaluation") or {}).get("micro_batch")
    size = min(micro_batch or global_batch, global_batch)
    with tempfile.TemporaryDirectory(prefix="evaluation-") as folder:
        run = RunDir(folder).uri
        task = Task.for_evaluation(job, size, run=run, data=data.uri, restore=None, sets=data.sets)
        return {**row_of(worker, task), "step": step}


def _folder(workload: WorkloadSpec) -> str:
    """Return the folder of the model of a job from `spec_of_export`."""
    return workload.init_from or workload.model.removeprefix("hf:")


def _own(folder: str) -> dict[str, Any]:
    """Return the keys of `workload` for an export of an own model; empty for other folders. Raises InputError, see
    `about_own`.
    """
    from orchestrator.export.own_model import about_own

    about = about_own(folder)
    if about is None:
        return {}
    return {"model": about["model"], "changes": about["options"], "init_from": folder}


def _check_outside(objective: str, folder: str) -> None:
    """Raise InputError if an objective is code in `folder`, whose export.json may have named it."""
    from workloads.own.object_reference import check_outside, is_object_reference

    with wrong_input(folder):
        if is_object_reference(objective):
            check_outside(objective, folder)


def _facts(folder: str) -> dict[str, Any]:
    try:
        document = json.loads(Path(folder, MARK).read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read ({error})", f"{folder}/{MARK}", "export the commit again") from None
    return document if isinstance(document, dict) else {}


def objective_of(folder: str, architecture: str) -> str:
    """Return the default objective for evaluating, or training, the model in a folder.

    Args:
        folder: the local folder.
        architecture: encoder, decoder or encoder-decoder.
    """
    tokenizer = Path(folder, "tokenizer.json")
    if architecture == "encoder-decoder" and tokenizer.is_file() and "<extra_id_0>" in tokenizer.read_text():
        return "span_corruption"
    return OBJECTIVES.get(architecture, "causal_lm")


def _rounding(folder: str, quantised: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the quantisation of an export whose layers round their inputs; None for weights alone, which are read as
    they are stored. Raises InputError for such a folder without an export.json.
    """
    from workloads.hf.files.compressed_weights import rounds_activations

    with contextlib.suppress(OSError, ValueError):
        described = json.loads(Path(folder, "config.json").read_text()).get("quantization_config") or {}
        if not rounds_activations(described):
            return None
        if not quantised:
            problem = "rounds the inputs of layers in a way that is known of exports here alone"
            raise InputError(problem, folder, "evaluate it with the library that made it")
        keys = ("weights", "group", "activations", "match", "keep", "int8")
        return {key: quantised[key] for key in keys if key in quantised}
    return None


def _labels_of(folder: str) -> list[str]:
    """Return the labels that a folder names; empty if it names none."""
    from workloads.hf.files.meaning import folder_meaning

    with wrong_input(folder):
        return list(folder_meaning(folder).labels)


def _described(folder: str) -> Any:
    from workloads.describe import describe

    with wrong_input(folder):
        return describe(f"hf:{folder}")
