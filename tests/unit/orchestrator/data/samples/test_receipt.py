from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.data.samples import receipt

TOKENS = np.array([5, 1, 7])
signed = st.integers(-(2**63), 2**63 - 1)


def test_a_digest_is_fixed_forever() -> None:
    message = struct.pack("<5q", 3, 9, *TOKENS)
    assert receipt.digest(3, 9, TOKENS) == int(np.int64(np.uint64(xxhash.xxh3_64_intdigest(message))))
    assert receipt.digest(3, 9, TOKENS) == -2984032620805323553
    assert receipt.roll(receipt.START, 1) == xxhash.xxh3_128_hexdigest(bytes(16) + struct.pack("<q", 1))


@pytest.mark.parametrize(
    ("position", "sample", "tokens"),
    [(4, 9, [5, 1, 7]), (3, 8, [5, 1, 7]), (3, 9, [5, 1, 8]), (3, 9, [5, 1])],
)
def test_a_digest_binds_position_sample_and_text(position: int, sample: int, tokens: list[int]) -> None:
    assert receipt.digest(position, sample, np.array(tokens)) != receipt.digest(3, 9, TOKENS)


def test_the_type_and_strides_of_the_tokens_do_not_count() -> None:
    expected = receipt.digest(3, 9, TOKENS)
    assert receipt.digest(3, 9, TOKENS.astype("<u2")) == expected
    assert receipt.digest(3, 9, np.array([5, 0, 1, 0, 7, 0])[::2]) == expected


@given(digests=st.lists(signed, max_size=12), cut=st.integers(0, 12))
def test_ranks_may_add_in_any_grouping_and_order(digests: list[int], cut: int) -> None:
    whole = receipt.add(digests)
    assert -(2**63) <= whole < 2**63
    assert receipt.add([receipt.add(digests[cut:][::-1]), receipt.add(digests[:cut])]) == whole
    with np.errstate(over="ignore"):
        assert int(np.array(digests, dtype=np.int64).sum()) == whole  # as a tensor's sum wraps


@given(total=signed)
def test_a_signed_and_an_unsigned_sum_roll_alike(total: int) -> None:
    assert receipt.roll(receipt.START, total) == receipt.roll(receipt.START, total % 2**64)


def test_the_order_of_steps_counts() -> None:
    def after(*sums: int) -> str:
        rolled = receipt.START
        for each in sums:
            rolled = receipt.roll(rolled, each)
        return rolled

    assert len({after(), after(1), after(1, 2), after(2, 1), after(3)}) == 5
