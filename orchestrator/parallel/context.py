"""Context parallelism: each rank holds a part of every sequence, and attention sees all of it.

Keys and values are all-gathered over the group before each attention, which is exact for any mask (Grattafiori et al.,
2024, "The Llama 3 Herd of Models", section 3.3.2). They are not passed around a ring.

With n ranks a sequence of L tokens is cut into 2n chunks of L / 2n tokens. Rank r holds chunks r and 2n - 1 - r, so
that its queries have the same number of visible keys under a causal mask on every rank. For n = 2:

    chunk   0  1  2  3
    rank    0  1  1  0
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
from workloads.model.transformer import LABEL_WEIGHTS
from workloads.objectives.distillation import STORED
from workloads.objectives.rewarded import PER_TOKEN
from workloads.workload import Batch

ALONG_LENGTH = (
    *("tokens", "labels", LABEL_WEIGHTS, "token_types", "task_types", "padding"),
    *(SEGMENTS, *PER_TOKEN, *STORED),
)


def positions_of(length: int, cp: ProcessGroup, device: torch.device) -> Tensor:
    """Return the positions that this rank holds, int64 [length / ranks], ascending.

    Args:
        length: number of tokens of a whole sequence, a multiple of 2 x ranks.
        cp: the context-parallel group.
        device: the device of the result.
    """
    chunks = torch.arange(length, device=device).chunk(2 * cp.size)
    return torch.cat((chunks[cp.index], chunks[2 * cp.size - 1 - cp.index]))


def slice_batch(batch: Batch, config: TransformerConfig, cp: ProcessGroup) -> Batch:
    """Return this rank's part of a batch of whole sequences: entries [B, L, ..] become [B, L / ranks, ..].

    A causal mask needs no tensor. Other masks depend on the whole sequence, and are made here from the whole batch in
    the cheapest form that suffices:

    - isolated documents: the segments of all L positions (WHOLE_SEGMENTS)
    - a sliding window alone: the tokens of all L positions (WHOLE_TOKENS)
    - any other: `visible` bool [B, L / ranks, L], see `self_mask`; layers with full attention have
      `visible_in_full`

    Args:
        batch: whole sequences, the same on all ranks of the group.
        config: the model, whose masks and positions must be those of whole sequences.
        cp: the context-parallel group.
    """
    if cp.size == 1:
        return batch
    rows, length = batch["tokens"].shape[:2]
    # All ranks of the group read the same whole batch. Cutting it here instead of in the data keeps samples and
    # receipt independent of the layout.
    mine = positions_of(length, cp, batch["tokens"].device)
    sliced = {
        name: tensor.index_select(1, mine) if name in ALONG_LENGTH else tensor
        for name, tensor in batch.items()
    }
    positions = batch_positions(config, batch)
    if "positions" not in batch:
        # Rotary angles and learned positions must be those of the whole sequence, not 0 .. L / ranks - 1.
        positions = positions.expand(rows, -1)
    sliced["positions"] = positions.index_select(-1, mine)
    # Dropout is a function of the position in the whole sequence.
    sliced[PLACES] = mine.expand(rows, -1)
    # It has become part of `visible`, and its shape [B, L, L] would not fit the slice.
    sliced.pop("attention", None)
    if "padding" in batch:
        # The router needs the padding of the whole sequence [B, L]; attention gets it through its mask.
        sliced.setdefault(REAL, batch["padding"])
    # Whether what a query sees is one run of keys, which kernels take as bounds in place of a mask.
    in_runs = config.causal and "attention" not in batch and not config.is_sparse
    if SEGMENTS in batch and in_runs:
        sliced[WHOLE_SEGMENTS] = batch[SEGMENTS]
        # Padding counts as a document of its own, so the segments already hide it.
        sliced.pop("padding", None)
        sliced.pop(SEGMENTS)
        return sliced
    if in_runs and 0 < config.window < length and "padding" not in batch:
        return sliced | {WHOLE_TOKENS: batch["tokens"]}
    masks = {"visible": self_mask(config, batch, length)}
    if config.full_every:
        masks["visible_in_full"] = self_mask(config, batch, length, windowed=False)
    for name, mask in masks.items():
        # A causal mask without exceptions follows from the positions; `ContextCore` makes it for each chunk.
        if mask.is_plain:
            continue
        dense = mask.dense(length, batch["tokens"].device)
        assert dense is not None
        allowed = dense.expand(rows, 1, length, length)
        sliced[name] = allowed[:, 0].index_select(1, mine)
        sliced.pop("padding", None)
        sliced.pop(SEGMENTS, None)
        sliced.pop(STARTS, None)
    return sliced


def apply_context(model: nn.Module, cp: ProcessGroup) -> None:
    """Replace every attention core and router by one that sees the whole sequence.

    Args:
        model: a stage of the model; changed in place.
        cp: the context-parallel group.
    """
    for module in list(model.modules()):
        for leaf, child in list(module.named_children()):
            if isinstance(child, AttentionCore):
                # The core has no parameters, so replacing the module changes no parameter's name and checkpoints stay
                # as they are.
                setattr(module, leaf, ContextCore(child, cp))
            elif isinstance(child, Router):
                child.forward = GlobalRouter(child, cp).forward  # type: ignore[method-assign]


class ContextCore(nn.Module):
    """An `AttentionCore` for this rank's queries and the gathered keys and values of all ranks."""

    def __init__(self, core: AttentionCore, cp: ProcessGroup) -> None:
        super().__init__()
        self._core = core
        self._cp = cp

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
        """Return [B, heads, L / ranks, D of the values]; query, key and value are [B, heads, L / ranks, D] each.

        Args:
            query: this rank's queries, [B, heads, L / ranks, D].
            key: this rank's keys, [B, key-value heads, L / ranks, D].
            value: this rank's values, [B, key-value heads, L / ranks, D of the values].
            mask: which keys each query sees.
            bias: must be None.
            keys: dropout keys of this rank's tokens, [B, L / ranks]; None without dropout.
            sinks: attention sinks of each head; None without.
        """
        # A bias [heads, L, L] by distance would have to be cut by queries and reordered by keys. Layouts refuse such
        # models.
        assert bias is None
        # [B, heads, L, D], in the order of the sequence; their gradients are reduce-scattered.
        # All-gather instead of a ring: with grouped queries, keys and values are small beside the queries, and any
        # mask works on whole keys (Llama 3: Grattafiori et al., 2024, section 3.3.2).
        key = in_order(gather(key, 2, self._cp), 2, self._cp)
        value = in_order(gather(value, 2, self._cp), 2, self._cp)
        if mask.documents is not None:
            return self._attend_within_documents(
                query, key, value=value, documents=mask.documents, keys=keys, sinks=sinks
            )
        if not mask.causal or mask.allowed is not None:
            return self._core.attend(query, key, value, mask.allowed, causal=False, keys=keys, sinks=sinks)
        # Each of the two chunks of queries attends to the keys up to its own end: later ones are masked for all of it.
        chunk = query.shape[2] // 2
        parts = []
        for half, number in enumerate(self._chunks()):
            mine = slice(half * chunk, (half + 1) * chunk)
            end = (number + 1) * chunk
            queries = query[:, :, mine]
            # Dropout keys belong to queries, so they are cut as the queries are.
            dropout_keys = None if keys is None else keys[:, mine]
            allowed = self._lower_right_mask(queries, end, self._core.drops(keys))
            parts.append(
                self._core.attend(
                    queries,
                    key[:, :, :end],
                    value[:, :, :end],
                    allowed,
                    causal=False,
                    keys=dropout_keys,
                    sinks=sinks,
                )
            )
        return torch.cat(parts, dim=2)

    def _attend_within_documents(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents,
        keys: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend within documents: by a kernel that takes their bounds if there is one, else by a mask."""
        length = key.shape[2]
        device = query.device
        is_plain = not (self._core.cap or self._core.drops(keys))
        if is_plain and sinks is None and documents.bounds is not None:
            # The kernel takes one range of queries, but this rank's two chunks are apart: one call for each.
            chunk = length // (2 * self._cp.size)
            parts: list[Tensor] = []
            for half, number in enumerate(self._chunks()):
                queries = query[:, :, half * chunk : (half + 1) * chunk]
                end = (number + 1) * chunk
                query_bounds, key_bounds = bounds_of_chunk(documents.starts(length), end - chunk, end)
                mixed = attend_flash(
                    queries,
                    key[:, :, :end],
                    value=value[:, :, :end],
                    bounds=query_bounds,
                    key_bounds=key_bounds,
                    window=documents.window,
                    scale=self._core.scale,
                )
                # The kernel is there for both chunks or for neither, so the first answer decides and no work is lost.
                if mixed is None:  # no such kernel here
                    break
                parts.append(mixed)
            else:
                return torch.cat(parts, dim=2)

        def rows_of_mask() -> Tensor:
            return documents.dense(length, device).index_select(2, positions_of(length, self._cp, device))

        allowed = documents.once(rows_of_mask)
        return self._core.attend(query, key, value, allowed, causal=False, keys=keys, sinks=sinks)

    def _chunks(self) -> tuple[int, int]:
        """Return the numbers of this rank's two chunks, ascending."""
        return self._cp.index, 2 * self._cp.size - 1 - self._cp.index

    def _lower_right_mask(self, queries: Tensor, end: int, dropped: bool) -> Tensor:
        """Return the causal mask [queries, end] of the last positions before `end`: key j is visible to query i if
        j <= end - queries + i.

        On CUDA a fused kernel needs no tensor for this mask, unless scores are capped or dropped.
        """
        count = queries.shape[2]
        if queries.is_cuda and not (self._core.cap or dropped):
            # Imported on demand: it imports torch's compiler, which takes a second.
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(count, end)
        steps = torch.arange(end, device=queries.device)
        return steps[None, :] <= steps[end - count :, None]


def bounds_of_chunk(starts: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
    """Return the bounds of documents in one chunk, as kernels for sequences of varying length take them.

    All rows are laid end to end: queries [rows x (end - first)], keys [rows x end]. Document d has the queries
    bounds[d] .. bounds[d + 1] and the keys of the same range in the second result. A document that ends before the
    chunk has keys and no queries.

    Args:
        starts: first position of each document, int [rows, documents].
        first: first position of the chunk's queries.
        end: position after the last query, and after the last key.

    Returns:
        Bounds among the queries and among the keys, int32 [rows x documents + 1] each.
    """
    bounds = []
    for base in (first, 0):
        width = end - base
        offsets = torch.arange(len(starts), dtype=torch.int32, device=starts.device) * width
        inside = (starts - base).clamp(0, width) + offsets[:, None]
        bounds.append(torch.nn.functional.pad(inside.flatten(), (0, 1), value=len(starts) * width))
    return bounds[0], bounds[1]


class GlobalRouter:
    """Routes the whole sequence on every rank and keeps this rank's part.

    Load balance and capacity are defined for a whole sequence, so a part of it does not suffice. Every rank computes
    the same balancing loss; `StepLosses.of` divides it by the number of ranks.
    """

    def __init__(self, router: Router, cp: ProcessGroup) -> None:
        self._core, self._cp = router.forward, cp

    def forward(self, hidden: Tensor, real: Tensor | None = None) -> Routes:
        """Return the routes of this rank's tokens, like `Router.forward`.

        hidden [B, L / ranks, hidden]; real bool [B, L], False for padding.

        Args:
            hidden: this rank's tokens, [B, L / ranks, hidden].
            real: bool [B, L] of whole sequences, False for padding; None without padding.
        """
        routes = self._core(in_order(gather(hidden, 1, self._cp), 1, self._cp), real)
        mine = positions_of(routes.experts.shape[1], self._cp, hidden.device)
        return Routes(
            routes.weights.index_select(1, mine),
            routes.experts.index_select(1, mine),
            routes.extra,
            routes.entropy,
        )


def in_order(full: Tensor, dim: int, cp: ProcessGroup) -> Tensor:
    """Reorder 2 x ranks chunks along `dim` from the order of ranks (0, 2n-1, 1, 2n-2, ..) to that of the sequence.

    Args:
        full: parts of all ranks, concatenated along `dim` in rank order.
        dim: the dimension of the sequence.
        cp: the context-parallel group.
    """
    # Rank r's gathered part is its chunks r and 2n - 1 - r, in this order, so pieces 2r and 2r + 1 of `full`.
    chunks: list[Any] = [None] * (2 * cp.size)
    for number, chunk in enumerate(full.chunk(2 * cp.size, dim)):
        rank, second = divmod(number, 2)
        chunks[2 * cp.size - 1 - rank if second else rank] = chunk
    return torch.cat(chunks, dim)
