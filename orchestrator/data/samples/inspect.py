"""Samples as the model sees them: tokens, what is predicted of them, where documents end, what is padding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.data.samples.batches import Batches
from orchestrator.data.samples.windows import Streams
from workloads.model.masks import SEGMENTS, attends
from workloads.workload import Batch, Reading

IGNORED = -100
"""The label of a position that is not predicted."""
SIDES = (("tokens", "padding"), ("decoder_tokens", "decoder_padding"))
"""What an encoder or a decoder alone reads, and what the decoder of a pair reads; each with where it is real."""
Decode = Callable[[int], str]


@dataclass(frozen=True)
class Spot:
    """A token that a model reads.

    Attributes:
        text, token: what it reads there.
        label: what is predicted there, None for nothing. Of a causal model that is the next token.
        begins: whether it begins a document, or a row.
        real: whether it is no padding.
        position: its position in its document, where the batch says so; sees: how many tokens it attends to, where the
            batch says so.
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
        """The token as plain data, without what is not known or the rule."""
        found: dict[str, Any] = {"token": self.token, "text": self.text}
        found |= {} if self.label is None else {"label": self.label, "label_text": self.said}
        found |= {"begins": True} if self.begins else {}
        found |= {} if self.real else {"padding": True}
        found |= {} if self.position is None else {"position": self.position}
        return found | ({} if self.sees is None else {"sees": self.sees})


def documents_cut(streams: Streams, reading: Reading, packed: bool) -> dict[str, int]:
    """How many documents there are, how many of them are cut, and how many of those would fit a sample."""
    found = {"documents": 0, "cut": 0, "cut_though_short": 0}
    for source in range(streams.sources):
        ends = streams.document_ends(source)
        starts = np.concatenate(([0], ends[:-1]))
        is_long = ends - starts > reading.window
        # a document's first tokens are not predicted from it, nor are those that a sample shares with the one before
        overlap = reading.window - reading.stride
        stride = reading.stride
        last = np.maximum(ends - 1 - overlap, starts)
        is_cut = is_long if packed else is_long | (starts // stride != last // stride)
        counts = (len(ends), is_cut.sum(), (is_cut & ~is_long).sum())
        for key, count in zip(found, counts, strict=True):
            found[key] += int(count)
    return found


def spots(
    batch: Batch, row: int, decode: Decode, closing: int, length: int | None = None
) -> dict[str, list[Spot]]:
    """The tokens of a row of a batch, by the entry that has them.

    Args:
        batch, row: which row.
        decode: the text of a token.
        closing: the token that ends a document.
        length: how many tokens are no padding, where the batch does not say it.
    """
    values = {name: entry[row].numpy() for name, entry in batch.items()}
    seen = attends({name: entry[row : row + 1] for name, entry in batch.items() if entry.dim()})
    last = [tokens for tokens, _ in SIDES if tokens in values][-1]
    found = {}
    for name, padding in SIDES:
        if name not in values:
            continue
        tokens = values[name]
        labels = values.get("labels") if name == last else None
        labels = labels if labels is not None and labels.shape == tokens.shape else None
        real = values.get(padding, np.arange(len(tokens)) < (len(tokens) if length is None else length))
        places = values.get("positions") if name == "tokens" else None
        places = places if places is not None and places.shape == tokens.shape else None
        sees = seen[0].sum(1).numpy() if name == "tokens" and seen is not None else None
        begins = np.concatenate(([True], tokens[:-1] == closing))
        begins = begins if places is None else begins | (places == 0)
        found[name] = [
            _spot(decode, int(token), labels, begins, real, places, sees, number)
            for number, token in enumerate(tokens)
        ]
    return found


def others(batch: Batch, row: int) -> dict[str, Any]:
    """What a row has besides: whole labels, seeds, numbers of one sample."""
    shown = {name for side in SIDES for name in side} | {"positions", "attention", SEGMENTS}
    return {
        name: entry[row].tolist()
        for name, entry in batch.items()
        if name not in shown
        and (entry.dim() == 1 or (name == "labels" and entry.shape[1:] != _length(batch)))
    }


def samples_at(
    batches: Batches, positions: Sequence[int], global_batch: int, begun: tuple[int, int] = (0, 0)
) -> list[dict[str, Any]]:
    """Where the samples at these positions come from: step, turn, sample, source, and its pieces of the stream. The run
    has `begun` at that step with the sample at that position; what comes before has no step of its."""
    turns, ids = batches.order.at(np.array(positions))
    found = []
    step, first = begun
    for position, turn, sample in zip(positions, turns.tolist(), ids.tolist(), strict=True):
        source, pieces = batches.read.origin(sample)
        found.append(
            {
                "position": position,
                "step": step + (position - first) // global_batch + 1 if position >= first else None,
                "turn": turn,
                "sample": sample,
                "source": source,
                "pieces": [[start, start + length] for start, length in pieces],
            }
        )
    return found


def plain(spots_of_row: Sequence[Spot], is_causal: bool) -> list[tuple[str, str]]:
    """A row as (text, kind) pieces: "boundary", "padding", "replaced" and "label" of what is masked, "predicted" and
    "read" of what is only read. Of a causal model the token is told by the label of the one before it; where not all
    that could be is predicted, what is stands between « and »."""
    found: list[tuple[str, str]] = []
    predicted = partly = False
    padding = 0
    for number, spot in enumerate(spots_of_row):
        if not spot.real:
            padding += 1
            if number + 1 == len(spots_of_row) or spots_of_row[number + 1].real:
                found.append((f" [{padding} of padding]", "padding"))
                padding = 0
            continue
        if spot.begins and number:
            found.append((" ‖ ", "boundary"))
        if is_causal:
            partly |= not predicted and not spot.begins
            found.append((spot.text, "predicted" if predicted else "read"))
            predicted = spot.label is not None
        elif spot.label is None:
            found.append((spot.text, "read"))
        elif spot.label == spot.token:
            found.append((f"[{spot.text}]", "predicted"))
        else:
            found += [(f"[{spot.text}", "replaced"), (f"→{spot.said}]", "label")]
    return _marked(found) if partly else found


def answers_apart(found: dict[str, list[Spot]], batch: Batch) -> dict[str, list[Spot]]:
    """The tokens of a row by their entry; those of two answers that are compared by what each answer is."""
    if "answer_tokens" not in batch:
        return found
    half = len(found["tokens"]) // 2
    is_pair = "desirable" not in batch
    first, second = ("chosen", "rejected") if is_pair else ("completion", "completion of another row")
    return {first: found["tokens"][:half], second: found["tokens"][half:]}


def _marked(pieces: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pieces with « and » around those that are predicted."""
    found: list[tuple[str, str]] = []
    for kind, group in itertools.groupby(pieces, lambda piece: piece[1]):
        marks = [("«", "label")], [("»", "label")]
        begin, end = marks if kind == "predicted" else ([], [])
        found += [*begin, *group, *end]
    return found


def _spot(
    decode: Decode,
    token: int,
    labels: np.ndarray | None,
    begins: np.ndarray,
    real: np.ndarray,
    places: np.ndarray | None,
    sees: np.ndarray | None,
    number: int,
) -> Spot:
    label = None if labels is None or labels[number] == IGNORED else int(labels[number])
    return Spot(
        decode(token),
        token,
        label,
        "" if label is None else decode(label),
        bool(begins[number]),
        bool(real[number]),
        None if places is None else int(places[number]),
        None if sees is None else int(sees[number]),
    )


def _length(batch: Batch) -> Any:
    return batch.get("decoder_tokens", batch["tokens"]).shape[1:]
