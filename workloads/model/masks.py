"""Attention masks: which tokens a token may attend to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workloads.model.config import TransformerConfig
from workloads.model.sparse import near
from workloads.workload import Batch

REAL = "real"
"""The batch entry with the real tokens of the full sequences, if `padding` covers only a part. Other tokens are not
routed to experts.
"""
QUERIES = "queries"
"""The batch entry that marks the positions of the query stream, bool [B, L]."""
DECODER_REAL = "decoder_real"
"""Like REAL, for what a decoder reads besides an encoder."""


SEGMENTS = "segments"
"""The batch entry with the document number of each token, int64 [B, L]. Documents are contiguous; padding counts as
one.
"""
STARTS = "starts"
"""The batch entry with the start of each document in its row, int32 [B, most], filled up with L."""
WHOLE_SEGMENTS = "whole_segments"
"""The batch entry with SEGMENTS of the full sequences, if the batch holds a part of them. STARTS
then refers to these.
"""
WHOLE_TOKENS = "whole_tokens"
"""The batch entry with the tokens of the full sequences, if each is one document and layers have a window."""


class ByLength(NamedTuple):
    """Groups the documents of a batch by length, so that each group is one batched attention call.

    order: int64 [B x L], the token indices in grouped order. back: the inverse of `order`. groups: for each length, the
    number of documents and the length.
    """

    order: Tensor
    back: Tensor
    groups: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Documents:
    """Rows of concatenated documents. A token attends to its own document, not to later tokens and, with a `window`,
    only to tokens fewer steps back.

    numbers: int64 [B, L] as in SEGMENTS; None if a row is one document. by_length: used on CPU. bounds: int32
    [documents + 1], used on a GPU: the start of each document in the concatenation of all rows, and the end of the last
    one; documents may be empty. dense_mask: the mask that `once` has created.
    """

    numbers: Tensor | None
    window: int = 0
    by_length: ByLength | None = None
    bounds: Tensor | None = None
    dense_mask: list[Tensor] = field(default_factory=list, compare=False)

    def once(self, make: Callable[[], Tensor]) -> Tensor:
        """Return the mask for layers that no kernel serves.

        All layers share one tensor, because each saves it for its backward pass.
        """
        if torch.compiler.is_compiling():
            return make()
        if not self.dense_mask:
            self.dense_mask.append(make())
        return self.dense_mask[0]

    def starts(self, length: int) -> Tensor:
        """Return STARTS, computed from the bounds."""
        assert self.bounds is not None
        rows = len(self.bounds) - 1 if self.numbers is None else len(self.numbers)
        first = torch.arange(rows, dtype=torch.int32, device=self.bounds.device) * length
        return self.bounds[:-1].view(rows, -1) - first[:, None]

    def dense(self, length: int, device: torch.device) -> Tensor:
        """Return the mask as one tensor, bool [1 or B, 1, L, L].

        Args:
            length: L.
            device: the device of the result.
        """
        steps = torch.arange(length, device=device)
        allowed = steps[:, None] >= steps[None, :]
        if self.window:
            allowed = allowed & (steps[:, None] - steps[None, :] < self.window)
        same = (
            None if self.numbers is None else self.numbers[:, None, :, None] == self.numbers[:, None, None, :]
        )
        return allowed[None, None] if same is None else allowed & same


@dataclass(frozen=True)
class Mask:
    """allowed: bool [1 or B, 1, queries, keys], True where a query may attend to a key; None if all may.

    `causal` also hides keys after the query. It is separate from `allowed`, so that fused kernels need no mask tensor
    in the plain causal case. The `documents` of rows without another mask are separate for the same reason.
    """

    allowed: Tensor | None = None
    causal: bool = False
    documents: Documents | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether the mask hides nothing, or only later keys."""
        return self.allowed is None and self.documents is None

    def behind(self, count: int, length: int, device: torch.device) -> Mask:
        """Return the mask of `length` queries whose keys follow `count` others that all queries may attend to.

        Args:
            count: number of keys in front.
            length: number of queries.
            device: the device of the result.
        """
        allowed = self.dense(length, device)
        if allowed is None:
            return self
        return Mask(F.pad(allowed.view((1,) * (4 - allowed.dim()) + allowed.shape), (count, 0), value=True))

    def with_prompt(self, count: int, length: int, device: torch.device, causal: bool) -> Mask:
        """Return the mask of `count` prompt vectors before `length` tokens.

        All tokens see the prompt. The prompt sees the tokens that any token sees or, if `causal`, no token.

        Args:
            count: number of prompt vectors.
            length: number of tokens.
            device: the device of the result.
            causal: whether a token sees only earlier ones.
        """
        if self.is_plain:
            return self
        allowed = self.dense(length, device)
        assert allowed is not None
        allowed = allowed.view((1,) * (4 - allowed.dim()) + allowed.shape)
        below = F.pad(allowed, (count, 0), value=True)
        # [B, 1, 1, L], the same for all queries: it holds for the prompt's queries too.
        if allowed.shape[-2] == 1:
            return Mask(below)
        if causal:
            above = F.pad(torch.ones(count, count, dtype=torch.bool, device=device).tril(), (0, length))
        else:
            above = F.pad(allowed.any(-2, keepdim=True), (count, 0), value=True)
        return Mask(torch.cat((above.expand(*allowed.shape[:2], count, -1), below), dim=-2))

    def dense(self, length: int, device: torch.device) -> Tensor | None:
        """Return the full mask as one tensor, causality included; None if nothing is hidden.

        Args:
            length: L.
            device: the device of the result.
        """
        if self.documents is not None:
            return self.documents.dense(length, device)
        if not self.causal:
            return self.allowed
        lower = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        return lower if self.allowed is None else self.allowed & lower


