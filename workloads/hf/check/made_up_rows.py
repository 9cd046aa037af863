"""Made-up rows of any objective, on which a Hugging Face class is tried."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from workloads.hf.as_they_are.workload import HuggingFaceWorkload
from workloads.hf.check.visibility import LENGTH
from workloads.objectives.preferences import BASELINE, REFERENCE
from workloads.objectives.samples import Samples
from workloads.record_format import CLOSE, MARK, pack, to_bits
from workloads.workload import Batch, Objective, Vocabulary

DOCUMENT = 8
"""Tokens of a document in the trial, with its end token."""
Reader = Callable[[int], np.ndarray]


def reader(objective: Objective, vocabulary: Vocabulary, length: int) -> Reader:
    """Return a function that reads sample n of random text or records for inputs of `length` tokens.

    Sample 0 has documents of equal length, sample 1 of other lengths, sample 2 a single one.
    """
    words = np.array(sorted(set(range(vocabulary.size)) - vocabulary.special)[:200])
    if objective.windowing.unit.startswith("record"):
        return lambda sample: _record(objective, words, length, sample)

    def read(sample: int) -> np.ndarray:
        window: int = objective.window(length)
        tokens = np.random.default_rng(sample).choice(words, window)
        if sample < 2:
            tokens[DOCUMENT - 1 - 3 * sample :: DOCUMENT] = vocabulary.eos
        return tokens

    return read


def _record(objective: Objective, words: np.ndarray, length: int, sample: int) -> np.ndarray:
    """Return a record of the objective. No two have the same length."""
    rng = np.random.default_rng(sample)

    def text(least: int, size: int) -> np.ndarray:
        drawn: np.ndarray = rng.choice(words, least + (2 * sample) % max(size, 1)).astype(np.int64)
        return drawn

    name = objective.name
    half = length // 2
    if name == "conversation":
        each = [_answered(text(DOCUMENT - n, 1)) for n in range(1 if sample > 1 else 2)]
        return np.concatenate([part for talk in each for part in (talk, [CLOSE])])
    if getattr(objective, "compares", False):
        answers = [_answered(text(half // 2, half // 2)) for _ in range(2)]
        return pack([answers[0], [1]] if name == "kto" else answers)
    if name == "seq2seq":
        return pack([text(half // 2, half), text(half // 2, half)])
    if name == "span_extraction":
        return pack([text(3, 1), text(half // 2, half // 2), [2, 3]])
    if name == "token_classification":
        tokens = text(half // 2, half)
        return pack([tokens, 1 + np.arange(len(tokens)) % max(len(getattr(objective, "labels", ())), 1)])
    label = to_bits(0.5 * sample) if name == "regression" else sample % 2
    return pack([text(half // 2, half // 2), [label]])


def _answered(words: np.ndarray) -> np.ndarray:
    """Return a text whose second half is the answer to predict."""
    return np.concatenate([words[: len(words) // 2], words[len(words) // 2 :] | MARK])


def samples_of(trial: HuggingFaceWorkload) -> Batch:
    """Return three samples of the trial, with everything that a run adds to them."""
    read = reader(trial.objective, trial.vocabulary, LENGTH)
    batch = trial.objective.collate(Samples(read, 3), [0, 1, 2], 0)
    if getattr(trial.objective, "compares", False):
        batch |= {REFERENCE: torch.zeros(3, 2), BASELINE: torch.zeros(())}
    return batch
