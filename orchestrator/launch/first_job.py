"""Write a job file to start from. It is filled in from the model's folder and the data."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from datetime import date
from glob import glob
from pathlib import Path

from orchestrator.config.errors import InputError
from orchestrator.config.records import PREFERENCES, TALKING
from orchestrator.data.prepare.chat_template import asks_for_day, find_template, find_tool_template
from orchestrator.evaluate.of_export import objective_of
from orchestrator.launch.first_rows import rows_at
from orchestrator.resolve.resolved_job import wrong_input

LONGEST = 512
"""Tokens of a sample for models that accept longer ones."""
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
  global_batch: 32                            # sequences a step; never changes
  optimizer: {{name: adamw, lr: {lr}, warmup: 10%, schedule: cosine}}
  precision: {precision}
parallel: auto
resources: {{workers: {{min: 1, max: {workers}}}, per_worker: {{cpu: 1, gpu: {gpu}}}}}
checkpoint: {{every: 20, keep: 3, export: hf}}
tracking: {{uri: "sqlite:///mlflow.db", experiment: {name}}}
"""


def job_text(
    name: str,
    data: Sequence[str],
    folder: str | None = None,
    tokenizer: str | None = None,
    template: str = "",
) -> str:
    """Return the text of a job file that trains a small model, or fine-tunes the model in a folder.

    Args:
        name: the name of the run.
        data: paths or URIs of the data.
        folder: the folder of a pretrained model, None for a small new model.
        tokenizer: the folder of the tokenizer, by default the model's.
        template: a file with a chat template, for a tokenizer without one.

    Raises:
        InputError: the folder has no model, or a file of the data cannot be read.
    """
    gpus = len(glob(GPUS))
    rows = [rows_at(uri) for uri in data]
    objective = "causal_lm"
    length = 128
    model = "gpt-tiny"
    dropout = ""
    if folder is not None:
        from workloads.describe import describe

        with wrong_input(folder):
            described = describe(f"hf:{folder}")
        model = f"hf:{folder}"
        objective = objective_of(folder, described.architecture)
        length = min(described.max_positions, LONGEST)
        if described.architecture == "encoder-decoder":
            rows = [each and each.as_pair() for each in rows]
        if described.as_transformer:
            dropout = "".join(f", {key}: {rate:g}" for key, rate in _published_dropout(folder).items())
    objective = next((each.objective for each in rows if each and each.objective), objective)
    sources = [
        {"uri": uri, **({} if each is None or each.field is None else {"field": each.field})}
        for uri, each in zip(data, rows, strict=True)
    ]
    chosen = tokenizer or folder
    talk = ""
    if objective in TALKING and chosen:
        chat_template = find_template(chosen, None)
        if chat_template is None:
            if any(each.talks for each in rows if each):
                talk = f"\n  chat_template: {json.dumps(template, ensure_ascii=False)}"
        elif asks_for_day(chat_template[0]) or asks_for_day(find_tool_template(chosen, None)):
            talk = f"\n  chat_date: {date.today()}                       # what the chat template writes as today's"
    return TEMPLATE.format(
        name=json.dumps(name, ensure_ascii=False),
        model=json.dumps(model, ensure_ascii=False),
        objective=objective,
        dropout=dropout,
        sources=json.dumps(sources, ensure_ascii=False),
        tokenizer=json.dumps(chosen, ensure_ascii=False) if chosen else "{train_bpe: 4096}",
        talk=talk,
        length=length,
        lr="1.0e-3" if folder is None else "5.0e-6" if objective in PREFERENCES else "5.0e-5",
        precision="bf16" if gpus else "fp32",
        workers=gpus or 2,
        gpu=int(gpus > 0),
    )


def name_of(path: Path) -> str:
    """Return a run's name from the name of its job file. Accents are dropped; other illegal characters become a dash.

    A name without letters and digits, or with unprintable characters, is a mistake. It is returned as it is, so that
    the check of the job refuses it.
    """
    if not path.stem.isprintable() or not any(letter.isalnum() for letter in path.stem):
        return path.stem
    plain = unicodedata.normalize("NFKD", path.stem.replace("ß", "ss")).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain).lstrip("._-")[:63].rstrip("-") or NAME


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