def self_mask(config: TransformerConfig, batch: Batch, length: int, windowed: bool = True) -> Mask:
    """Return the self-attention mask of a batch, from the batch's entries.

    attention bool [B, L, L] is used as it is (prefix models). padding bool [B, L] hides padding. SEGMENTS hides the
    other documents of a packed row, padding included. A window hides the keys that `sparse.near` excludes. visible bool
    [B, L, M] is the finished mask for L positions of a sequence of M; visible_in_full is the same for layers without
    the window, for which `windowed` is False. WHOLE_SEGMENTS and WHOLE_TOKENS describe the documents of the full
    sequences.

    Args:
        config: says whether attention is causal, and the window.
        batch: see above.
        length: tokens of a row.
        windowed: whether the mask is for layers with the window.
    """
    key = "visible" if windowed else "visible_in_full"
    if key in batch:
        return Mask(batch[key].unsqueeze(1))
    if WHOLE_SEGMENTS in batch:
        length = batch[WHOLE_SEGMENTS].shape[1]
        window = config.window if windowed and length > config.window else 0
        return Mask(causal=True, documents=_documents(_whole(batch), window, False))
    if WHOLE_TOKENS in batch:
        full_batch = {"tokens": batch[WHOLE_TOKENS]}
        return Mask(causal=True, documents=_documents(full_batch, config.window) if windowed else None)
    device = batch["tokens"].device
    window = config.window if windowed and (config.is_sparse or length > config.window) else 0
    if config.causal and "attention" not in batch and not (window and config.is_sparse):
        alone = window and device.type == "cuda" and "padding" not in batch
        if SEGMENTS in batch or alone:
            return Mask(causal=True, documents=_documents(batch, window))
    allowed = _allowed(config, batch, length, bool(window))
    if allowed is None:
        return Mask(causal=config.causal)
    if config.positions == "relative_keys" and QUERIES in batch:  # queries are never keys
        allowed = allowed & ~batch[QUERIES][:, None, None, :]
    causal = config.causal and "attention" not in batch
    return Mask(Mask(allowed, True).dense(length, device) if causal else allowed)


