"""Known bits: a sound device passes, and one wrong bit of a result is found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from orchestrator.parallel import burn_in

CPU = torch.device("cpu")


def flipped(result: Tensor) -> Tensor:
    found = result.clone()
    octets = found.view(-1).view(torch.uint8)
    octets[len(octets) // 2] ^= 1
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_sound_device_passes(seed: int) -> None:
    assert burn_in.products(CPU, seed) == []
    assert burn_in.updates(CPU, seed) == []
    assert burn_in.memory(CPU, 2**20 + 5, seed) == []


def test_one_wrong_bit_is_found() -> None:
    found = burn_in.products(CPU, 1, flipped)
    assert [line.split(":")[0] for line in found] == [
        f"matrix multiplication in {dtype}" for dtype in ("float32", "bfloat16", "float16")
    ]
    assert burn_in.updates(CPU, 1, flipped) == ["elementwise update: 1 wrong elements"]


def test_memory_that_forgets_a_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bit of one word reads as one, whatever was written."""
    whole = torch.Tensor.split

    def stuck(tensor: Tensor, *given: int) -> tuple[Tensor, ...]:
        tensor.view(torch.uint8)[77] |= 4
        return whole(tensor, *given)

    monkeypatch.setattr(torch.Tensor, "split", stuck)
    found = burn_in.memory(CPU, 2**12, 3)
    assert found[:3] == [
        "1 octets of memory do not keep the pattern 0x00",
        "1 octets of memory do not keep the pattern 0xaa",
        "1 words of memory do not keep their address",
    ]
