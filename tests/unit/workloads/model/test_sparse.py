"""Which tokens see each other in sparse attention: against the papers' definitions, token by token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from workloads.model.cache import Cache
from workloads.model.config import TransformerConfig
from workloads.model.count import flops
from workloads.model.masks import SEGMENTS, self_mask
from workloads.model.presets import preset
from workloads.model.sparse import near

LENGTH = 48


def tiny(model: str, **changes: Any) -> TransformerConfig:
    return replace(preset(model), **changes)


def pattern(config: TransformerConfig, length: int = LENGTH) -> torch.Tensor:
    """bool [length, length]: which keys each query sees."""
    found = self_mask(config, {"tokens": torch.zeros(1, length, dtype=torch.long)}, length)
    allowed = found.dense(length, torch.device("cpu"))
    assert allowed is not None
    return allowed[0, 0]


def test_a_dilated_window_is_longformers() -> None:
    config = tiny("bert-tiny", window=4, window_dilation=3, global_tokens=2)
    for query in range(LENGTH):
        reached = {query + 3 * step for step in range(-3, 4)} | {0, 1}
        expected = set(range(LENGTH)) if query < 2 else {key for key in reached if 0 <= key < LENGTH}
        assert set(pattern(config)[query].nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("model", ["bert-tiny", "gpt-tiny"])
def test_random_blocks_are_bigbirds(model: str) -> None:
    """Each block of queries draws so many whole blocks besides its window and the global tokens, always the same."""
    sizes = {"window": 5, "global_tokens": 4, "block_size": 4}
    plain = tiny(model, **sizes)
    config = replace(plain, random_blocks=2)
    seen, base = pattern(config), pattern(plain)
    assert (seen | ~base).all()
    for block in range(LENGTH // 4):
        rows = slice(4 * block, 4 * block + 4)
        drawn = (seen & ~base)[rows]
        blocks = {key // 4 for key in drawn.nonzero()[:, 1].tolist()}
        # Out of reach of the window and the global tokens; of a causal model, those before it.
        free = [b for b in range(1, LENGTH // 4) if abs(b - block) > 2 or (abs(b - block) - 1) * 4 + 1 >= 5]
        free = [b for b in free if b != block and (b < block or not plain.causal)]
        if block:  # the first sees and is seen everywhere
            assert len(blocks) == min(2, len(free))
            assert blocks <= set(free)
            assert all(drawn[:, 4 * b : 4 * b + 4].all() for b in blocks)
    assert len({tuple(row) for row in (seen & ~base)[::4].int().tolist()}) > LENGTH // 8
    assert torch.equal(seen, pattern(config))


def test_a_text_that_grows_sees_the_same() -> None:
    config = tiny("gpt-tiny", window=3, window_dilation=2, global_tokens=1, random_blocks=1, block_size=4)
    whole = pattern(config)
    assert torch.equal(pattern(config, 21), whole[:21, :21])
    cache = Cache(LENGTH)
    for place in range(LENGTH):
        cache.advance(torch.tensor([[place]]))
        assert torch.equal(cache.visible(config)[0, 0, 0], whole[place, : place + 1])


@pytest.mark.parametrize("model", ["bert-tiny", "gpt-tiny"])
def test_a_document_of_a_packed_row_sees_what_it_sees_alone(model: str) -> None:
    config = tiny(model, window=3, global_tokens=2, random_blocks=1, block_size=4)
    lengths = (21, 7, LENGTH - 28)
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    batch = {"tokens": torch.zeros(1, LENGTH, dtype=torch.long), "segments": numbers}
    assert SEGMENTS in batch
    allowed = self_mask(config, batch, LENGTH).dense(LENGTH, torch.device("cpu"))
    assert allowed is not None
    whole = pattern(config)  # what a block draws in both directions depends on how many there may be
    alone = [whole[:length, :length] for length in lengths]
    assert torch.equal(allowed[0, 0], torch.block_diag(*alone).bool())


def test_a_window_alone_is_what_it_was() -> None:
    steps = torch.arange(LENGTH)
    for model in ("bert-tiny", "gpt-tiny"):
        found = near(tiny(model, window=7), steps[:, None], steps[None], LENGTH)
        assert torch.equal(found, (steps[:, None] - steps).abs() < 7)


def test_sparse_attention_costs_what_it_reads() -> None:
    def extra(**changes: int) -> float:
        return flops(tiny("bert-tiny", **changes), 512)

    assert extra(window=16) < extra(window=16, random_blocks=2, block_size=16) < extra()
