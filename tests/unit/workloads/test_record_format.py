from __future__ import annotations

import numpy as np
import pytest

from workloads.record_format import MARK, from_end


@pytest.mark.parametrize(
    ("length", "before", "expected"),
    [
        (6, (2,), [2, 10, 11, 12, 13]),
        (3, (), [11, 12, 13]),
        (3, (2,), [2, 12, 13]),
        (3, (2, 10), [2, 10, 13]),
        (3, (3,), [11, 12, 13]),
        (1, (2,), [13]),
    ],
)
def test_a_text_that_loses_its_beginning_keeps_what_stands_before_it(
    length: int, before: tuple[int, ...], expected: list[int]
) -> None:
    words = np.array([2, 10, 11, 12 | MARK, 13 | MARK], np.uint32)
    found = from_end(words, length, before)
    assert (found & ~np.uint32(MARK)).tolist() == expected
    assert (found[-1] & MARK) > 0
