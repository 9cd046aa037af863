"""Check which tokens a Hugging Face class's outputs depend on, by changing one token at a time."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.hf.as_they_are.workload import HuggingFaceWorkload
from workloads.model.masks import attends
from workloads.workload import Batch

LENGTH = 24
"""Tokens of a trial sequence: several windows (`small_copy.WINDOW`) and several documents."""
TOLERANCE = 1e-5
"""Logits are equal if they differ by at most this share of the largest logit."""
CHANGED_POSITIONS = (0, 3, 7, 8, 9, 14, 20, LENGTH - 1)
"""Number of positions at which a token is changed."""


@torch.no_grad()
def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits [B, L, ..] of a batch; for a head over the whole sequence [B, 1, classes]."""
    output = model(batch)
    logits = output.logits if output.sentence is None else output.sentence.unsqueeze(1)
    if not torch.is_tensor(logits) or not torch.isfinite(logits).all():
        raise WorkloadError("its logits are not finite; use another class")
    return logits


def check_visibility(trial: HuggingFaceWorkload, model: nn.Module, base: Batch) -> None:
    """Change one token at a time, and check which logits change."""
    if trial.config.head != "language":
        _check_head(trial, model, base)
        return
    pair = trial.config.architecture == "encoder-decoder"
    key = "decoder_tokens" if pair else "tokens"
    real = base["padding"][0] if "padding" in base else torch.ones_like(base["tokens"][0], dtype=torch.bool)
    length = base[key].shape[1]
    visible = torch.ones(length, length, dtype=torch.bool).tril() if pair else _visible(trial, base, real)
    rows = torch.ones(length, dtype=torch.bool) if pair else real
    _check_influence(trial, model, base=base, key=key, visible=visible & rows[:, None], rows=rows)
    if pair:
        _check_influence(
            trial, model, base=base, key="tokens", visible=real[None, :].expand(length, -1), rows=rows
        )


def _check_head(trial: HuggingFaceWorkload, model: nn.Module, base: Batch) -> None:
    """Check that outputs depend on text and not on padding, and that a decoder's token outputs do not depend on later
    tokens.
    """
    real = base["padding"][0]
    length = base["tokens"].shape[1]
    visible = real[None, :].expand(length, -1)
    rows = real
    if trial.config.head == "sequence":
        visible = visible[:1]
        rows = torch.ones(1, dtype=torch.bool)
    elif trial.config.architecture == "decoder":
        visible = visible & torch.ones(length, length, dtype=torch.bool).tril()
    finds_end = trial.config.head == "sequence" and trial.config.architecture != "encoder"
    _check_influence(
        trial,
        model,
        base=base,
        key="tokens",
        visible=visible,
        rows=rows,
        end=int(real.sum()) - 1 if finds_end else length,
    )


def _visible(trial: HuggingFaceWorkload, base: Batch, real: Tensor) -> Tensor:
    """Return bool [L, L]: whether the logits of a row may depend on a token, through any number of layers."""
    if (masks := attends(base)) is not None:
        attended = masks[0]
    elif trial.config.architecture == "decoder":
        return torch.ones(len(real), len(real), dtype=torch.bool).tril()
    else:
        attended = real[None, :].expand(len(real), -1)
    attended = attended | torch.eye(len(real), dtype=torch.bool)
    for _ in range(len(real).bit_length()):
        attended = (attended.float() @ attended.float()) > 0
    return attended


def _check_influence(
    trial: HuggingFaceWorkload,
    model: nn.Module,
    base: Batch,
    key: str,
    visible: Tensor,
    rows: Tensor,
    end: int = LENGTH,
) -> None:
    """Raise WorkloadError if a token of base[key] changes logits in `rows` where `visible` [rows, tokens] is False,
    or if no token before `end` changes any logits.
    """
    positions = [position for position in CHANGED_POSITIONS if position < min(end, base[key].shape[1])]
    batch = {n: v.repeat_interleave(len(positions) + 1, 0) for n, v in base.items() if v.dim()}
    special = trial.vocabulary.special
    other = [token for token in range(trial.vocabulary.size) if token not in special][:2]
    for number, position in enumerate(positions, start=1):
        old = int(base[key][0, position])
        batch[key][number, position] = other[1] if old == other[0] else other[0]
    logits = logits_of(model, batch)
    limit = _limit(logits)
    moved = (logits[1:] - logits[0]).abs().amax(-1)
    allowed = torch.stack([visible[:, position] for position in positions])
    if (moved[~allowed & rows] > limit).any():
        raise WorkloadError(_leak_message(trial, base))
    if not (moved[allowed & rows] > limit).any():
        raise WorkloadError("its logits do not depend on its tokens; use another class")


def _leak_message(trial: HuggingFaceWorkload, base: Batch) -> str:
    problem = "a token's logits depend on tokens that it must not see"
    if trial.config.architecture != "decoder":
        return f"{problem}; use another objective or class"
    if attends(base) is not None:
        objective = trial.objective
        hint = (
            "set workload.options.documents to pack"
            if hasattr(objective, "documents")
            else "use another class"
        )
        if getattr(objective, "pack", "no") == "yes":
            hint = 'set workload.options.pack to "no"'
        return f"{problem}, of other documents or later ones; {hint}"
    undecided = getattr(trial.config.bare.config, "is_decoder", None) is False
    return f"{problem}; " + ("set workload.changes.is_decoder to true" if undecided else "use another class")


def check_documents(model: nn.Module, samples: Batch, logits: Tensor) -> None:
    """Check that packed documents have the same logits as separate ones."""
    for row, positions in enumerate(samples["positions"]):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for start, end in pairwise(starts):
            alone = logits_of(model, {"tokens": samples["tokens"][row : row + 1, start:end]})
            if differ(alone[0], logits[row, start:end]):
                raise WorkloadError(
                    "packed documents have other outputs than separate ones; set workload.options.documents to pack"
                )


def check_windows(model: nn.Module, samples: Batch) -> None:
    """Check that a mask without effect changes nothing, so that the class keeps its own windows."""
    tokens = samples["tokens"]
    everything = torch.ones(len(tokens), LENGTH, LENGTH, dtype=torch.bool)
    if differ(
        logits_of(model, {"tokens": tokens}), logits_of(model, {"tokens": tokens, "attention": everything})
    ):
        raise WorkloadError(
            "the mask of this objective replaces the attention windows of the class; use another objective"
        )


def row_of(samples: Batch, row: int) -> Batch:
    """Return one sample of a batch."""
    return {name: value[row : row + 1] if value.dim() else value for name, value in samples.items()}


def _limit(logits: Tensor) -> float:
    return TOLERANCE * max(float(logits.abs().max()), 1e-3)


def differ(first: Tensor, second: Tensor) -> bool:
    """Return whether two outputs differ by more than rounding."""
    return first.shape != second.shape or float((first - second).abs().max()) > _limit(first)
