"""Prompts that the model of a commit continues."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hf_tokenizers import DOCUMENTS
from tokenizers import Tokenizer
from torch import Tensor

from orchestrator.data.encoding import tokenizer as tokenizers
from orchestrator.data.encoding.training import train_bytes
from orchestrator.evaluate.samples import continue_prompts
from orchestrator.resolve.prompts import framed as prompt_row
from workloads.errors import WorkloadError
from workloads.load import load
from workloads.objectives.samples import Samples
from workloads.record_format import pack
from workloads.workload import Frame, Sampling, Vocabulary

SIZE = 400
SMALL = {"vocab_size": SIZE, "hidden": 32, "layers": 2, "intermediate": 64, "max_positions": 64}
PROMPTS = ["The value of an", "", "a longer text with several words in it"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    special = ["<pad>", "<cls>", "<sep>", "<mask>", *(f"<extra_id_{i}>" for i in range(100))]
    return Tokenizer.from_str(train_bytes(DOCUMENTS, SIZE, special))


def workload_of(tokenizer: Tokenizer, model: str, objective: str) -> Any:
    roles = {k: v for k, v in tokenizers.roles_of(tokenizer, {}).items() if k != "unk"}
    sentinels = tuple(tokenizers.sentinels(tokenizer))
    ends = np.zeros(SIZE, bool)
    vocabulary = Vocabulary(SIZE, **roles, sentinels=sentinels, word_start=ends, sentence_end=ends)
    return load(model, objective, vocabulary, changes=SMALL, sequence_length=32)


@pytest.mark.parametrize(("model", "objective"), [("gpt-tiny", "causal_lm"), ("t5-tiny", "span_corruption")])
def test_prompts_are_continued_in_text(tokenizer: Tokenizer, model: str, objective: str) -> None:
    workload = workload_of(tokenizer, model, objective)
    asked: list[str] = []

    def read(name: str) -> Tensor:
        asked.append(name)
        return workload.initial(name, 1) * 4

    found = continue_prompts(workload, read, tokenizer, PROMPTS, 8)
    assert sorted(asked) == sorted(workload.shapes)
    assert found == continue_prompts(workload, read, tokenizer, PROMPTS, 8)
    assert found[:1] == continue_prompts(workload, read, tokenizer, PROMPTS[:1], 8)
    assert any(found)
    warm = [Sampling(temperature=3.0, seed=seed) for seed in (1, 1, 2)]
    drawn = [continue_prompts(workload, read, tokenizer, PROMPTS, 8, way) for way in warm]
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_prompt_is_framed_as_texts_of_training_are(tokenizer: Tokenizer) -> None:
    """The tokens that the model is given, seen by a workload that says them back."""
    given: list[list[int]] = []

    class Echo:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def generate(
            self, model: Any, rows: list[list[int]], most: int, sampling: Sampling
        ) -> list[list[int]]:
            given.extend(rows)
            return rows

    def said(model: str, objective: str) -> list[str]:
        workload: Any = Echo(workload_of(tokenizer, model, objective))
        given.clear()
        return continue_prompts(
            workload, lambda name: torch.zeros(workload.shapes[name]), tokenizer, ["a text", ""], 4
        )

    eos, bos = (tokenizers.roles_of(tokenizer, {}).get(role) for role in ("eos", "bos"))
    inside = tokenizer.encode("a text").ids
    assert said("gpt-tiny", "causal_lm") == ["a text", ""]
    assert given == [inside, [eos]]
    said("t5-tiny", "span_corruption")
    assert given == [[*inside, eos], [eos]]
    said("bart-tiny", "denoising")
    assert given == [
        [*([bos] if bos is not None else []), *inside, eos],
        [*([bos] if bos is not None else []), eos],
    ]


def test_the_prompt_of_a_pair_is_framed_as_a_source_is(tokenizer: Tokenizer) -> None:
    eos, bos = (tokenizers.roles_of(tokenizer, {})[role] for role in ("eos", "bos"))
    framed = Frame(((bos,), (eos,)), ((bos,), (eos,), (eos,)), False)
    workload = workload_of(tokenizer, "bart-tiny", "seq2seq")
    objective = replace(workload.objective, vocabulary=replace(workload.vocabulary, frame=framed))
    workload = replace(workload, objective=objective, vocabulary=objective.vocabulary)
    inside = tokenizer.encode("a text").ids
    row = objective.collate(Samples(lambda _: pack([inside, inside]), 1), [0], 0)["tokens"][0]
    assert prompt_row(workload, tokenizer, "a text") == row[: len(inside) + 2].tolist() == [bos, *inside, eos]


def test_no_prompts_build_no_model(tokenizer: Tokenizer) -> None:
    workload = workload_of(tokenizer, "gpt-tiny", "causal_lm")
    assert continue_prompts(workload, lambda name: pytest.fail("reads"), tokenizer, [], 4) == []


def test_a_model_that_generates_nothing_says_so(tokenizer: Tokenizer) -> None:
    workload = workload_of(tokenizer, "bert-tiny", "masked_lm")
    with pytest.raises(WorkloadError, match=r"bert \(encoder with head masked\) generates no text"):
        continue_prompts(workload, lambda name: workload.initial(name, 0), tokenizer, ["a text"], 4)
