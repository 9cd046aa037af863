"""A vocabulary with every special token, objectives by name, and corpora drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from texts import Corpus

from workloads.objectives import build
from workloads.workload import Vocabulary

TEXT = 110
SIZE = TEXT + 200


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """eos 0, pad 1, bos 2, cls 3, sep 4, mask 5, unk 6, a hundred sentinels from 10, text from 110.

    Two of three text tokens begin a word; the last ten end a sentence.
    """
    ids = np.arange(SIZE)
    return Vocabulary(
        size=SIZE, eos=0, pad=1, bos=2, cls=3, sep=4, mask=5, sentinels=tuple(range(10, TEXT)),
        word_start=(ids >= TEXT) & (ids % 3 != 0), sentence_end=ids >= SIZE - 10,
    )  # fmt: skip


@pytest.fixture(scope="session")
def make(vocabulary: Vocabulary) -> Callable[..., Any]:
    """make(name, sequence_length, **options): an objective with seed 7."""

    def build_one(name: str, sequence_length: int = 64, **options: Any) -> Any:
        if name == "entity_masking":
            options.setdefault("entities", [[120, 121, 122], [120, 121], [130, 131, 132, 133], [140, 141]])
        return build(name, vocabulary=vocabulary, sequence_length=sequence_length, **{"seed": 7, **options})

    return build_one


@pytest.fixture(scope="session")
def draw() -> Callable[..., np.ndarray]:
    """draw(seed, size, ends): text tokens with each position a document end with probability `ends`."""

    def tokens(seed: int, size: int, ends: float = 0.0) -> np.ndarray:
        rng = np.random.default_rng(seed)
        return np.where(rng.random(size) < ends, 0, rng.integers(TEXT, SIZE, size=size))

    return tokens


@pytest.fixture(scope="session")
def samples(make: Callable[..., Any], draw: Callable[..., np.ndarray]) -> Callable[..., tuple[Any, Any, Any]]:
    """samples(name, count, length, ends, **options): objective, windows [count, window], batch as numpy."""

    def collect(name: str, count: int, length: int = 128, ends: float = 0.0, **options: Any) -> Any:
        objective = make(name, length, **options)
        size = objective.window(length)
        windows = np.stack([draw(i, size, ends) for i in range(count)])
        batch = objective.collate(Corpus(lambda i: windows[i], count), range(count), 0)
        return objective, windows, {key: value.numpy() for key, value in batch.items()}

    return collect
