"""Rows no longer than their micro-batch needs, and micro-batches of samples with about the same length.

Samples of a supervised objective differ in length, and padding costs as much as text. The samples of a step are sorted
by length and cut into micro-batches, and each micro-batch is cut after its last real token. A step still has the same
samples, so its loss and its receipt are the same; only the order in which numbers are added changes. Sorting within a
step needs no shuffling of its own, unlike grouping by length over an epoch: which samples a step has stays random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestrator.data.samples.batches import Batches, slices
from orchestrator.parallel.arithmetic import NEWEST, Arithmetic
from orchestrator.parallel.layout import Layout, divisors
from orchestrator.train.config import TrainSpec
from workloads.model.dropout import KEYS
from workloads.model.heads import ANSWER_ENDS
from workloads.model.masks import QUERIES, SEGMENTS
from workloads.model.transformer import LABEL_WEIGHTS
from workloads.objectives.distillation import STORED
from workloads.workload import Batch, Workload

ALONG_ROW = (
    *("tokens", "labels", LABEL_WEIGHTS, "token_types", "task_types", "padding", "targets"),
    *(QUERIES, SEGMENTS, *STORED),
)
"""Entries [B, L, ...]."""
LOOKED_AT, LOOKED_AT_REMOTE = 256, 32
"""Samples whose lengths stand for all; fewer in a store, where each may need a download."""
COLLATED = 32
"""Samples of them that are collated at once."""
ON_GPU = 8
"""Rows on a GPU have a multiple of this many tokens, which its matrix units prefer."""


@dataclass(frozen=True)
class RowLengths:
    """How the samples of a step become rows.

    Attributes:
        cuts: whether rows end with the longest of their micro-batch.
        deals: whether the samples of a step are dealt to micro-batches by length.
        multiple: the layout needs rows of a multiple of this many tokens.
        parts: texts of a sample, each of which has an equal part of the row.
    """

    cuts: bool = False
    deals: bool = False
    multiple: int = 1
    parts: int = 1

    def cut(self, batch: Batch) -> Batch:
        """Return the batch with shorter rows, or unchanged."""
        return shortened_rows(batch, self.multiple, self.parts) if self.cuts else batch


FULL_LENGTH = RowLengths()
"""Rows of full length, in the order of the samples."""


def lengths_of(
    workload: Workload,
    layout: Layout,
    train: TrainSpec,
    *,
    on_gpu: bool,
    packed: bool,
    has_means: bool = False,
) -> RowLengths:
    """Return how a run's samples become rows.

    Args:
        workload: the model and its objective.
        layout: how the ranks divide the work.
        train: how the run trains.
        on_gpu: whether ranks compute on GPUs.
        packed: whether rows are filled with whole documents.
        has_means: whether a teacher adds means over a micro-batch to the loss.

    Rows keep their full length where shapes must not change (a pipeline, a compiled model), where the result depends
    on the length (capacities of experts, patterns of sparse attention, spans, which may begin at padding as in
    transformers, and code that is not this project's), and under `determinism: bitwise`, whose bits must not depend on
    it.
    """
    config: Any = workload.config.as_transformer
    by_length = config is None or config.is_sparse or config.head == "span"
    if layout.pp > 1 or train.keeps_row_length or by_length or (config.moe and config.moe.capacity_factor):
        return FULL_LENGTH
    multiple = math.lcm(
        2 * layout.cp if layout.cp > 1 else 1,
        layout.tp * layout.cp if layout.sequence else 1,
        ON_GPU if on_gpu else 1,
    )
    # A loss with a mean over a micro-batch (experts' balance, a second head) depends on which samples share one.
    adds_up = not (has_means or config.moe or config.sentence_head or config.generator or workload.compares)
    varies = workload.objective.windowing.unit != "stream" and not packed
    parts = 2 if getattr(workload.objective, "compares", False) else getattr(workload.objective, "parts", 1)
    return RowLengths(cuts=True, deals=adds_up and varies, multiple=multiple, parts=parts)


def mean_row_tokens(
    batches: Batches, lengths: RowLengths, train: TrainSpec, sequence_length: int, draws: bool = False
) -> tuple[tuple[int, float], ...]:
    """Return the mean tokens of a row by the number of rows of a micro-batch, over the first samples of training.

    The samples form the same micro-batches as in training. A text and its target count together, as a share of the full
    row.

    Args:
        batches: the samples of training.
        lengths: how they become rows.
        train: says how many samples a step has.
        sequence_length: tokens of a full row.
        draws: whether rows have keys for random numbers.

    Returns:
        Pairs (rows, tokens) for every divisor of the global batch, ascending.
    """
    if not lengths.cuts or batches.read.objective.windowing.unit == "stream":
        return ((1, float(sequence_length)),)
    size = train.global_batch
    most = LOOKED_AT_REMOTE if batches.read.streams.at_once > 1 else LOOKED_AT
    steps = min(max(most // size, 1), train.steps)
    longest: dict[int, list[float]] = {rows: [] for rows in divisors(size)}
    for step in range(steps):
        positions = np.arange(step * size, step * size + min(size, most))
        row_tokens, full = _row_tokens(batches, lengths, positions, draws)
        order = (
            dealing_order(batches.lengths(positions), 1, 1) if lengths.deals else np.arange(len(positions))
        )
        for rows, means in longest.items():
            # [micro-batches, parts]: every row is as long as the longest of its micro-batch.
            found = np.maximum.reduceat(row_tokens[order], np.arange(0, len(order), rows))
            means.append(float(found.sum(1).mean()) / full * sequence_length)
    return tuple((rows, sum(means) / steps) for rows, means in longest.items())


def _row_tokens(
    batches: Batches, lengths: RowLengths, positions: np.ndarray, draws: bool
) -> tuple[np.ndarray, int]:
    """Return the tokens of each sample's row and of its target, int64 [samples, 1 or 2], and those of a full row."""
    result: list[list[int]] = []
    full = 0
    for first in range(0, len(positions), COLLATED):
        batch, _ = batches.at(positions[first : first + COLLATED])
        names = [name for name in ("tokens", "decoder_tokens") if name in batch]
        count, full = len(batch["tokens"]), sum(batch[name].shape[1] for name in names)
        if draws:
            batch[KEYS] = torch.zeros(count, dtype=torch.int64)
        for row in range(count):
            # An entry that all rows share has one row.
            alone = {
                name: entry[row : row + 1] if len(entry) == count else entry for name, entry in batch.items()
            }
            cut = lengths.cut(alone)
            result.append([cut[name].shape[1] for name in names])
    return np.array(result, dtype=np.int64), full


def dealing_order(
    lengths: np.ndarray, micro_batch: int, ranks: int, arithmetic: Arithmetic = NEWEST
) -> np.ndarray:
    """Return the order in which samples form micro-batches, int64 [samples]: a permutation of their numbers.

    Samples of about the same length share a micro-batch, whatever the number of ranks. The micro-batches are dealt to
    the ranks from the longest to the shortest, forwards and backwards in turns (0, 1, 1, 0, 0, 1, ...), so that ranks
    have about the same work.

    Args:
        lengths: int64 [samples]; equal lengths keep their order.
        micro_batch: samples of a micro-batch; a divisor of their number.
        ranks: size of the data axis, whose ranks take contiguous blocks as `slices` says.
        arithmetic: the order in which the run adds numbers. Earlier versions put micro-batches in bit-reversed order
            (0, 4, 2, 6, 1, 5, 3, 7), which gives the first of two ranks the longer one of each pair.
    """
    # [micro-batches, samples of each], from the longest to the shortest.
    rows = np.argsort(-lengths, kind="stable").reshape(-1, micro_batch)
    # Within a micro-batch by number again: the sum over its samples keeps the order of the data.
    rows.sort(axis=1)
    if arithmetic < Arithmetic.LABELLED_TOKENS:
        bits = max(len(rows) - 1, 1).bit_length()
        reversed_ = [int(f"{number:0{bits}b}"[::-1], 2) for number in range(len(rows))]
        return rows[np.argsort(reversed_, kind="stable")].ravel()
    batch_counts = [len(slices(0, len(lengths), rank, ranks, micro_batch)) for rank in range(ranks)]
    blocks: list[list[int]] = [[] for _ in batch_counts]
    longest_first = iter(range(len(rows)))
    for round_number in range(max(batch_counts)):
        open_ranks = [rank for rank in range(ranks) if batch_counts[rank] > round_number]
        for rank in reversed(open_ranks) if round_number % 2 else open_ranks:
            blocks[rank].append(next(longest_first))
    return rows[[number for block in blocks for number in block]].ravel()


def shortened_rows(batch: Batch, multiple: int = 1, parts: int = 1) -> Batch:
    """Return the batch with rows cut after the last real token of any row, rounded up to `multiple`.

    A batch that does not say what is padding, or that has entries whose length dimension is unknown, stays whole.

    Args:
        batch: a micro-batch.
        multiple: rows have a multiple of this many tokens.
        parts: texts of a row, each in an equal part of it.
    """
    if "padding" not in batch:
        return batch
    length = batch["padding"].shape[1]
    if parts > 1:
        # Dropout counts the positions of a row, and the second answer would begin at another one. Texts that are
        # computed apart count their own.
        return (
            batch if KEYS in batch and SEGMENTS in batch else _shortened_parts(batch, length, multiple, parts)
        )
    length_needed = _needed_length(batch["padding"], multiple)
    target_length = _needed_length(batch["decoder_padding"], multiple) if "decoder_padding" in batch else None
    result: Batch = {}
    for name, entry in batch.items():
        if name in ("decoder_tokens", "decoder_padding") or (name == "labels" and target_length is not None):
            result[name] = entry[:, :target_length]
        elif name == "positions":
            result[name] = entry[..., :length_needed]
        # [B, L, L], which query sees which key: both are cut.
        elif name == "attention":
            result[name] = entry[:, :length_needed, :length_needed]
        elif name in ALONG_ROW and entry.dim() > 1 and entry.shape[1] == length:
            result[name] = entry[:, :length_needed]
        # An unknown entry with a dimension of this length, perhaps along the row: better no cut than half a one.
        elif length in entry.shape[1:]:
            return batch
        else:
            result[name] = entry
    return result


def _shortened_parts(batch: Batch, length: int, multiple: int, parts: int) -> Batch:
    """Return a batch whose rows are equal parts, each with a text, with all parts cut alike."""
    part = length // parts
    length_needed = _needed_length(batch["padding"].view(-1, part), multiple)
    if any(
        length in entry.shape[1:] and name not in (*ALONG_ROW, "positions") for name, entry in batch.items()
    ):
        return batch

    def cut(entry: Tensor) -> Tensor:
        return entry.view(len(entry), parts, part)[:, :, :length_needed].flatten(1)

    result = {name: cut(entry) if length in entry.shape[1:] else entry for name, entry in batch.items()}
    if ANSWER_ENDS in batch:
        ends = batch[ANSWER_ENDS]
        result[ANSWER_ENDS] = torch.where(ends >= part, ends - (part - length_needed), ends)
    return result


def _needed_length(real: Tensor, multiple: int) -> int:
    """Return the number of columns up to the last one with a real token, rounded up, at most all."""
    columns = real.any(0).nonzero()
    last = int(columns[-1]) + 1 if len(columns) else 1
    return min(-(-last // multiple) * multiple, real.shape[1])
