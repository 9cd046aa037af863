from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.errors import InputError
from orchestrator.data.samples import receipt
from orchestrator.data.samples.batches import Batches, Prefetch, batches_of, slices
from orchestrator.data.samples.mixture.shares import Mixture
from orchestrator.data.samples.sample_reader import SampleReader
from orchestrator.data.store.tokens import Tokens
from orchestrator.parallel.layout import Layout
from workloads.workload import Batch, Text, Windowing

Prepare = Callable[..., str]
LENGTH = 16


class Raw:
    """Windows as they are, with the epoch and the next sample's first token."""

    name = "raw"
    windowing = Windowing("stream", LENGTH + 1, LENGTH)

    def window(self, sequence_length: int) -> int:
        return sequence_length + 1

    def collate(self, read: Text, ids: Sequence[int], turn: int) -> Batch:
        return {
            "tokens": torch.from_numpy(np.stack([read(i) for i in ids])),
            "epoch": torch.full([len(ids)], turn),
            "next": torch.tensor([int(read(i + 1)[0]) for i in ids]),
        }


@pytest.fixture
def batches(prepare_here: Prepare) -> Batches:
    text = "a few words of text. some more of them!\n<|endoftext|>\n"
    tokens = Tokens.open(prepare_here([text * 20, text * 3], [text * 9]))
    return batches_of(tokens, Raw(), 7, [1.0, 1.0])


