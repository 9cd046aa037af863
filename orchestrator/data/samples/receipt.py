"""The receipt: a rolling hash that is equal for two runs exactly if they used the same samples in the same order.

It does not depend on the layout. A step's hash is the sum modulo 2^64 of one digest for each sample. A digest covers
the global position, the sample id and the tokens. Ranks may add their digests in any order and grouping. Rolling the
sums into one hash fixes the order of steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash

START = "0" * 32
"""The receipt of a run before its first step."""


def digest(position: int, sample_id: int, window_tokens: np.ndarray) -> int:
    """Return xxh3_64 of (position, sample id, tokens), all as little-endian int64; the result is a signed int64."""
    message = np.array([position, sample_id], dtype="<i8").tobytes()
    return _signed(
        xxhash.xxh3_64_intdigest(message + np.ascontiguousarray(window_tokens, dtype="<i8").tobytes())
    )


def add(digests: Iterable[int]) -> int:
    """Return the sum of digests, or of sums of digests, modulo 2^64, as a signed int64 that fits a tensor."""
    return _signed(sum(digests) % 2**64)


def roll(previous: str, step_sum: int) -> str:
    """Return the receipt after a step, 32 hexadecimal digits. `step_sum` is the sum of the digests over all ranks,
    modulo 2^64.
    """
    return xxhash.xxh3_128_hexdigest(bytes.fromhex(previous) + (step_sum % 2**64).to_bytes(8, "little"))


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
