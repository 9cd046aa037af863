from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.data.samples.held_out_split import RunsMaker, Subset, edges, in_memory


class Whole:
    """Streams of documents of these sizes; token i of source s is 1000 s + i."""

    manifest: Any = None

    def __init__(self, sizes: list[list[int]]) -> None:
        self._sizes = sizes
        self.sources = len(sizes)

    def length(self, source: int) -> int:
        return sum(self._sizes[source])

    def window(self, source: int, start: int, length: int) -> np.ndarray:
        assert 0 <= start <= start + length <= self.length(source)
        return 1000 * source + np.arange(start, start + length)

    def document_ends(self, source: int) -> np.ndarray:
        return np.cumsum(np.array(self._sizes[source], dtype=np.int64))

    def document_ends_by_part(self, source: int) -> Iterator[np.ndarray]:
        ends = self.document_ends(source)
        yield from (ends[at : at + 3] for at in range(0, len(ends), 3))


def chosen_of(whole: Whole, masks: list[list[bool]]) -> Subset:
    """The documents that are chosen, whose runs are added three documents at a time."""
    found = []
    for source, mask in enumerate(masks):

        def fill(
            makers: dict[str, RunsMaker], source: int = source, mask: list[bool] = mask
        ) -> dict[str, Any]:
            begin = at = 0
            for ends in whole.document_ends_by_part(source):
                bounds = np.concatenate(([begin], ends))
                makers["chosen"].add(*edges(bounds, np.array(mask[at : at + len(ends)], dtype=bool)))
                begin, at = int(ends[-1]), at + len(ends)
            return {}

        found.append(in_memory(("chosen",), fill)[0]["chosen"])
    return Subset(whole, found, sum(map(sum, masks)))  # type: ignore[arg-type]


SOURCES = st.lists(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=20), min_size=1, max_size=3)


@given(SOURCES)
def test_a_subset_is_its_documents_one_after_the_other(found: list[list[tuple[int, bool]]]) -> None:
    whole = Whole([[size for size, _ in source] for source in found])
    subset = chosen_of(whole, [[yes for _, yes in source] for source in found])
    assert subset.documents == sum(yes for source in found for _, yes in source)
    for number, source in enumerate(found):
        bounds = [0, *whole.document_ends(number).tolist()]
        chosen = [whole.window(number, bounds[i], size) for i, (size, yes) in enumerate(source) if yes]
        expected = np.concatenate([np.zeros(0, np.int64), *chosen])
        assert subset.length(number) == len(expected)
        assert subset.document_ends(number).tolist() == np.cumsum([len(text) for text in chosen]).tolist()
        for start in range(len(expected) + 1):
            for stop in range(start, len(expected) + 1):
                window = subset.window(number, start, stop - start)
                assert window.dtype == np.int64
                assert np.array_equal(window, expected[start:stop])
    assert subset.tokens == sum(map(subset.length, range(subset.sources)))


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 6), (5, 1), (2, -1)])
def test_a_window_outside_is_refused(start: int, length: int) -> None:
    subset = chosen_of(Whole([[3, 4, 2]]), [[True, False, True]])
    with pytest.raises(IndexError, match="of 5 in source 0"):
        subset.window(0, start, length)
