"""Samples as the model sees them: tokens, labels, document boundaries and padding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.data.samples.batches import Batches
from orchestrator.data.samples.windows import Streams
from orchestrator.train.config import Reading
from workloads.model.masks import SEGMENTS, attends
from workloads.workload import Batch, Windowing

IGNORED = -100
"""The label of a position that is not predicted."""
SIDES = (("tokens", "padding"), ("decoder_tokens", "decoder_padding"))
"""The entries for an encoder or decoder alone, and for the decoder of a pair, each with its padding mask."""
Decode = Callable[[int], str]


@dataclass(frozen=True)
class Spot:
    """One token that a model reads.

    Attributes:
        text, token: the token.
        label: the token predicted here, None for none. A causal model predicts the next token.
        said: the label as text.
        begins: whether it begins a document or a row.
        real: whether it is not padding.
        position: its position in its document, if the batch has positions.
        sees: number of tokens that it attends to, if the batch says so.
    """

    text: str
    token: int
    label: int | None
    said: str
    begins: bool
    real: bool
    position: int | None
    sees: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the token as plain data, without unknown and default values."""
        fields: dict[str, Any] = {"token": self.token, "text": self.text}
        if self.label is not None:
            fields |= {"label": self.label, "label_text": self.said}
        if self.begins:
            fields["begins"] = True
        if not self.real:
            fields["padding"] = True
        if self.position is not None:
            fields["position"] = self.position
        return fields | ({} if self.sees is None else {"sees": self.sees})


