from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from thin import every
from unpublished import plan_of, unpublished

from orchestrator.config.errors import InputError
from orchestrator.data.samples.batches import Batches, batches_of
from orchestrator.data.samples.held_out_split import split
from orchestrator.data.samples.mixture.shares import Mixture
from orchestrator.data.samples.sections.documents import SectionDocuments
from orchestrator.data.samples.sections.published import StoppedWaiting
from orchestrator.data.samples.sections.windows import sections_of
from orchestrator.data.store.tokens import Tokens
from orchestrator.storage.retry import Retry
from workloads.workload import Batch, Reading, Text

Prepare = Callable[..., str]
LENGTH = 16
SHARE = 0.3
ALPHA = Mixture(((0, None),), Fraction(1, 2), (None, None), 10**6)
SHARES = Mixture(((0, (Fraction(5, 6), Fraction(1, 6))),), Fraction(1), (None, None), 10**6)
CASES: dict[str, dict[str, Any]] = {
    "alpha": {"mixture": ALPHA},
    "held out": {"share": SHARE},
    "packed": {"packed": True},
    "packed, held out and alpha": {"packed": True, "share": SHARE, "mixture": ALPHA},
    "document": {"unit": "document"},
    "documents": {"unit": "documents", "share": SHARE},
    "documents by shares": {"unit": "documents", "mixture": SHARES},
}


class Raw:
    """Samples as they are, padded."""

    name = "raw"

    def __init__(self, unit: Any = "stream") -> None:
        self.reading = Reading(unit, LENGTH + 1, LENGTH, partial=unit == "stream")

    def collate(self, read: Text, ids: Sequence[int], turn: int) -> Batch:
        rows = [np.pad(read(i), (0, LENGTH + 1 - len(read(i))), constant_values=-1) for i in ids]
        return {"tokens": torch.from_numpy(np.stack(rows)), "turn": torch.full([len(ids)], turn)}


