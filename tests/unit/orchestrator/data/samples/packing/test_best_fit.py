from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.errors import InputError
from orchestrator.data.samples.batches import batches_of
from orchestrator.data.samples.held_out_split import split
from orchestrator.data.samples.packing import best_fit
from orchestrator.data.samples.packing.best_fit import cut, open_index, pack
from orchestrator.data.store.tokens import Tokens
from orchestrator.data.store.verified_shard import DamagedShard
from workloads.objectives import build

Prepare = Callable[..., str]
LENGTH = 24


def texts(count: int) -> str:
    words = ["some", "words", "of", "text", "that", "is", "read", "here", "and", "there"]
    documents = [" ".join(words[: 1 + (7 * n) % 9] * (1 + n % 5)) for n in range(count)]
    return "\n<|endoftext|>\n".join(documents) + "\n<|endoftext|>\n"


def test_every_document_is_whole_unless_it_is_longer_than_a_sample(prepare_here: Prepare) -> None:
    tokens = Tokens.open(prepare_here([texts(60), texts(25)], [texts(30)]))
    objective = build("causal_lm", vocabulary=tokens.vocabulary(), sequence_length=LENGTH, seed=0)
    read = batches_of(tokens, objective, 0, [1.0, 1.0], packed=True).read
    ends = [tokens.document_ends(0), tokens.document_ends(1)]
    read_tokens = [np.zeros(tokens.length(n), dtype=int) for n in (0, 1)]
    for sample in range(len(read)):
        source, pieces = read.origin(sample)
        assert sum(length for _, length in pieces) == read.length(sample) == len(read(sample)) <= LENGTH + 1
        for start, length in pieces:
            document = int(np.searchsorted(ends[source], start, side="right"))
            begin, end = int(ends[source][document - 1]) if document else 0, int(ends[source][document])
            read_tokens[source][start + (start > begin) : start + length] += 1
            if end - begin <= LENGTH + 1:
                assert (start, length) == (begin, end - begin)
    assert all((found == 1).all() for found in read_tokens)


def test_it_is_the_same_whatever_the_parts_and_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = np.cumsum(np.random.default_rng(1).integers(1, 40, 500))
    made = open_index(tmp_path, "a", 0, [ends], 17, 16)
    parts = open_index(tmp_path, "b", 0, [ends[:100], ends[100:100], ends[100:]], 17, 16)
    assert sum(length for n in range(len(made)) for _, length in made.pieces(n)) == made.facts["tokens"]
    assert parts.facts["tokens"] == made.facts["tokens"]
    monkeypatch.setattr(best_fit, "_write", None)
    again = open_index(tmp_path, "a", 0, [], 17, 16)
    assert [again.pieces(n) for n in range(len(again))] == [made.pieces(n) for n in range(len(made))]


@pytest.mark.parametrize("name", ["first", "pieces"])
def test_a_byte_that_changed_is_noticed_and_the_index_made_again(tmp_path: Path, name: str) -> None:
    ends = np.cumsum(np.arange(2, 60))
    made = open_index(tmp_path, "a", 0, [ends], 17, 16)
    before = [made.pieces(n) for n in range(len(made))]
    [path] = tmp_path.glob(f"packing/*/000000.{name}")
    content = bytearray(path.read_bytes())
    content[9] ^= 1
    path.write_bytes(content)
    damaged = open_index(tmp_path, "a", 0, [ends], 17, 16)
    with pytest.raises(DamagedShard):
        damaged.pieces(0)
    assert [
        p for p in [open_index(tmp_path, "a", 0, [ends], 17, 16)] for p in map(p.pieces, range(len(p)))
    ] == before


def test_facts_that_were_torn_are_made_again(tmp_path: Path) -> None:
    ends = np.cumsum(np.arange(2, 60))
    made = open_index(tmp_path, "a", 0, [ends], 17, 16)
    [facts] = tmp_path.glob("packing/*/000000.json")
    facts.write_bytes(facts.read_bytes()[:40])
    assert open_index(tmp_path, "a", 0, [ends], 17, 16).facts == made.facts
    assert sorted(path.suffix for path in facts.parent.iterdir()) == [".first", ".json", ".lock", ".pieces"]


def test_documents_that_are_held_out_are_not_packed(prepare_here: Prepare) -> None:
    tokens = Tokens.open(prepare_here([texts(80)]))
    objective = build("causal_lm", vocabulary=tokens.vocabulary(), sequence_length=LENGTH, seed=0)
    whole = batches_of(tokens, objective, 0, [1.0], packed=True)
    parts = split(tokens, 0.4)
    trained = batches_of(parts.training, objective, 0, [1.0], packed=True)
    count = sum(map(trained.read.length, range(len(trained.read))))
    assert 0 < count < sum(map(whole.read.length, range(len(whole.read))))
    assert len(list(tokens.derived.glob("packing/*"))) == 2


def test_a_source_without_a_sample_is_told(prepare_here: Prepare) -> None:
    tokens = Tokens.open(prepare_here([texts(20)], ["\n<|endoftext|>\n" * 4]))
    objective = build("causal_lm", vocabulary=tokens.vocabulary(), sequence_length=LENGTH, seed=0)
    with pytest.raises(InputError, match=r"data\.sources\.1: .* are less than one sample"):
        batches_of(tokens, objective, 0, [1.0, 1.0], packed=True)


def slow_pack(sizes: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing, piece by piece, looking at all samples."""
    samples: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        fitting = [sample for sample in samples if capacity - sum(sample) >= size]
        if fitting:
            min(fitting, key=lambda sample: capacity - sum(sample)).append(size)
        else:
            samples.append([size])
    return samples


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 40).flatmap(
        lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity), max_size=60))
    )
)
def test_it_is_best_fit_decreasing(drawn: tuple[int, list[int]]) -> None:
    capacity, sizes = drawn
    found = pack(np.array(sizes, dtype=np.int64), capacity)
    samples: dict[int, list[int]] = {}
    for size, sample in zip(sizes, found.tolist(), strict=True):
        samples.setdefault(sample, []).append(size)
    assert all(sum(sample) <= capacity for sample in samples.values())
    # which of the samples with equal room is taken does not matter for the room that is left
    room = Counter(capacity - sum(sample) for sample in samples.values())
    assert room == Counter(capacity - sum(sample) for sample in slow_pack(sizes, capacity))
    assert sorted(samples) == list(range(len(samples)))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(2, 12), st.integers(0, 1))
def test_every_token_is_in_one_piece_but_for_the_overlap(
    lengths: list[int], window: int, overlap: int
) -> None:
    stops = np.cumsum(lengths)
    starts = stops - lengths
    stride = window - overlap
    begins, ends = cut(starts, stops, window, stride)
    assert all(0 < end - begin <= window for begin, end in zip(begins, ends, strict=True))
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        mine = [(b, e) for b, e in zip(begins.tolist(), ends.tolist(), strict=True) if start <= b < stop]
        if stop - start <= window:
            assert mine == ([(start, stop)] if stop - start > overlap else [])
            continue
        # a token is predicted in the piece that has it and the one before
        predicted = [token for b, e in mine for token in range(b + overlap, e)]
        assert predicted == list(range(start + overlap, stop))
        assert all(e - b == window for b, e in mine[:-1])


def test_a_million_pieces_take_no_time_to_speak_of() -> None:
    """The time is not asserted; piece by piece this would take hours."""
    sizes = np.random.default_rng(0).integers(1, 2050, 200_000)
    found = pack(sizes, 2049)
    filled = np.bincount(found, weights=sizes)
    assert filled.max() <= 2049
    assert filled.sum() / (2049 * len(filled)) > 0.99