def test_a_window_starts_at_its_number_of_sequences(batches: Batches) -> None:
    first = batches.order.samples[0]
    assert batches.order.samples == [(batches.read.streams.length(s) - 1) // LENGTH for s in (0, 1)]
    assert np.array_equal(batches.read(3), batches.read.streams.window(0, 3 * LENGTH, LENGTH + 1))
    assert np.array_equal(
        batches.read(first - 1), batches.read.streams.window(0, (first - 1) * LENGTH, LENGTH + 1)
    )
    assert np.array_equal(batches.read(first), batches.read.streams.window(1, 0, LENGTH + 1))
    assert np.array_equal(batches.read(sum(batches.order.samples)), batches.read(0))


def test_a_batch_is_the_samples_at_its_positions(batches: Batches) -> None:
    batch, total = batches.batch(5, 8)
    epochs, ids = batches.order.at(np.arange(5, 13))
    assert batch["tokens"].dtype == torch.int64
    assert np.array_equal(batch["tokens"].numpy(), np.stack([batches.read(int(i)) for i in ids]))
    assert batch["epoch"].tolist() == epochs.tolist()
    expected = [
        receipt.digest(p, int(i), batches.read(int(i))) for p, i in zip(range(5, 13), ids, strict=True)
    ]
    assert total == receipt.add(expected)


def test_a_batch_may_straddle_epochs(batches: Batches) -> None:
    """A position at the end of an epoch is as any other: asked for in verl#7401 and transformers#40691."""
    size = batches.order.epoch_size
    batch, total = batches.batch(2 * size - 3, 8)
    assert batch["epoch"].tolist() == [1] * 3 + [2] * 5
    parts = [batches.batch(2 * size - 3, 3), batches.batch(2 * size, 5)]
    assert torch.equal(batch["tokens"], torch.cat([part["tokens"] for part, _ in parts]))
    assert total == receipt.add(part for _, part in parts)


@pytest.mark.parametrize(
    ("dp_size", "micro_batch"), [(1, 12), (1, 1), (2, 3), (3, 2), (4, 3), (6, 2), (12, 1)]
)
def test_every_layout_computes_the_same_global_batch(
    batches: Batches, dp_size: int, micro_batch: int
) -> None:
    whole, total = batches.batch(36, 12)
    made = [batches.batch(*s) for r in range(dp_size) for s in slices(36, 12, r, dp_size, micro_batch)]
    assert torch.equal(torch.cat([batch["tokens"] for batch, _ in made]), whole["tokens"])
    assert receipt.add(digest for _, digest in made) == total


@given(
    ranks=st.integers(1, 9), accumulation=st.integers(1, 5), micro=st.integers(1, 5), step=st.integers(0, 9)
)
def test_slices_tile_the_step_in_rank_order(ranks: int, accumulation: int, micro: int, step: int) -> None:
    batch = ranks * accumulation * micro
    found = [s for rank in range(ranks) for s in slices(step * batch, batch, rank, ranks, micro)]
    positions = [p for start, count in found for p in range(start, start + count)]
    assert positions == list(range(step * batch, (step + 1) * batch))
    assert {count for _, count in found} == {micro}


@given(ranks=st.integers(1, 9), more=st.integers(0, 20), micro=st.integers(1, 5))
def test_ranks_that_do_not_divide_the_micro_batches_have_one_more_or_less(
    ranks: int, more: int, micro: int
) -> None:
    batch = (ranks + more) * micro
    found = [slices(0, batch, rank, ranks, micro) for rank in range(ranks)]
    assert [s for each in found for s in each] == [(start, micro) for start in range(0, batch, micro)]
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert max(map(len, found)) == Layout(dp=ranks, micro_batch=micro).accumulation(batch)


@pytest.mark.parametrize(("ranks", "micro"), [(5, 3), (2, 5), (13, 1)])
def test_a_batch_that_does_not_divide_is_refused(ranks: int, micro: int) -> None:
    with pytest.raises(ValueError, match="global batch 12 is not a multiple"):
        slices(0, 12, 0, ranks, micro)


def test_too_little_text_is_told(prepare_here: Prepare) -> None:
    tokens = Tokens.open(prepare_here(["word"], ["word"]))
    with pytest.raises(InputError, match=r"data\.sources\.0: \d+ tokens are less than one sample of raw"):
        batches_of(tokens, Raw(), 0, [1.0, 1.0])


def test_prefetch_gives_all_items_in_turn_and_works_ahead() -> None:
    made: list[int] = []
    ahead = threading.Event()

    def make(number: int) -> int:
        made.append(number)
        if number == 5:
            ahead.set()
        return number * number

    with Prefetch(make, first=3, depth=2) as prefetch:
        assert prefetch.next() == 9
        assert ahead.wait(5)
        assert [prefetch.next() for _ in range(4)] == [16, 25, 36, 49]
    assert made == list(range(3, 3 + len(made)))
    assert len(made) <= 7


def test_prefetch_makes_nothing_that_is_not_used() -> None:
    """What comes after the last step may not be there for hours."""
    made: list[int] = []
    with Prefetch(lambda number: made.append(number) or number, first=3, depth=4, stop=6) as prefetch:
        assert [prefetch.next() for _ in range(3)] == [3, 4, 5]
    assert made == [3, 4, 5]
    with Prefetch(lambda number: made.append(number), first=6, stop=6):
        pass
    assert made == [3, 4, 5]


def test_prefetch_raises_what_its_thread_raised_in_its_turn() -> None:
    def make(number: int) -> int:
        if number == 1:
            raise OSError("gone")
        return number

    with Prefetch(make, first=0) as prefetch:
        assert prefetch.next() == 0
        with pytest.raises(OSError, match="gone"):
            prefetch.next()


def test_prefetch_leaves_no_thread() -> None:
    before = threading.active_count()
    prefetch = Prefetch(lambda number: number, first=0)
    prefetch.next()
    assert threading.active_count() == before + 1
    prefetch.close()
    assert threading.active_count() == before


def test_a_mixture_has_its_proportions_whatever_the_sizes(prepare_here: Prepare) -> None:
    text = "a few words of text. some more of them!\n<|endoftext|>\n"
    tokens = Tokens.open(prepare_here([text * 20], [text * 200]))
    mixture = Mixture(((0, (Fraction(3, 4), Fraction(1, 4))),), Fraction(1), (None, None), 400)
    mixed = batches_of(tokens, Raw(), 7, [1.0, 1.0], mixture)
    first = mixed.order.samples[0]
    turns, ids = mixed.order.at(np.arange(400))
    assert [(ids[a : a + 8] < first).sum() for a in range(0, 400, 8)] == [6] * 50
    batch, _ = mixed.batch(100, 100)
    assert batch["epoch"].tolist() == turns[100:200].tolist()
    assert len(set(turns[ids < first].tolist())) > 4


def test_which_numbers_are_of_samples() -> None:
    class Some:
        def __init__(self, count: int) -> None:
            self.count = count

        def __len__(self) -> int:
            return self.count

    windows: Any = [Some(100), Some(10)]
    nothing: Any = None
    dense = SampleReader(nothing, windows, nothing)
    assert [number in dense for number in (-1, 0, 109, 110)] == [False, True, True, False]
    growing = SampleReader(nothing, windows, nothing, growing=True)  # index x sources + source
    assert [number in growing for number in (198, 150, 19, 21, 61)] == [True, True, True, False, False]
