from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.data.prepare.contents import ENTRY, PRIME, ContentIndex, digests, documents_by_part
from orchestrator.data.sources.documents import TextPiece


def index_of(*pieces: tuple[str, bool] | tuple[str, bool, bool]) -> bytes:
    """The index of a shard with these pieces: text, whether it ends its document, whether the first of a pair."""
    made = ContentIndex()
    for text, ends, *halves in pieces:
        made.add(TextPiece(text, ends, len(text.encode()), bool(halves and halves[0])))
    return made.to_bytes()


def documents_of(indices: Iterable[bytes]) -> np.ndarray:
    """The contents of all documents of a source."""
    return np.concatenate([np.zeros(0, ENTRY), *documents_by_part(indices)])


@given(st.lists(st.text(), max_size=5), st.data())
def test_a_document_has_its_content_however_it_is_cut(documents: list[str], data: st.DataObject) -> None:
    whole = documents_of([index_of(*((text, True) for text in documents))])
    shards: list[list[tuple[str, bool]]] = [[]]
    for text in documents:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=3)))
        for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
            if data.draw(st.booleans()):
                shards.append([])
            shards[-1].append((text[start:stop], False))
        shards[-1].append(("", True))
    cut = documents_of(index_of(*pieces) for pieces in shards)
    assert np.array_equal(whole, cut)
    assert whole["bytes"].tolist() == [len(text.encode()) for text in documents]
    values = [int.from_bytes(text.encode()) % PRIME for text in documents]
    assert [
        int(low) | int(high) << 64 for low, high in zip(whole["low"], whole["high"], strict=True)
    ] == values


def test_texts_of_a_pair_are_told_apart() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ("ab", "c")]
    index = index_of(*(piece for one, other in pairs for piece in ((one, False, True), (other, True))))
    found = documents_of([index])
    assert found["bytes"].tolist() == [3, 3, 3, 3]
    assert len(set(digests(found).tolist())) == 3


def test_no_shard_has_no_document() -> None:
    assert documents_of([]).shape == (0,)
    assert documents_of([index_of()]).dtype == ENTRY


def test_digests_are_pinned_and_uniform() -> None:
    """A change here would move documents between training and what is held out of it."""
    contents = documents_of([index_of(*((f"document {number}", True) for number in range(20_000)))])
    found = digests(contents)
    assert [f"{value:016x}" for value in found[:2].tolist()] == PINNED
    assert len(set(found.tolist())) == len(found)
    assert np.abs(np.bincount((found >> np.uint64(60)).astype(int), minlength=16) - 1250).max() < 150


PINNED = ["d3bcaf8586875e47", "3c903f91cba57afe"]