def documents_cut(streams: Streams, windowing: Windowing, packed: bool) -> dict[str, int]:
    """Count the documents, those that are cut, and those that are cut although they would fit a sample."""
    totals = {"documents": 0, "cut": 0, "cut_though_short": 0}
    for source in range(streams.sources):
        ends = streams.document_ends(source)
        starts = np.concatenate(([0], ends[:-1]))
        is_long = ends - starts > windowing.window
        # a document's first token is never predicted, nor are tokens that a sample shares with the one before
        overlap = windowing.window - windowing.stride
        stride = windowing.stride
        last = np.maximum(ends - 1 - overlap, starts)
        is_cut = is_long if packed else is_long | (starts // stride != last // stride)
        counts = (len(ends), is_cut.sum(), (is_cut & ~is_long).sum())
        for key, count in zip(totals, counts, strict=True):
            totals[key] += int(count)
    return totals


def spots(
    batch: Batch, row: int, decode: Decode, closing: int, length: int | None = None
) -> dict[str, list[Spot]]:
    """Return the tokens of a row of a batch, by the batch entry that holds them.

    Args:
        batch, row: which row.
        decode: returns the text of a token.
        closing: the token that ends a document.
        length: number of tokens that are not padding, if the batch does not say.
    """
    values = {name: entry[row].numpy() for name, entry in batch.items()}
    attention = attends({name: entry[row : row + 1] for name, entry in batch.items() if entry.dim()})
    last = [tokens for tokens, _ in SIDES if tokens in values][-1]
    spots_of = {}
    for name, padding in SIDES:
        if name not in values:
            continue
        tokens = values[name]
        labels = values.get("labels") if name == last else None
        labels = labels if labels is not None and labels.shape == tokens.shape else None
        is_token = values.get(padding, np.arange(len(tokens)) < (len(tokens) if length is None else length))
        positions = values.get("positions") if name == "tokens" else None
        positions = positions if positions is not None and positions.shape == tokens.shape else None
        sees = attention[0].sum(1).numpy() if name == "tokens" and attention is not None else None
        begins = np.concatenate(([True], tokens[:-1] == closing))
        begins = begins if positions is None else begins | (positions == 0)
        spots_of[name] = [
            _spot(
                decode,
                int(token),
                labels=labels,
                begins=begins,
                is_real=is_token,
                positions=positions,
                sees=sees,
                number=number,
            )
            for number, token in enumerate(tokens)
        ]
    return spots_of


def other_entries(batch: Batch, row: int) -> dict[str, Any]:
    """Return the other entries of a row: whole labels, seeds, numbers of one sample."""
    shown = {name for side in SIDES for name in side} | {"positions", "attention", SEGMENTS}
    return {
        name: entry[row].tolist()
        for name, entry in batch.items()
        if name not in shown
        and (entry.dim() == 1 or (name == "labels" and entry.shape[1:] != _length(batch)))
    }


def samples_at(
    batches: Batches, positions: Sequence[int], reading: Reading, origin: tuple[int, int] = (0, 0)
) -> list[dict[str, Any]]:
    """Return where the samples at these positions come from: step, turn, sample, source, and pieces of the stream.

    The step is the first one that trains on a sample.

    `origin` is the step and position at which the run began. Earlier positions have no step.
    """
    pass_numbers, ids = batches.order.at(np.array(positions))
    origins = []
    first_step, first = origin
    for position, pass_number, sample in zip(positions, pass_numbers.tolist(), ids.tolist(), strict=True):
        source, pieces = batches.read.origin(sample)
        origins.append(
            {
                "position": position,
                "step": first_step + reading.first_step_of(position - first) + 1
                if position >= first
                else None,
                "turn": pass_number,
                "sample": sample,
                "source": source,
                "pieces": [[start, start + length] for start, length in pieces],
            }
        )
    return origins


def plain(spots_of_row: Sequence[Spot], is_causal: bool) -> list[tuple[str, str]]:
    """Return a row as (text, kind) pieces.

    Kinds are "boundary", "padding", "predicted" and "read"; for masked tokens "replaced" and "label". For a causal
    model, a token is predicted if the token before it has a label. If only some of the tokens are predicted, « and »
    enclose them.
    """
    pieces: list[tuple[str, str]] = []
    predicted = partly = False
    padding = 0
    for number, spot in enumerate(spots_of_row):
        if not spot.real:
            padding += 1
            if number + 1 == len(spots_of_row) or spots_of_row[number + 1].real:
                pieces.append((f" [{padding} of padding]", "padding"))
                padding = 0
            continue
        if spot.begins and number:
            pieces.append((" ‖ ", "boundary"))
        if is_causal:
            partly |= not predicted and not spot.begins
            pieces.append((spot.text, "predicted" if predicted else "read"))
            predicted = spot.label is not None
        elif spot.label is None:
            pieces.append((spot.text, "read"))
        elif spot.label == spot.token:
            pieces.append((f"[{spot.text}]", "predicted"))
        else:
            pieces += [(f"[{spot.text}", "replaced"), (f"→{spot.said}]", "label")]
    return _marked(pieces) if partly else pieces


def answers_apart(spots_of: dict[str, list[Spot]], batch: Batch) -> dict[str, list[Spot]]:
    """Return the tokens of a row by entry; the tokens of two compared answers by the role of each answer."""
    if "answer_tokens" not in batch:
        return spots_of
    half = len(spots_of["tokens"]) // 2
    is_pair = "desirable" not in batch
    first, second = ("chosen", "rejected") if is_pair else ("completion", "completion of another row")
    return {first: spots_of["tokens"][:half], second: spots_of["tokens"][half:]}


def _marked(pieces: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Put « and » around the predicted pieces."""
    marked: list[tuple[str, str]] = []
    for kind, group in itertools.groupby(pieces, lambda piece: piece[1]):
        marks = [("«", "label")], [("»", "label")]
        begin, end = marks if kind == "predicted" else ([], [])
        marked += [*begin, *group, *end]
    return marked


def _spot(
    decode: Decode,
    token: int,
    labels: np.ndarray | None,
    begins: np.ndarray,
    is_real: np.ndarray,
    positions: np.ndarray | None,
    sees: np.ndarray | None,
    number: int,
) -> Spot:
    label = None if labels is None or labels[number] == IGNORED else int(labels[number])
    return Spot(
        decode(token),
        token,
        label=label,
        said="" if label is None else decode(label),
        begins=bool(begins[number]),
        real=bool(is_real[number]),
        position=None if positions is None else int(positions[number]),
        sees=None if sees is None else int(sees[number]),
    )


def _length(batch: Batch) -> Any:
    return batch.get("decoder_tokens", batch["tokens"]).shape[1:]
