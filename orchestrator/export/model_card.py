"""The README.md of an exported model: what it is, what it was trained on, and how far."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

import yaml

from orchestrator.checkpoint.identity import BASE, CONTINUED
from orchestrator.config.redact import redact
from orchestrator.export.kinds import form_named
from orchestrator.parallel.layout import Layout

if TYPE_CHECKING:
    from orchestrator.resolve.commit_model import CommitModel

NAME = "README.md"
SHOWN = 8
"""Maximum number of sources that are listed."""


def model_card(
    model: CommitModel,
    form: str,
    evaluation: Mapping[str, float],
    weights: Mapping[str, Any],
    difference: float | None,
    reader: str = "",
    quantised: Mapping[str, Any] | None = None,
) -> str:
    """Return the card of a commit's model as Markdown, with a header that model hubs read.

    Args:
        model: the model.
        form: the format of `checkpoint export`.
        evaluation: the commit's metrics by name.
        weights: facts about an average of the weights.
        difference: the largest difference between its outputs and those of the library that loads it.
        reader: the transformers class for its tokenizer, if that is not AutoTokenizer.
        quantised: how its weights are rounded, as in export.json; None or empty if they are not.

    Credentials in addresses are hidden.
    """
    spec = model.spec
    commit = model.commit
    data = model.tokens.manifest
    base = redact((commit.meta.get(BASE) or {}).get("uri", ""))
    known = {"hf": "transformers", "adapter": "peft", "safetensors": "pytorch", "dcp": "pytorch"}
    library = known[form] if form in known else form_named(form).library
    head = {
        "library_name": library,
        **({"base_model": base} if base else {}),
        "tags": ["training-orchestrator", spec.workload.objective],
    }
    size = sum(shape.numel() for shape in model.workload.shapes.values())
    uris = [redact(source.uri) for source in data.sources]
    more = f" and {len(uris) - SHOWN} more" if len(uris) > SHOWN else ""
    samples_seen = f"{commit.position:,} samples of {spec.data.sequence_length} tokens"
    amount = f"{data.tokens:,} tokens"
    if spec.data.samples is not None:
        uris = [spec.data.samples.use]
        samples_seen = f"{commit.position:,} samples"
        amount = f"{data.documents:,} samples"
    before = commit.meta.get(CONTINUED)
    batches = f"in batches of {spec.train.global_batch}"
    phase = f"; the first {before['step']:,} steps in `{redact(before['run'])}`" if before else ""
    averaged = weights.get("averaged_steps")
    rows = {
        "model": f"`{spec.workload.model}`, {size:,} weights" + (f", starting from `{base}`" if base else ""),
        "objective": spec.workload.objective,
        "data": f"{', '.join(f'`{uri}`' for uri in uris[:SHOWN])}{more}: {amount}",
        "trained": f"{commit.step:,} of {spec.train.steps:,} steps, {samples_seen} {batches}{phase}",
        "optimiser": f"{spec.train.optimizer.name}, learning rate {spec.train.optimizer.lr:g}, {spec.train.dtype}",
        "layout": f"{Layout.from_json(commit.meta['layout'])}, which the weights do not depend on",
        "loss in training": _number(commit.meta.get("loss")),
        **{
            name: _number(value) for name, value in sorted(evaluation.items()) if not name.endswith(".tokens")
        },
        "weights": f"averaged over the commits {averaged}"
        if averaged
        else weights.get("weights", "as trained"),
        "quantised": _rounded(quantised) if quantised else "",
        "receipt": f"`{commit.receipt}`, a hash of all samples in their order",
        **(
            {}
            if difference is None
            else {"checked": f"outputs as those of {library} within {difference:.1e}"}
        ),
        **(
            {"tokenizer": f"`{reader}.from_pretrained`: AutoTokenizer divides text otherwise"}
            if reader
            else {}
        ),
        "made with": ", ".join(
            f"{name} {metadata.version(name)}" for name in ("training-orchestrator", "torch", "transformers")
        ),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {spec.name}\n\n| | |\n|---|---|\n{table}\n"


def _rounded(quantised: Mapping[str, Any]) -> str:
    """Return one line about rounded weights."""
    group = f", a scale for each {quantised['group']}" if "group" in quantised else ""
    how = "trained so" if quantised["trained"] else "after training"
    kept = quantised["kept"]
    more = f"; matrices with more bits: {len(kept)}" if kept else ""
    mixed = f", int8 for {len(quantised['int8'])} patterns" if "int8" in quantised else ""
    return f"{quantised['weights']}{mixed}{group}, {how}{more}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