@pytest.fixture
def uri(prepare_here: Prepare) -> str:
    """Two sources of documents of all lengths, one of which goes over several parts."""
    draw = np.random.default_rng(3)
    lines = ["one two three four", "five six", "seven eight nine ten eleven"]

    def text(documents: int) -> str:
        sizes = np.minimum(draw.geometric(0.2, documents), 15)
        sizes[documents // 2] = 100
        return "\n<|endoftext|>\n".join("\n".join(draw.choice(lines, size)) for size in sizes) + "\n"

    return prepare_here([text(60), text(50)], [text(10)])


def made(tokens: Tokens, uri: str, unit: str = "stream", **how: Any) -> Batches:
    return batches_of(tokens, Raw(unit), 7, [1.0, 1.0], plan=PLANS[uri], **how)  # type: ignore[arg-type]


PLANS: dict[str, Any] = {}


@pytest.mark.parametrize("case", every(3, CASES))
def test_what_is_prepared_so_far_has_the_samples_that_all_of_it_has(case: str, uri: str) -> None:
    plan = PLANS[uri] = plan_of(uri)
    assert plan.sections == 8
    assert min(plan.parts) < 8
    whole = made(Tokens.open(uri), uri, **CASES[case])
    size = sum(whole.order.samples)
    expected = [whole.batch(position, 1) for position in range(2 * size)]
    publish = unpublished(uri)
    publish(0)
    tokens = Tokens.open(uri, Retry(give_up=lambda: True))
    growing, position = made(tokens, uri, **CASES[case]), 0
    reached = []
    for section in range(1, plan.sections + 1):
        while position < len(expected):
            try:
                batch, receipt = growing.batch(position, 1)
            except StoppedWaiting:
                break
            assert torch.equal(batch["tokens"], expected[position][0]["tokens"])
            assert (int(batch["turn"]), receipt) == (
                int(expected[position][0]["turn"]),
                expected[position][1],
            )
            position += 1
        reached.append(position)
        # one that begins anew goes on there
        if position < len(expected):
            again = made(Tokens.open(uri, Retry(give_up=lambda: True)), uri, **CASES[case])
            with pytest.raises(StoppedWaiting):
                again.batch(position, 1)
            assert again.batch(position - 1, 1)[1] == expected[position - 1][1]
        if section < plan.sections:
            publish(section)
    assert reached[-1] == len(expected)
    assert 0 < reached[0] < len(expected) / 6
    assert len(set(reached)) > 3


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("share", [None, SHARE])
def test_samples_have_every_document_once_and_none_that_is_held_out(
    packed: bool, share: float | None, uri: str
) -> None:
    tokens, plan = Tokens.open(uri), plan_of(uri)
    reading = Reading("stream" if packed else "document", LENGTH + 1, LENGTH)
    found = sections_of(tokens, plan, reading, packed, share)
    assert list(found(plan.sections - 1)) == [len(windows) for windows in found.windows]
    trained = split(tokens, share).training if share else tokens
    for source in range(2):
        assert found.streams.length(source) == trained.length(source)
        whole = found.streams.document_ends(source)
        assert np.array_equal(whole, trained.document_ends(source))
        count = np.zeros(trained.length(source), int)
        for sample in range(len(found.windows[source])):
            for start, length in found.windows[source].pieces(sample):
                count[start : start + length] += 1
                got = found.streams.window(source, start, length)
                assert np.array_equal(got, trained.window(source, start, length))
        # the first token of a next piece of a long document is also the last of the piece before
        overlaps, closing = (1, 1) if packed else (0, 0)
        count[whole - 1] += 1 - closing
        assert set(count) <= {1, 1 + overlaps}


def test_a_set_that_is_held_out_is_of_the_first_section(uri: str) -> None:
    tokens, plan = Tokens.open(uri), plan_of(uri)
    every, first = split(tokens, SHARE), split(SectionDocuments(tokens, plan, 0), SHARE)
    assert 0 < first.held_out.documents < every.held_out.documents / 4
    for source in range(2):
        length = first.held_out.length(source)
        assert np.array_equal(
            first.held_out.window(source, 0, length), every.held_out.window(source, 0, length)
        )


def test_sizes_are_those_of_the_first_parts_times_the_bytes_of_all(uri: str) -> None:
    tokens, plan = Tokens.open(uri), plan_of(uri)
    for how in (Reading("stream", LENGTH + 1, LENGTH), Reading("document", LENGTH, LENGTH)):
        sizes, _ = sections_of(tokens, plan, how).sizes(True)
        for source, size in enumerate(sizes):
            assert 0.6 < size / tokens.length(source) < 1.4
    old = type(plan)(plan.parts)
    with pytest.raises(InputError, match="lacks the sizes of its sources"):
        sections_of(tokens, old, Reading("stream", LENGTH + 1, LENGTH)).sizes(True)
    # of runs that began with it, by shares, the order is the same
    orders = [batches_of(tokens, Raw(), 7, [1.0, 1.0], SHARES, plan=each).order for each in (plan, old)]
    turns = [order.at(np.arange(100)) for order in orders]
    assert np.array_equal(turns[0], turns[1])


def test_samples_are_read_along_with_those_of_their_section(uri: str) -> None:
    tokens, plan = Tokens.open(uri), plan_of(uri)
    made = batches_of(tokens, Raw("document"), 7, [1.0, 1.0], plan=plan)  # type: ignore[arg-type]
    firsts = sections_of(tokens, plan, Raw("document").reading)(0)
    assert sum(made.order.samples) == len(made.read)
    for sample in (0, 1, 2 * firsts[0] + 4):
        own, every = made.read.siblings(sample), made.read.companions(sample)
        assert sample in own
        assert set(own) <= set(every)
        assert {number % 2 for number in every} == {sample % 2}
    assert set(made.read.companions(0)).isdisjoint(made.read.companions(2 * len(made.read.companions(0))))
