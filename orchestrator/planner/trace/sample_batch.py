"""Micro-batches of made-up text with the shapes and types of a run's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from orchestrator.config.records import COLUMNS, PREFERENCES, REFERENCED, REWARDED
from orchestrator.data.config import DataSpec
from orchestrator.data.samples.own_samples import first_samples
from workloads.model.dropout import KEYS, row_keys
from workloads.model.masks import REAL, SEGMENTS
from workloads.objectives.rewarded import ADVANTAGE, COUNTED, DRAWN, WEIGHT
from workloads.record_format import MARK, pack, to_bits
from workloads.workload import IGNORED, Batch, Workload

CORPUS_SAMPLES = 2**40
"""Number of samples of the made-up corpus."""


@dataclass(frozen=True)
class SyntheticCorpus:
    """A corpus whose samples all have the maximum length; see `workloads.workload.Text`."""

    workload: Workload
    length: int

    def __call__(self, sample: int) -> np.ndarray:
        """Return the raw tokens of a sample, or the words of its record."""
        vocabulary, objective = self.workload.vocabulary, self.workload.objective
        special, size = vocabulary.special, vocabulary.size
        ordinary = np.array([i for i in range(min(size, 4096)) if i not in special] or [0])
        if objective.name in COLUMNS:
            return _record(objective.name, ordinary, sample, self.length, getattr(objective, "parts", 1))
        text = np.asarray(ordinary[(np.arange(objective.window(self.length)) * 7 + sample) % len(ordinary)])
        if (
            objective.windowing.unit == "documents"
        ):  # each has two texts: no loss comes from a document that is not a pair
            text[len(text) // 2] = vocabulary.sep
        return text

    def __len__(self) -> int:
        return CORPUS_SAMPLES

    def siblings(self, sample: int) -> range:
        """Return the samples of the same document: only this one."""
        return range(sample, sample + 1)

    def companions(self, sample: int) -> range:
        """Return all samples."""
        return range(len(self))


def sample_batch(data: DataSpec, seed: int, draws: bool, workload: Workload, rows: int) -> Batch:
    """Return a micro-batch of `rows` full-length samples, with everything that a rank adds to one.

    For own samples it repeats the first one. Raises InputError if that cannot be read.

    Args:
        data: what a sample is made of.
        seed: of the run.
        draws: whether rows need keys for random numbers.
        workload: the model and its objective.
        rows: samples of the micro-batch.
    """
    if data.samples is not None:
        first = first_samples(data.samples, seed, 1)
        return {name: value.expand(rows, *value.shape[1:]).clone() for name, value in first.items()}
    text = SyntheticCorpus(workload, data.sequence_length)
    batch = workload.objective.collate(text, range(rows), 0)
    batch = {name: torch.as_tensor(value) for name, value in batch.items()}
    batch.pop(SEGMENTS, None)  # one document per row takes the most computation
    if workload.objective.name in REFERENCED:
        batch["reference"] = torch.full((rows, 2), -20.0)
    if workload.objective.name in REWARDED:
        del batch["padding"]  # rows with answers have none
        batch |= _answer_columns(batch)
    if draws:
        batch[KEYS] = row_keys(seed, 0, rows)
    if data.packing == "best_fit" and workload.config.moe:
        batch[REAL] = torch.ones(rows, data.sequence_length, dtype=torch.bool)
    return batch


def _answer_columns(batch: Batch) -> Batch:
    """Return the entries of rows with answers that a batch of prompts lacks, see `workloads.objectives.rewarded`."""
    tokens = batch["tokens"]
    labels = tokens.roll(-1, 1)
    labels[:, -1] = IGNORED
    ones = torch.ones(tokens.shape)
    return {"labels": labels, ADVANTAGE: ones, WEIGHT: ones, COUNTED: ones, DRAWN: -ones}


def predicted_share(batch: Batch) -> float:
    """Return the share of a micro-batch's labels that are predicted; 1 without labels of tokens."""
    labels = batch.get("labels")
    return float((labels != IGNORED).float().mean()) if labels is not None and labels.numel() else 1.0


def _record(objective: str, ordinary: np.ndarray, sample: int, length: int, parts: int) -> np.ndarray:
    text = np.asarray(ordinary[(np.arange(length) + sample) % len(ordinary)])
    match objective:
        case "sequence_classification" | "multi_label_classification":
            return pack([text, [], [0]])
        case "regression":
            return pack([text, [], [to_bits(0.5)]])
        case "token_classification":
            return pack([text, np.zeros(length, np.int64)])
        case "span_extraction":
            return pack([text[:3], text, [0, 1]])
        case "seq2seq":
            return pack([text, text[::-1]])
        case "sentence_embeddings":
            return pack([text] * parts)
    if objective in REWARDED:
        return pack([text, [ord("{"), ord("}")]])
    answer = np.concatenate([text[:2], text[2:] | MARK])
    if objective in PREFERENCES:
        return pack([answer, [1]] if objective == "kto" else [answer, answer[:-1]])
    return answer
