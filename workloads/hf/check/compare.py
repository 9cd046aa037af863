"""Compare our model with what transformers loads from its export, by the outputs for the same batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workloads.hf.as_they_are.hf_class import HuggingFaceModel
from workloads.hf.as_they_are.network import HuggingFaceNetwork
from workloads.hf.files.hf_config import GENERATOR
from workloads.model.config import TransformerConfig
from workloads.model.electra import Electra
from workloads.model.masks import QUERIES, attends
from workloads.model.transformer import Output
from workloads.workload import Batch, Vocabulary

TOLERANCE = 1e-5
"""Largest difference between two correct fp32 computations of a model, as a share of the largest number above one."""
_ARGUMENTS = {"tokens": "input_ids", "token_types": "token_type_ids", "task_types": "task_type_ids",
              "positions": "position_ids", "decoder_tokens": "decoder_input_ids"}  # fmt: skip
_OUTPUTS = {
    "logits": ("logits", "prediction_logits"),
    "sentence": ("seq_relationship_logits", "sop_logits", "logits"),
    "hidden": ("last_hidden_state",),
}
"""transformers' names for our outputs."""

Outputs = Mapping[str, Tensor]


def difference(
    config: TransformerConfig | HuggingFaceModel,
    model: nn.Module,
    folder: str,
    batches: Iterable[Batch],
    change: Callable[[Any], Any] = lambda hf_model: hf_model,
    in_fp64: bool = False,
) -> float:
    """Return the largest difference over all `batches` between `model`, in evaluation mode, and the export in
    `folder`.

    `change` may modify the loaded export. The difference is a share of the largest number of either output, if that
    is above one. If it exceeds TOLERANCE, both are recomputed in fp64, which decides: in fp32, rounding may make a
    router choose another expert. With `in_fp64` they are computed in fp64 at once. Padding is not compared. Raises
    RuntimeError if the export lacks a tensor or has an extra one.
    """
    batches = list(batches)
    worst = 0.0
    with torch.no_grad():
        for part, forward, path in _networks(config, model, folder):
            hf_model = change(load(path, strict=part.as_transformer is not None))
            if in_fp64:
                _hf_outputs(part, hf_model, _inputs(batches[0]))  # expands compressed weights in fp32
                model.double(), hf_model.double()
            for batch in batches:
                batch_difference = _difference(part, forward, hf_model, batch)
                if not batch_difference <= TOLERANCE and not in_fp64:
                    model.double(), hf_model.double()
                    batch_difference = _difference(part, forward, hf_model, batch)
                    model.float(), hf_model.float()
                worst = (
                    max(worst, batch_difference) if batch_difference == batch_difference else batch_difference
                )
                if worst != worst:
                    return worst
    return worst


def load(folder: str, strict: bool = True) -> Any:
    """Return the export as transformers loads it, by the class that its configuration names, in evaluation mode and
    fp32.

    With `strict`, raises RuntimeError if a tensor is missing or left over.
    """
    import transformers

    named = json.loads((Path(folder) / "config.json").read_text())["architectures"][0]
    kind = getattr(transformers, named)
    transformers.logging.disable_progress_bar()  # in commands, among their own lines
    model, report = kind.from_pretrained(
        folder,
        local_files_only=True,
        output_loading_info=True,
        dtype=torch.float32,
        # The grouped kernel supports neither fp64 nor odd sizes.
        experts_implementation="eager",
    )
    # A class without a head brings a pooler, which reads the hidden states and changes none of them. A model without
    # a head has no pooler to write.
    missing = {
        name for name in report["missing_keys"] if named.endswith("Model") and name.startswith("pooler.")
    }
    report["missing_keys"] -= missing
    if strict and (wrong := {k: v for k, v in report.items() if v}):
        raise RuntimeError(f"{named} of transformers loads with {wrong}")
    return model.eval()


def arguments(config: TransformerConfig, batch: Batch) -> dict[str, Tensor]:
    """Return the arguments of a transformers model for our batch, without labels."""
    hf_arguments = {hf_name: batch[name] for name, hf_name in _ARGUMENTS.items() if name in batch}
    if "positions" in batch:
        hf_arguments["position_ids"] = batch["positions"] + config.position_offset * config.counted_positions
    if (attention := attends(batch)) is not None:
        hf_arguments["attention_mask"] = attention.unsqueeze(1)
    elif "padding" in batch:
        hf_arguments["attention_mask"] = batch["padding"].long()
    if "decoder_padding" in batch:
        hf_arguments["decoder_attention_mask"] = batch["decoder_padding"].long()
    return hf_arguments


