"""A folder in the Hugging Face format, evaluated: as the commit that it was exported from, or by defaults.

What an export was trained for stands in its export.json, so that its numbers are those of its commit. Of any other
folder the class says what it can be evaluated by.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.config.errors import InputError
from orchestrator.config.overrides import override
from orchestrator.config.records import LABELLED, REFERENCED
from orchestrator.config.spec import JobSpec, parse
from orchestrator.evaluate.of_commit import row_of
from orchestrator.export.target import MARK
from orchestrator.resolve.chat import TALKING, Chat
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.resolve.resolved_job import resolve, special_tokens_of, wrong_input
from orchestrator.storage.row_types import EvaluationRow
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.task import Task
from workloads.hf.hf_config import ADAPTER

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from workloads.workload import Workload

LONGEST = 512
"""Tokens of a sample where export.json does not say, if the model has positions for them."""
BATCH = 8
"""Samples that are evaluated at once where export.json does not say."""
OBJECTIVES = {"decoder": "causal_lm", "encoder": "masked_lm", "encoder-decoder": "denoising"}
"""What a model is evaluated by where export.json does not say; one with sentinels as T5 is."""
SAYS = "seq2seq"
"""By what an encoder-decoder answers prompts where export.json does not say."""


def is_export(folder: str) -> bool:
    """Whether a path of this machine is a folder in the Hugging Face format: of a model, or of an adapter, which is
    refused as such."""
    return any(Path(folder, name).is_file() for name in ("config.json", ADAPTER))


def spec_of_export(
    folder: str, sets: Mapping[str, str], overrides: Sequence[str] = ()
) -> tuple[JobSpec, int]:
    """The job that evaluates the model in `folder` on text, and the step that it is of, 0 if that is not known.

    `sets` are the URIs of the text by name; `overrides` of the job are of the form a.b=c.

    Raises InputError for a folder whose model is not known here, or has nothing to be evaluated by.
    """
    facts = _facts(folder)
    known = facts.get("evaluation")
    if not isinstance(known, dict):
        described = _described(folder)
        pair = described.architecture == "encoder-decoder" and not sets
        known = {
            # Prompts are sources, framed as its tokenizer frames them; text has none.
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
        },
        "data": {
            # Nothing is trained; the first set stands in for the text of training.
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
        "evaluate": {"sets": named} if named else None,
        "checkpoint": {"export": None},
    }
    for text in overrides:
        override(document, text)
    objective = document["workload"]["objective"]
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
        what = f"was trained with {objective}, by a reference that an export does not have"
        raise InputError(
            what, folder, "evaluate the run's commit, or by another --set workload.objective=NAME"
        )
    return parse(document, folder), int(facts.get("step") or 0)


def workload_of_export(spec: JobSpec) -> Workload:
    """The workload of a job that `spec_of_export` made. Raises InputError, also for a folder that has no weights for a
    part of the model, which would be drawn at random."""
    from orchestrator.data.store.manifest import FORMAT
    from orchestrator.resolve.training_inputs import load_workload, vocabulary_before_data
    from workloads.hf.weights import check_none_unread, has_weights
    from workloads.model.stored import ExtendedTable, listed

    folder = spec.workload.model.removeprefix("hf:")
    with wrong_input(folder):
        check_none_unread(folder)
        complete = has_weights(folder)
    if not complete:
        raise InputError("has a configuration and no weights", folder, "give a folder with model.safetensors")
    job = resolve(spec)
    workload = load_workload(spec, vocabulary_before_data(job), FORMAT, job.model)
    # A class that is run as it is refuses a folder without weights itself, but for its head.
    stored = getattr(workload, "pretrained", None)
    fresh = list(getattr(workload, "new", ()))
    found = {name: stored.find(name) for name in workload.shapes} if stored else {}
    objective = spec.workload.objective
    if missing := fresh + [name for name, tensor in found.items() if tensor is None]:
        hint = f"{objective} needs it; give a model that was trained with it"
        raise InputError(f"has no weights for {listed(missing)}", folder, hint)
    if any(isinstance(tensor, ExtendedTable) for tensor in found.values()):
        hint = "name another with --set workload.objective=NAME"
        raise InputError(f"its tokenizer lacks tokens that {objective} needs", folder, hint)
    return workload


def tokenizer_of_export(spec: JobSpec) -> Tokenizer:
    """The tokenizer of a job that `spec_of_export` made. Raises InputError if its folder has none."""
    from tokenizers import Tokenizer

    from orchestrator.data.encoding import tokenizer

    assert isinstance(spec.data.tokenizer, str)
    return Tokenizer.from_str(tokenizer.load(spec.data.tokenizer, special_tokens_of(spec))[0])


def chat_of_export(spec: JobSpec, tokenizer: Tokenizer) -> Chat | None:
    """How prompts are written as turns for the model of a job that `spec_of_export` made; None if it learnt from texts,
    or its folder has no chat template. Where export.json says nothing, what has a template is taken to have learnt from
    conversations."""
    from orchestrator.data.prepare.conversations import dated, find_template

    folder = spec.workload.model.removeprefix("hf:")
    objective = spec.workload.objective
    known = _facts(folder).get("evaluation")
    talks = known.get("chat", objective in TALKING) if isinstance(known, dict) else True
    found = find_template(folder, None) if talks else None
    if found is None:
        return None
    template, tokens = found if spec.data.chat_date is None else dated(found, spec.data.chat_date)
    return Chat(template, dict(tokens), tokenizer)


def evaluate_export(spec: JobSpec, data: PreparedData, step: int) -> EvaluationRow:
    """The metrics of the model of a job that `spec_of_export` made, on its sets, whose prepared data is `data`.

    Raises RuntimeError if the evaluation fails.
    """
    micro_batch = (_facts(spec.workload.model.removeprefix("hf:")).get("evaluation") or {}).get("micro_batch")
    size = min(micro_batch or spec.train.global_batch, spec.train.global_batch)
    with tempfile.TemporaryDirectory(prefix="evaluation-") as folder:
        run = RunDir(folder).uri
        task = Task.of_evaluation(spec, size, run=run, data=data.uri, restore=None, sets=data.sets)
        return {**row_of(spec, task), "step": step}


def _facts(folder: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(folder, MARK).read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read ({error})", f"{folder}/{MARK}", "export the commit again") from None
    return found if isinstance(found, dict) else {}


def objective_of(folder: str, architecture: str) -> str:
    """By what the model in a folder is evaluated, or trained on, where nothing else is said."""
    tokenizer = Path(folder, "tokenizer.json")
    if architecture == "encoder-decoder" and tokenizer.is_file() and "<extra_id_0>" in tokenizer.read_text():
        return "span_corruption"
    return OBJECTIVES.get(architecture, "causal_lm")


def _labels_of(folder: str) -> list[str]:
    """The labels that a folder names; none if it names none."""
    from workloads.hf.meaning import folder_meaning

    with wrong_input(folder):
        return list(folder_meaning(folder).labels)


def _described(folder: str) -> Any:
    from workloads.describe import describe

    with wrong_input(folder):
        return describe(f"hf:{folder}")
