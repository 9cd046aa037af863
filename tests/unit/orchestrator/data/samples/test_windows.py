"""Every token of a text is read once in an epoch, whatever the objective and however its documents lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.errors import InputError
from orchestrator.data.samples.batches import batches_of
from orchestrator.data.samples.windows import Windows, windows_of
from orchestrator.data.store.tokens import Tokens
from workloads.objectives import OF_TEXT, build, special_tokens
from workloads.workload import Windowing

Prepare = Callable[..., str]
LENGTH = 32
DOCUMENTS = st.lists(st.integers(0, 40), min_size=1, max_size=30)


class Stream:
    """Documents of these numbers of tokens, each with its closing token, in one source."""

    sources = 1

    def __init__(self, sizes: list[int]) -> None:
        self._ends = np.cumsum(np.array(sizes) + 1)

    def length(self, source: int) -> int:
        return int(self._ends[-1])

    def document_ends(self, source: int) -> np.ndarray:
        return self._ends

    def document_ends_by_part(self, source: int) -> Iterator[np.ndarray]:
        yield from np.split(self._ends, range(3, len(self._ends), 3))

    @property
    def manifest(self) -> Any:
        return SimpleNamespace(documents=len(self._ends))


def covered(windows: Windows, length: int) -> np.ndarray:
    """How often each token is read."""
    counts = np.zeros(length, dtype=int)
    for start, size in (windows.at(i) for i in range(len(windows))):
        assert start + size <= length
        counts[start : start + size] += 1
    return counts


@settings(max_examples=200, deadline=None)
@given(sizes=DOCUMENTS, window=st.integers(1, 50), overlap=st.integers(0, 1))
def test_windows_tile_a_stream(sizes: list[int], window: int, overlap: int) -> None:
    text, stride = Stream(sizes), max(1, window - overlap)
    windows = windows_of(text, 0, Windowing("stream", window, stride))  # type: ignore[arg-type]
    counts = covered(windows, text.length(0))
    assert (counts > 0).sum() > text.length(0) - stride - overlap or not len(windows)
    assert counts.sum() == len(windows) * window
    assert sum(counts > 1) == max(0, len(windows) - 1) * (window - stride)


@settings(max_examples=200, deadline=None)
@given(sizes=DOCUMENTS, window=st.integers(2, 50), overlap=st.integers(0, 1))
def test_an_evaluation_reads_a_stream_to_its_last_token(sizes: list[int], window: int, overlap: int) -> None:
    text, stride = Stream(sizes), max(1, window - overlap)
    windowing = Windowing("stream", window, stride, partial=True)
    windows = windows_of(text, 0, windowing, include_partial=True)  # type: ignore[arg-type]
    counts = covered(windows, text.length(0))
    lone = text.length(0) % stride == 1 if window == stride > 1 else text.length(0) == 1
    assert (counts == 0).sum() == lone  # one token alone is no window: nothing is predicted from it
    assert all(windows.at(number)[1] == window for number in range(len(windows) - 1))
    assert not len(windows) or windows.at(len(windows) - 1)[1] >= 2
    full = windows_of(text, 0, windowing)  # type: ignore[arg-type]
    assert len(full) <= len(windows) <= len(full) + 1


@settings(max_examples=200, deadline=None)
@given(sizes=DOCUMENTS, window=st.integers(1, 50))
def test_stretches_read_every_document_once_but_its_closing_token(sizes: list[int], window: int) -> None:
    text = Stream(sizes)
    windows = windows_of(text, 0, Windowing("document", window, window))  # type: ignore[arg-type]
    expected = np.ones(text.length(0), dtype=int)
    expected[text.document_ends(0) - 1] = 0
    assert np.array_equal(covered(windows, text.length(0)), expected)
    assert windows.documents == sum(size > 0 for size in sizes)
    for sample in range(len(windows)):
        start, size = windows.at(sample)
        assert 0 < size <= window
        document = np.searchsorted(text.document_ends(0), start, side="right")
        others = windows.siblings(sample)
        assert sample in others
        of = [
            np.searchsorted(text.document_ends(0), windows.at(i)[0], side="right")
            for i in range(len(windows))
        ]
        assert [i for i, other in enumerate(of) if other == document] == list(others)


@settings(max_examples=200, deadline=None)
@given(sizes=DOCUMENTS, window=st.integers(1, 50))
def test_whole_documents_are_read_once_and_of_longer_ones_the_beginning(
    sizes: list[int], window: int
) -> None:
    text = Stream(sizes)
    windows = windows_of(text, 0, Windowing("documents", window, window))  # type: ignore[arg-type]
    begins = np.concatenate(([0], text.document_ends(0)))
    expected = np.zeros(text.length(0), dtype=int)
    for begin, end in pairwise(begins):
        expected[begin : min(end, begin + window)] = 1
    assert np.array_equal(covered(windows, text.length(0)), expected)
    assert all(windows.at(i)[0] in begins for i in range(len(windows)))


TEXT = (
    "A few words. Some more of them! And " * 7
    + "an end.\n<|endoftext|>\nAnother one. It is short.\n<|endoftext|>\n"
)


@pytest.mark.parametrize("name", [n for n in OF_TEXT if n != "translation_lm"])
def test_an_epoch_of_every_objective_reads_every_token_once(prepare_here: Prepare, name: str) -> None:
    """On real batches: what the samples of one epoch read, put together, is the text."""
    tokens = Tokens.open(prepare_here([TEXT * 9], [TEXT * 5]))
    found, extra = tokens.vocabulary(), len(special_tokens(name))
    sentinels = tuple(range(found.size, found.size + extra))
    tables = {"word_start": None, "sentence_end": None} if extra else {}
    vocabulary = replace(found, size=found.size + extra, sentinels=sentinels, **tables)
    options = {"entity_masking": {"entities": [[300]]}, "span_corruption": {"mean_span": 4.0}}.get(name, {})
    objective = build(name, vocabulary=vocabulary, sequence_length=LENGTH, seed=1, **options)
    batches = batches_of(tokens, objective, 1, [1.0, 1.0])
    size, overlap = batches.order.epoch_size, int(name == "causal_lm")
    for epoch in range(2):
        turns, ids = batches.order.at(np.arange(size) + epoch * size)
        assert set(turns) == {epoch}
        read = np.concatenate([batches.read(i)[overlap:] for i in np.sort(ids)])
        text = [tokens.window(source, 0, tokens.length(source))[overlap:] for source in (0, 1)]
        if objective.windowing.unit == "document":
            whole = np.concatenate(text)
            assert np.array_equal(read, whole[whole != tokens.manifest.roles["eos"]])
        else:
            stride = objective.windowing.stride
            assert np.array_equal(read, np.concatenate([t[: len(t) // stride * stride] for t in text]))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("weight", [0.5, 1.0, 2.0])
def test_no_pass_over_a_source_has_the_masks_of_another(
    prepare_here: Prepare, static: bool, weight: float
) -> None:
    tokens = Tokens.open(prepare_here([TEXT * 4]))
    objective = build(
        "masked_lm", vocabulary=tokens.vocabulary(), sequence_length=LENGTH, seed=1, static=static
    )
    batches = batches_of(tokens, objective, 1, [weight])
    passes = 4
    count = round(passes * batches.order.samples[0])
    _, ids = batches.order.at(np.arange(count))
    batch, _ = batches.batch(0, count)
    for sample in np.unique(ids):
        seen = {row.numpy().tobytes() for row in batch["labels"][ids == sample]}
        assert len(seen) == (1 if static else int((ids == sample).sum()))


def test_a_batch_of_several_passes_stands_in_its_order(prepare_here: Prepare) -> None:
    tokens = Tokens.open(prepare_here([TEXT * 4]))
    objective = build("masked_lm", vocabulary=tokens.vocabulary(), sequence_length=LENGTH, seed=1)
    batches = batches_of(tokens, objective, 1, [3.0])
    whole, _ = batches.batch(5, 24)
    alone = [batches.batch(5 + i, 1) for i in range(24)]
    assert len(set(batches.order.at(np.arange(5, 29))[0])) == 3
    for name in whole:
        assert np.array_equal(whole[name].numpy(), np.concatenate([b[name].numpy() for b, _ in alone]))


def test_one_document_has_no_other_to_take_a_sentence_from(prepare_here: Prepare) -> None:
    tokens = Tokens.open(prepare_here(["A few words. " * 300]))
    objective = build("next_sentence", vocabulary=tokens.vocabulary(), sequence_length=LENGTH, seed=1)
    with pytest.raises(InputError, match=r"the text has 1 document\(s\), but next_sentence needs at least 2"):
        batches_of(tokens, objective, 1, [1.0])


def test_a_source_that_would_give_nothing_is_refused(prepare_here: Prepare) -> None:
    tokens = Tokens.open(prepare_here([TEXT * 9], [TEXT]))
    objective = build("masked_lm", vocabulary=tokens.vocabulary(), sequence_length=LENGTH, seed=1)
    with pytest.raises(InputError, match=r"data\.sources\.1\.weight: weight 0\.01 of \d+ samples gives none"):
        batches_of(tokens, objective, 1, [1.0, 0.01])
