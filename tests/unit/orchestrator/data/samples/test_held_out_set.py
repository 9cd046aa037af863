"""Sets of held-out text: every token counts, and a set that cannot be read is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.config.errors import InputError
from orchestrator.data.samples.batches import batches_of
from orchestrator.data.samples.held_out_set import set_of, split_set
from orchestrator.data.samples.held_out_split import split
from orchestrator.data.store.tokens import Tokens
from workloads.model.masks import attends
from workloads.objectives import build

Prepare = Callable[..., str]
TEXT = "A few words of text, number {}. And some more of them."
BREAK = "\n<|endoftext|>\n"


def some(count: int) -> str:
    return BREAK.join(TEXT.format(number) for number in range(count))


def objective_of(tokens: Tokens, name: str = "causal_lm", length: int = 64, **options: Any) -> Any:
    return build(name, vocabulary=tokens.vocabulary(), sequence_length=length, seed=3, **options)


@pytest.mark.parametrize("length", [8, 61, 64, 5000])
def test_every_token_of_a_set_is_predicted_once(prepare_here: Prepare, length: int) -> None:
    tokens = Tokens.open(prepare_here([some(30)], [some(3)]))
    found = set_of(tokens, objective_of(tokens, length=length), "evaluate.sets.wiki.sources")
    assert (found.tokens, found.documents, found.bytes) == (
        tokens.manifest.tokens,
        tokens.manifest.documents,
        tokens.manifest.bytes,
    )
    batch = found.batch(range(found.samples))
    labels = batch["labels"][batch["labels"] != -100]
    streams = [tokens.window(source, 0, tokens.length(source)) for source in (0, 1)]
    # the first token of a stream follows nothing
    assert np.array_equal(labels.numpy(), np.concatenate([stream[1:] for stream in streams]))
    assert batch["tokens"].shape == (found.samples, length)


def test_samples_are_in_the_order_asked_for(prepare_here: Prepare) -> None:
    tokens = Tokens.open(prepare_here([some(30)]))
    found = set_of(tokens, objective_of(tokens), "")
    whole = found.batch(range(found.samples))
    some_of_them = found.batch([2, 0, found.samples - 1])
    assert all(torch.equal(some_of_them[key], whole[key][[2, 0, -1]]) for key in whole)


def test_documents_that_are_isolated_stay_so_in_the_last_window(prepare_here: Prepare) -> None:
    tokens = Tokens.open(prepare_here([some(3)]))
    found = set_of(tokens, objective_of(tokens, length=500, documents="isolate"), "")
    assert found.samples == 1
    batch = found.batch([0])
    assert bool(attends(batch).any(dim=-1).all())  # else a softmax over nothing
    ends = tokens.document_ends(0)
    assert int((batch["labels"] != -100).sum()) == tokens.length(0) - len(ends)
    assert int(batch["positions"][batch["labels"] != -100].max()) < int(np.diff(ends, prepend=0).max())


def test_masks_of_a_set_do_not_change(prepare_here: Prepare) -> None:
    tokens = Tokens.open(prepare_here([some(30)]))
    found = set_of(tokens, objective_of(tokens, "masked_lm"), "")
    once, again = (found.batch(range(found.samples)) for _ in range(2))
    assert all(torch.equal(once[key], again[key]) for key in once)


def test_training_and_the_set_share_no_window(prepare_here: Prepare) -> None:
    texts = [" ".join(str(number * number + i) for i in range(40)) for number in range(60)]
    tokens = Tokens.open(prepare_here([BREAK.join(texts)], [BREAK.join(texts[:20])]))
    objective, parts = objective_of(tokens, "masked_lm", length=16), split(tokens, 0.2)
    # the second source has documents of the first, and they are on the same side
    assert parts.training.document_ends(1).size + parts.held_out.document_ends(1).size == 20
    found, batches = split_set(parts, objective), batches_of(parts.training, objective, 3, [1.0, 1.0])
    held_out = {tuple(found.read(number).tolist()) for number in range(found.samples)}
    trained = {tuple(batches.read(number).tolist()) for number in range(len(batches.read))}
    assert not held_out & trained
    assert (found.documents, found.tokens) == (parts.held_out.documents, parts.held_out.tokens)
    assert found.bytes == parts.bytes


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("masked_lm", "short", r"wiki: \d+ tokens are less than one sample of masked_lm, which has 62"),
        (
            "next_sentence",
            "one " * 90,
            r"wiki: the set has 1 document\(s\), but next_sentence needs at least 2",
        ),
    ],
)
def test_a_set_without_a_sample_is_told(prepare_here: Prepare, name: str, text: str, told: str) -> None:
    tokens = Tokens.open(prepare_here([text]))
    with pytest.raises(InputError, match=told):
        set_of(tokens, objective_of(tokens, name), "wiki")
