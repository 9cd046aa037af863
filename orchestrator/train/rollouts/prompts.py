"""The prompts of a step, and of a held-out set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from orchestrator.data.samples import receipt
from orchestrator.data.samples.batches import Batches
from orchestrator.data.samples.sample_reader import SampleReader
from workloads.objectives.rewarded import Rewarded, kept_prompt
from workloads.record_format import unpack


class Prompt(NamedTuple):
    """A prompt.

    Attributes:
        number: its position in the run's data, or its number in a held-out set.
        tokens: its token ids, cut to what leaves room for an answer.
        columns: the other columns of its row, which rewards read.
        digest: the receipt digest of the sample.
    """

    number: int
    tokens: list[int]
    columns: dict[str, Any]
    digest: int


def prompts_at(batches: Batches, position: int, count: int, room: int) -> list[Prompt]:
    """Return the prompts at positions [position, position + count).

    Args:
        batches: the run's samples and their order.
        position: the first position.
        count: number of prompts.
        room: maximum tokens of a prompt.
    """
    positions = range(position, position + count)
    _, ids = batches.order.at(np.arange(position, position + count))
    read = batches.read.preloaded(ids)
    prompts = []
    for number, sample in zip(positions, ids.tolist(), strict=True):
        words = read(sample)
        prompts.append(_prompt(read, number, words, room, receipt.digest(number, sample, words)))
    return prompts


def prompts_of_set(read: SampleReader, numbers: Sequence[int], room: int) -> list[Prompt]:
    """Return the prompts of a held-out set by their numbers.

    Args:
        read: returns the words of a row.
        numbers: of the prompts in the set.
        room: maximum tokens of a prompt.
    """
    return [_prompt(read, number, read(number), room, 0) for number in numbers]


def _prompt(read: SampleReader, number: int, words: np.ndarray, room: int, digest: int) -> Prompt:
    tokens, column_words = unpack(words)
    columns = json.loads(bytes(column_words.astype(np.uint8)).decode())
    objective = read.objective
    assert isinstance(objective, Rewarded)
    prompt_tokens = kept_prompt(objective, tokens, room)
    return Prompt(number, prompt_tokens.tolist(), columns, digest)
