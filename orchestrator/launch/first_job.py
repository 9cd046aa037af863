"""Write a job file to start from. It is filled in from the model's folder and the data."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from difflib import get_close_matches
from glob import glob
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from orchestrator.config.errors import InputError
from orchestrator.config.records import (
    COLUMNS,
    COMPARED,
    OBJECTIVES,
    OF_CLASSES,
    PREFERENCES,
    REWARDED,
    TALKING,
    is_known,
)
from orchestrator.data.encoding.tokenizer import load, special_tokens_of
from orchestrator.data.prepare.chat_template import asks_for_day, find_template, find_tool_template
from orchestrator.evaluate.of_export import objective_of
from orchestrator.launch.first_rows import ReadColumns, rows_at, text_at
from orchestrator.launch.labelled_rows import LABELS, MULTI, Labelled, labelled_rows
from orchestrator.resolve.resolved_job import wrong_input

LONGEST = 512
"""Tokens of a sample for models that accept longer ones."""
OF_LABELS = 256
"""Tokens of a text that is classified."""
OF_LABELLED = (*OF_CLASSES, MULTI)
"""Objectives whose rows have a label, a number or a place for each text."""
NAME = "job"
"""The name of a run if its job file's name has no letter or digit that a run's name may have."""
DROPOUTS = {
    "dropout": ("hidden_dropout_prob", "resid_pdrop", "dropout_rate", "dropout"),
    "attention_dropout": ("attention_probs_dropout_prob", "attn_pdrop", "dropout_rate", "attention_dropout"),
}
"""The keys of dropout rates in configurations of transformers, by the key in a job file."""
GPUS = "/dev/nvidia[0-9]*"
"""The device files of GPUs."""
CHAT = """\
{%- for message in messages -%}
{{ message.role }}:
{{ message.content }}{{ eos_token if message.role == 'assistant' else '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ 'assistant:\\n' }}
{%- endif -%}
"""
"""A chat template for models without one. It writes each message below the name of its role."""
END = "eos_token"
"""The variable of `CHAT` for the token that ends an answer."""

TEMPLATE = """\
# A job: what to train, on what, and where. `orchestrator schema job` describes every key.
name: {name}
seed: 17
workload: {{model: {model}, objective: {objective}{dropout}}}
data:
  sources: {sources}   # text, JSONL, Parquet, CSV, tars; globs and s3:// work
  tokenizer: {tokenizer}{talk}
  sequence_length: {length}
train:
  steps: 200
  global_batch: 32                            # sequences per step; never changes
  optimizer: {{name: adamw, lr: {lr}, warmup: 10%, schedule: cosine}}
  precision: {precision}
{evaluate}parallel: auto
resources: {{workers: {{min: 1, max: {workers}}}, per_worker: {{cpu: 1, gpu: {gpu}}}}}
checkpoint: {{every: 20, keep: 3, export: hf}}
tracking: {{uri: "sqlite:///mlflow.db", experiment: {name}}}
"""


@dataclass(frozen=True)
class FirstJob:
    """The text of a job file, and a line about what it reads of each source with rows."""

    text: str
    lines: tuple[str, ...]


def first_job(
    name: str,
    data: Sequence[str],
    folder: str | None = None,
    tokenizer: str | None = None,
    template: str = "",
    objective_name: str | None = None,
) -> FirstJob:
    """Return a job file that trains a small model, or fine-tunes the model in a folder.

    Args:
        name: the name of the run.
        data: paths or URIs of the data.
        folder: the folder of a pretrained model, None for a small new model.
        tokenizer: the folder of the tokenizer, by default the model's.
        template: a file with a chat template, for a tokenizer without one.
        objective_name: the objective; None for the one that the rows and the model fit.

    Raises:
        InputError: the folder has no model, a file of the data cannot be read, or its rows do not fit the objective.
    """
    gpus = len(glob(GPUS))
    if objective_name is not None:
        check_objective(objective_name)
    labelled = _labelled(data, folder, objective_name)
    by_source = [None if labelled else rows_for(uri, objective_name) for uri in data]
    objective, length, dropout = objective_name or "causal_lm", 128, ""
    if folder is not None:
        described = _described(folder)
        objective = objective_name or objective_of(folder, described.architecture)
        length = min(described.max_positions, OF_LABELS if labelled else LONGEST)
        if described.architecture == "encoder-decoder":
            by_source = [columns and columns.as_pair() for columns in by_source]
        if described.as_transformer:
            dropout = "".join(f", {key}: {rate:g}" for key, rate in _published_dropout(folder).items())
    if labelled:
        objective = labelled.objective
    elif objective_name is None:
        objective = next(
            (columns.objective for columns in by_source if columns and columns.objective), objective
        )
    fields = [labelled.field if labelled else columns.field if columns else None for columns in by_source]
    sources = [
        {"uri": uri, **({} if field is None else {"field": field})}
        for uri, field in zip(data, fields, strict=True)
    ]
    chosen = tokenizer or folder
    talks = any(columns.talks for columns in by_source if columns)
    talk = _chat_keys(chosen, talks, template) if objective in TALKING and chosen else ""
    if labelled:
        named = json.dumps([*labelled.labels], ensure_ascii=False)
        talk = f"\n  labels: {named}" if labelled.labels else ""
        talk += "\n  validation: {share: 0.1}                  # held out by content, for evaluations"
    text = TEMPLATE.format(
        name=json.dumps(name, ensure_ascii=False),
        model=json.dumps("gpt-tiny" if folder is None else f"hf:{folder}", ensure_ascii=False),
        objective=objective,
        dropout=dropout,
        sources=json.dumps(sources, ensure_ascii=False),
        tokenizer=json.dumps(chosen, ensure_ascii=False) if chosen else "{train_bpe: 4096}",
        talk=talk,
        evaluate="evaluate: {every: 20}\n" if labelled else "",
        length=length,
        lr="1.0e-3" if folder is None else "5.0e-6" if objective in PREFERENCES else "5.0e-5",
        precision="bf16" if gpus else "fp32",
        workers=gpus or 2,
        gpu=int(gpus > 0),
    )
    return FirstJob(text, tuple(_lines(data, by_source, labelled, objective)))


def chat_template_for(tokenizer: str) -> str:
    """Return a chat template for a tokenizer without one.

    An answer ends with the tokenizer's eos_token. If it names none, the template has the token that ends a document.
    """
    if END in special_tokens_of(tokenizer):
        return CHAT
    text, roles = load(tokenizer, ())
    return CHAT.replace(END, repr(Tokenizer.from_str(text).id_to_token(roles["eos"])))


def check_objective(asked: str) -> None:
    """Check that an objective that the user asks for is known. Raises InputError."""
    if not is_known(asked):
        near = get_close_matches(asked, sorted(OBJECTIVES), 1, 0.4)
        hint = f"did you mean {near[0]}?" if near else "`orchestrator schema workload` names them"
        raise InputError(f"there is no objective {asked}", "--objective", hint)


def _chat_keys(tokenizer: str, talks: bool, template: str) -> str:
    """Return the keys for a chat template: the file `template` if the tokenizer has none, or the date that it asks
    for.
    """
    stored_template = find_template(tokenizer, None)
    if stored_template is None:
        return f"\n  chat_template: {json.dumps(template, ensure_ascii=False)}" if talks else ""
    if asks_for_day(stored_template[0]) or asks_for_day(find_tool_template(tokenizer, None)):
        return (
            f"\n  chat_date: {date.today()}                       # what the chat template writes as today's"
        )
    return ""


def _lines(
    data: Sequence[str], by_source: Sequence[ReadColumns | None], labelled: Labelled | None, objective: str
) -> Iterator[str]:
    """Yield what the job reads of each source with rows."""
    if labelled:
        yield f"{', '.join(data)}: {objective} reads {json.dumps(labelled.field)}; {labelled.line}"
    for uri, columns in zip(data, by_source, strict=True):
        if columns:
            named = "text" if columns.field is None else columns.field
            field = named if isinstance(named, str) else json.dumps(named)
            unused = f"; left out: {', '.join(columns.unused)}" if columns.unused else ""
            yield f"{uri}: {objective} reads {field}{unused}"
            if label := {*columns.unused} & {*LABELS}:
                yield f"{uri} has {min(label)}: --objective sequence_classification learns it"


def _labelled(data: Sequence[str], folder: str | None, objective: str | None) -> Labelled | None:
    """Return what rows with labels are for, if they are asked for, or if an encoder is to be fine-tuned."""
    encoder = folder is not None and _described(folder).architecture == "encoder"
    if objective not in OF_LABELLED and not (objective is None and encoder):
        return None
    if folder is None:
        raise InputError(f"{objective} needs a pretrained model", "--from-hf", "name a folder with one")
    result = labelled_rows(data, objective, reads_spans=encoder)
    if result and result.objective == "sequence_classification" and len(result.labels) < 2:
        shown = f"one label, {next(iter(result.labels))}" if result.labels else "no label"
        problem = f"its column {result.field['label']} has {shown}"
        raise InputError(problem, data[0], "give rows with at least two labels")
    return result


def _described(folder: str) -> Any:
    from workloads.describe import describe

    with wrong_input(folder):
        return describe(f"hf:{folder}")


def rows_for(uri: str, objective: str | None) -> ReadColumns | None:
    """Return what the objective that is asked for reads of rows; None if the data has no rows or does not exist yet.

    Raises InputError if the rows do not fit the objective.
    """
    result = rows_at(uri)
    if result is None or objective is None or objective == result.objective:
        return result
    if objective not in COLUMNS:
        return text_at(uri) if result.objective else result
    if objective == "seq2seq" and result.as_pair() is not result:
        return result.as_pair()
    if objective in COMPARED and result.objective in COMPARED:
        return replace(result, objective=objective)
    if objective in REWARDED and (field := _rewarded_columns(result)):
        return replace(result, objective=objective, field=field, unused=())
    fit = result.objective or "causal_lm"
    raise InputError(
        f"its rows fit {fit}, not {objective}", uri, f"give --objective {fit}, or write the job by hand"
    )


def _rewarded_columns(columns: ReadColumns) -> dict[str, str] | None:
    """Return the columns for answers that are rewarded: the prompt, and the right answer where there is one."""
    if not isinstance(columns.field, dict) or "prompt" not in columns.field:
        return None
    answer = {"answer": columns.field["completion"]} if "completion" in columns.field else {}
    return {"prompt": columns.field["prompt"], **answer}


def name_of(path: Path) -> str:
    """Return a run's name from the name of its job file. Accents are dropped; other illegal characters become a dash.

    A name without letters and digits, or with unprintable characters, is a mistake. It is returned as it is, so that
    the check of the job refuses it.
    """
    if not path.stem.isprintable() or not any(letter.isalnum() for letter in path.stem):
        return path.stem
    plain = unicodedata.normalize("NFKD", path.stem.replace("ß", "ss")).encode("ascii", "ignore").decode()
    return legal_name(plain)


def legal_name(text: str) -> str:
    """Return the text as a run's name: what is no letter, digit, dot, underscore or dash becomes a dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:63].rstrip("-") or NAME


def _published_dropout(folder: str) -> dict[str, float]:
    """The non-zero dropout rates in a folder's configuration, by their keys in a job file."""
    path = Path(folder)
    config = json.loads((path if path.is_file() else path / "config.json").read_text())
    dropout = {}
    for key, names in DROPOUTS.items():
        rates = [config[name] for name in names if isinstance(config.get(name), float)]
        if rates and 0.0 < rates[0] < 1.0:
            dropout[key] = rates[0]
    return dropout


def write_job(path: Path, text: str) -> None:
    """Write a new job file. Raises InputError if the path exists already, or cannot be written."""
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise InputError("there is a file already", str(path), "give another name") from None
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError(f"cannot be written ({why})", str(path), "give another path") from None