def probes(
    config: TransformerConfig | HuggingFaceModel, vocabulary: Vocabulary, text: Tensor, lengths: Iterable[int]
) -> Iterator[Batch]:
    """Return, for each length, a batch with rows of `text` int64 [n]: one full, one padded at the end, one at the
    beginning.

    Rows are not padded at the beginning for a router with a capacity, which counts preceding tokens, nor if the first
    token represents the sequence.
    """
    pad = vocabulary.padding
    ours = config.as_transformer
    left = ours is not None and not (
        (ours.moe and ours.moe.at_length(1))
        or ours.sentence_head
        or (ours.head == "sequence" and not ours.causal)
    )
    for length in lengths:
        all_real = torch.ones(length, dtype=torch.bool)
        short = torch.arange(length) < max(1, length - length // 3)
        padding = torch.stack((all_real, short, short.flip(0)) if left else (all_real, short))
        count = len(padding)
        rows = text.repeat(-(-2 * count * length // len(text)))[: 2 * count * length].view(2 * count, length)
        batch = {"tokens": rows[:count].masked_fill(~padding, pad), "padding": padding}
        if config.architecture == "encoder-decoder" and config.head == "sequence":
            batch["tokens"] = _ended(batch["tokens"], padding, vocabulary)
        if config.architecture == "encoder-decoder":
            ends = torch.stack((short, *[all_real] * (count - 1)))
            batch |= {"decoder_tokens": rows[count:].masked_fill(~ends, pad), "decoder_padding": ends}
        elif ours is not None and ours.token_types > 1:
            batch["token_types"] = (torch.arange(length) >= length // 2).long().expand(count, -1)
        yield batch


def _ended(tokens: Tensor, padding: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the rows with exactly one end token, at their last position, whose hidden state pair classifiers read."""
    special = {vocabulary.eos, vocabulary.padding}
    other = next(number for number in range(vocabulary.size) if number not in special)
    rows = tokens.masked_fill(tokens == vocabulary.eos, other)
    last = (padding * torch.arange(1, tokens.shape[1] + 1)).argmax(1)
    rows[torch.arange(len(rows)), last] = vocabulary.eos
    return rows


def _networks(
    config: TransformerConfig | HuggingFaceModel, model: nn.Module, folder: str
) -> Iterator[tuple[TransformerConfig | HuggingFaceModel, Callable[[Batch], Outputs], str]]:
    """Yield each exported network: its configuration, our forward pass and its folder."""
    if not isinstance(model, Electra):
        yield config, lambda batch: _of_output(model(batch)), folder
        return
    ours = config.as_transformer
    assert ours is not None
    yield ours.changed({"generator": 0}), lambda batch: {"logits": model.judge(batch)}, folder
    yield (
        ours.generator_config(),
        lambda batch: {"logits": model.guess(batch)},
        str(Path(folder) / GENERATOR),
    )


def _of_output(output: Output) -> Outputs:
    tensors = {name: getattr(output, name) for name in ("logits", "sentence")}
    return {k: v for k, v in tensors.items() if v is not None} or {"hidden": output.hidden}


def _hf_outputs(
    config: TransformerConfig | HuggingFaceModel, hf_model: Any, batch: Batch
) -> Mapping[str, Tensor]:
    if config.divided_by == "plan":
        causal = config.architecture == "decoder"
        output = HuggingFaceNetwork(hf_model, {}, causal, head=config.head)(batch)
        return {"logits": output.logits if output.sentence is None else output.sentence}
    if QUERIES in batch and config.positions == "relative_keys":
        return {"logits": _of_queries(hf_model, batch)}
    outputs: Mapping[str, Tensor] = hf_model(**arguments(config, batch))
    if config.head == "span":
        return {"logits": torch.stack((outputs["start_logits"], outputs["end_logits"]), dim=-1)}
    return outputs


def _of_queries(hf_model: Any, batch: Batch) -> Tensor:
    """Return XLNet's logits [queries, vocabulary] of a two-stream batch, see `workloads.objectives.permuted`."""
    queries = batch[QUERIES]
    hidden = ~batch["attention"] | queries.unsqueeze(1)
    counts = queries.sum(1)
    length = queries.shape[1]
    mapping = hidden.new_zeros(len(queries), int(counts.max()), length)
    for row, (is_query, positions) in enumerate(zip(queries, batch["positions"], strict=True)):
        hidden[row, positions[is_query]] = hidden[row, is_query].clone()
        mapping[row, torch.arange(int(counts[row])), positions[is_query]] = True
    output = hf_model(
        batch["tokens"],
        perm_mask=hidden.to(hf_model.dtype),
        target_mapping=mapping.to(hf_model.dtype),
        token_type_ids=batch.get("token_types"),
    )
    return torch.cat([logits[:count] for logits, count in zip(output.logits, counts.tolist(), strict=True)])


def _inputs(batch: Batch) -> Batch:
    return {k: v for k, v in batch.items() if k not in ("labels", "sequence_labels")}


def _difference(
    config: TransformerConfig | HuggingFaceModel,
    forward: Callable[[Batch], Outputs],
    hf_model: Any,
    batch: Batch,
) -> float:
    inputs = _inputs(batch)
    ours = forward(inputs)
    other = _hf_outputs(config, hf_model, inputs)
    if QUERIES in batch and getattr(config, "positions", "") == "relative_keys":
        ours = {"logits": ours["logits"][batch[QUERIES]]}
    real = batch.get("decoder_padding" if "decoder_tokens" in batch else "padding")
    worst = torch.zeros(())
    for name, value in ours.items():
        theirs = next(other[n] for n in _OUTPUTS[name] if n in other)
        if real is not None and value.shape[:2] == real.shape:
            value = value[real]
            theirs = theirs[real]
        scale = torch.stack((value.abs().max(), theirs.abs().max(), torch.ones_like(value.max()))).max()
        worst = torch.maximum(worst, ((value - theirs).abs().max() / scale).float())
    return float(worst)
