"""Context parallelism: each rank holds a part of every sequence; attention sees all of it.

Keys and values are gathered over the group, which is exact for any mask (Llama 3, section 3.3.2). The sequence
is cut into 2 x ranks chunks of which rank r holds chunks r and 2 x ranks - 1 - r, so that every rank has the
same share of a causal mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.parallel.collectives import gather
from orchestrator.parallel.mesh import ProcessGroup
from workloads.model.attention import AttentionCore
from workloads.model.config import TransformerConfig
from workloads.model.dropout import PLACES
from workloads.model.embeddings import batch_positions
from workloads.model.kernels import attend_flash
from workloads.model.masks import (
    REAL,
    SEGMENTS,
    STARTS,
    WHOLE_SEGMENTS,
    WHOLE_TOKENS,
    Documents,
    Mask,
    self_mask,
)
from workloads.model.moe import Router, Routes
from workloads.workload import Batch

ALONG_LENGTH = ("tokens", "labels", "token_types", "task_types", "padding", SEGMENTS)


def positions_of(length: int, cp: ProcessGroup, device: torch.device) -> Tensor:
    """The positions that this rank holds, int64 [length / ranks], ascending."""
    chunks = torch.arange(length, device=device).chunk(2 * cp.size)
    return torch.cat((chunks[cp.index], chunks[2 * cp.size - 1 - cp.index]))


def slice_batch(batch: Batch, config: TransformerConfig, cp: ProcessGroup) -> Batch:
    """This rank's part of a batch of whole sequences.

    Masks, if they are more than causal, are made from the whole batch: `visible` bool [B, L / ranks, L], see
    `self_mask`; but isolated documents stay as they are, WHOLE_SEGMENTS, and rows without any need none for a window,
    WHOLE_TOKENS.
    """
    if cp.size == 1:
        return batch
    length = batch["tokens"].shape[1]
    mine = positions_of(length, cp, batch["tokens"].device)
    sliced = {k: v.index_select(1, mine) if k in ALONG_LENGTH else v for k, v in batch.items()}
    places = batch_positions(config, batch)
    places = places if "positions" in batch else places.expand(len(batch["tokens"]), -1)
    sliced["positions"] = places.index_select(-1, mine)
    sliced[PLACES] = mine.expand(len(batch["tokens"]), -1)
    sliced.pop("attention", None)
    if "padding" in batch:
        sliced.setdefault(REAL, batch["padding"])
    in_runs = config.causal and "attention" not in batch and not config.is_sparse
    if SEGMENTS in batch and in_runs:
        sliced[WHOLE_SEGMENTS] = batch[SEGMENTS]
        sliced.pop("padding", None)
        sliced.pop(SEGMENTS)
        return sliced
    if in_runs and 0 < config.window < length and "padding" not in batch:
        return sliced | {WHOLE_TOKENS: batch["tokens"]}
    masks = {"visible": self_mask(config, batch, length)}
    if config.full_every:
        masks["visible_in_full"] = self_mask(config, batch, length, windowed=False)
    for name, mask in masks.items():
        if mask.is_plain:
            continue
        whole = mask.dense(length, batch["tokens"].device)
        assert whole is not None
        allowed = whole.expand(len(batch["tokens"]), 1, length, length)
        sliced[name] = allowed[:, 0].index_select(1, mine)
        sliced.pop("padding", None)
        sliced.pop(SEGMENTS, None)
        sliced.pop(STARTS, None)
    return sliced


def apply_context(model: nn.Module, cp: ProcessGroup) -> None:
    """Replace every attention core by one that sees the whole sequence, and let routers judge it whole."""
    for module in list(model.modules()):
        for leaf, child in list(module.named_children()):
            if isinstance(child, AttentionCore):
                setattr(module, leaf, ContextCore(child, cp))
            elif isinstance(child, Router):
                child.forward = GlobalRouter(child, cp).forward  # type: ignore[method-assign]


class ContextCore(nn.Module):
    """`AttentionCore` whose queries are of this rank's positions and whose keys are gathered."""

    def __init__(self, whole: AttentionCore, cp: ProcessGroup) -> None:
        super().__init__()
        self._whole, self._cp = whole, cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask,
        bias: Tensor | None,
        keys: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[B, heads, L / ranks, D of the values]."""
        assert bias is None
        key, value = (in_order(gather(t, 2, self._cp), 2, self._cp) for t in (key, value))
        if mask.documents is not None:
            return self._of_documents(query, key, value, mask.documents, keys, sinks)
        if not mask.causal or mask.allowed is not None:
            return self._whole.attend(query, key, value, mask.allowed, False, keys, sinks)
        # Two chunks of queries, each with the keys up to its own end.
        chunk = query.shape[2] // 2
        parts = []
        for half, number in enumerate(self._chunks()):
            mine, end = slice(half * chunk, (half + 1) * chunk), (number + 1) * chunk
            rows, drawn = query[:, :, mine], None if keys is None else keys[:, mine]
            before = self._until_own_end(rows, end, self._whole.drops(keys))
            read = key[:, :, :end], value[:, :, :end]
            parts.append(self._whole.attend(rows, *read, before, False, drawn, sinks))
        return torch.cat(parts, dim=2)

    def _of_documents(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents,
        keys: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        length, device, plain = key.shape[2], query.device, not (self._whole.cap or self._whole.drops(keys))
        if plain and sinks is None and documents.bounds is not None:
            chunk, parts = length // (2 * self._cp.size), list[Tensor]()
            for half, number in enumerate(self._chunks()):
                mine, end = slice(half * chunk, (half + 1) * chunk), (number + 1) * chunk
                rows, bounds = query[:, :, mine], bounds_of_chunk(documents.starts(length), end - chunk, end)
                read = key[:, :, :end], value[:, :, :end]
                mixed = attend_flash(rows, *read, *bounds, documents.window, self._whole.scale)
                if mixed is None:
                    break
                parts.append(mixed)
            else:
                return torch.cat(parts, dim=2)

        def of_mine() -> Tensor:
            return documents.dense(length, device).index_select(2, positions_of(length, self._cp, device))

        return self._whole.attend(query, key, value, documents.once(of_mine), False, keys, sinks)

    def _chunks(self) -> tuple[int, int]:
        return self._cp.index, 2 * self._cp.size - 1 - self._cp.index

    def _until_own_end(self, queries: Tensor, end: int, dropped: bool) -> Tensor:
        """The mask of the last positions of `end`, each of which sees what is not after it: causal, aligned at the
        lower right. On CUDA that has a fused kernel and needs no tensor, unless scores are capped or dropped."""
        rows = queries.shape[2]
        if queries.is_cuda and not (self._whole.cap or dropped):
            from torch.nn.attention.bias import (
                causal_lower_right,
            )  # imports torch's compiler: a second of every start

            return causal_lower_right(rows, end)
        steps = torch.arange(end, device=queries.device)
        return steps[None, :] <= steps[end - rows :, None]


def bounds_of_chunk(starts: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
    """Where the documents with these STARTS begin among the queries from position `first` to `end` of all rows, and
    among the keys before `end`, int32 [documents + 1] each. A document has the keys up to its last query; those before
    the chunk have keys and no query."""
    found = []
    for base in (first, 0):
        width = end - base
        rows = torch.arange(len(starts), dtype=torch.int32, device=starts.device) * width
        inside = (starts - base).clamp(0, width) + rows[:, None]
        found.append(torch.nn.functional.pad(inside.flatten(), (0, 1), value=len(starts) * width))
    return found[0], found[1]


class GlobalRouter:
    """Routes the whole sequence on every rank and keeps this rank's part.

    Balance and capacity are of a sequence, so that a part of it cannot tell. The balancing loss comes out alike
    on every rank; the share that each contributes is the trainer's to divide.
    """

    def __init__(self, router: Router, cp: ProcessGroup) -> None:
        self._whole, self._cp = router.forward, cp

    def forward(self, hidden: Tensor, real: Tensor | None = None) -> Routes:
        """As `Router.forward`, for hidden [B, L / ranks, hidden] and real [B, L]."""
        routes = self._whole(in_order(gather(hidden, 1, self._cp), 1, self._cp), real)
        mine = positions_of(routes.experts.shape[1], self._cp, hidden.device)
        return Routes(
            routes.weights.index_select(1, mine),
            routes.experts.index_select(1, mine),
            routes.extra,
            routes.entropy,
        )


def in_order(whole: Tensor, dim: int, cp: ProcessGroup) -> Tensor:
    """Chunks gathered by rank, put in the order of the sequence."""
    chunks: list[Any] = [None] * (2 * cp.size)
    for number, chunk in enumerate(whole.chunk(2 * cp.size, dim)):
        rank, second = divmod(number, 2)
        chunks[2 * cp.size - 1 - rank if second else rank] = chunk
    return torch.cat(chunks, dim)