def _allowed(config: TransformerConfig, batch: Batch, length: int, windowed: bool) -> Tensor | None:
    """Return what the entries of a batch and the window allow together, bool [B or 1, 1, L or 1, L].

    None if nothing restricts attention. Causality is left out.
    """
    device = batch["tokens"].device
    parts = list[Tensor]()
    if "attention" in batch:
        parts.append(batch["attention"].unsqueeze(1))
    if "padding" in batch:
        parts.append(batch["padding"][:, None, None, :])
    if SEGMENTS in batch:
        parts.append((batch[SEGMENTS][:, :, None] == batch[SEGMENTS][:, None, :]).unsqueeze(1))
    if windowed:
        parts.append(_window(config, batch, length, device))
    if not parts:
        return None
    allowed = functools.reduce(torch.logical_and, parts)
    # Padding attends to itself: the softmax of a row that attends to nothing would be NaN.
    if len(parts) == 1 and "padding" in batch and not config.causal:
        return allowed | ~batch["padding"].any(1)[:, None, None, None]
    if "attention" in batch or "padding" in batch:
        return allowed | torch.eye(length, dtype=torch.bool, device=device)
    return allowed


def _window(config: TransformerConfig, batch: Batch, length: int, device: torch.device) -> Tensor:
    """Return the mask of the window, by positions within documents if documents do not see each other."""
    positions = torch.arange(length, device=device).unsqueeze(0)
    if SEGMENTS in batch:
        # [B, L]: where each token's document begins in the row.
        begun = torch.where(_begins(batch[SEGMENTS]), positions, 0).cummax(1).values
        positions = positions - begun
    return near(config, positions[:, :, None], positions[:, None, :], length).unsqueeze(1)


def attends(batch: Batch) -> Tensor | None:
    """Return which tokens a decoder's tokens attend to, bool [B, L, L]; None if the batch does not say so."""
    if SEGMENTS in batch:
        return Documents(batch[SEGMENTS]).dense(batch[SEGMENTS].shape[1], batch[SEGMENTS].device)[:, 0]
    return batch.get("attention")


def with_starts(batch: Batch) -> Batch:
    """Return the batch with the STARTS of its documents. They are computed in host memory, which avoids a
    synchronisation with the GPU.
    """
    if SEGMENTS not in batch:
        return batch
    length = batch[SEGMENTS].shape[1]
    starts = [row.nonzero().flatten() for row in _begins(batch[SEGMENTS])]
    # Pad to few widths, because torch.compile compiles a program for each.
    most = 1 << (max(map(len, starts)) - 1).bit_length()
    filled = [F.pad(each, (0, most - len(each)), value=length) for each in starts]
    return {**batch, STARTS: torch.stack(filled).int()}


def _whole(batch: Batch) -> Batch:
    segments = batch[WHOLE_SEGMENTS]
    return {**batch, "tokens": segments, SEGMENTS: segments}


def _documents(batch: Batch, window: int, sorts: bool = True) -> Documents:
    numbers, (rows, length) = batch.get(SEGMENTS), batch["tokens"].shape
    device = batch["tokens"].device
    if device.type != "cuda":
        return Documents(numbers, window, _by_length(numbers) if sorts and numbers is not None else None)
    starts = torch.zeros(rows, 1, dtype=torch.int32, device=device)
    if numbers is not None:
        known = batch if STARTS in batch else with_starts({SEGMENTS: numbers.cpu()})
        starts = known[STARTS].to(device)
    return Documents(numbers, window, bounds=_bounds(starts, length))


def _bounds(starts: Tensor, length: int) -> Tensor:
    """Return the bounds of `Documents` from STARTS."""
    # `cu_seqlens` of flash attention's kernels for sequences of several lengths. Entries of STARTS that only fill up
    # give empty documents at the end of their row.
    first = torch.arange(len(starts), dtype=torch.int32, device=starts.device) * length
    return F.pad((starts + first[:, None]).flatten(), (0, 1), value=len(starts) * length)


def _by_length(numbers: Tensor) -> ByLength:
    starts = _begins(numbers).flatten().nonzero().flatten()
    lengths, documents = starts.diff(append=starts.new_tensor([numbers.numel()])).sort(stable=True)
    steps = torch.arange(numbers.numel(), device=numbers.device)
    # Token t of the d-th shortest document is at starts[d] + t; `steps` counts over all documents, so the sum of the
    # lengths before d is taken off.
    order = (starts[documents] - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths) + steps
    sizes, counts = lengths.unique_consecutive(return_counts=True)
    return ByLength(order, order.argsort(), list(zip(counts.tolist(), sizes.tolist(), strict=True)))


def _begins(numbers: Tensor) -> Tensor:
    """Return whether a document begins at each token, bool [B, L]."""
    return F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True)
