"""Signatures: any bit changes them, no layout of memory does, and a GPU's sum finds what a hash finds."""

from __future__ import annotations

import math

import pytest
import torch

from orchestrator.parallel.witness import (
    Message,
    Witness,
    bits_of,
    from_rows,
    projection_of,
    to_rows,
    words_sum,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_any_bit_changes_both_hashes(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    tensor = torch.randn(37, 3, generator=draw).to(dtype)
    octets = tensor.view(-1).view(torch.uint8)
    before = int(bits_of(tensor)), int(words_sum(tensor.view(-1)))
    for place in range(len(octets)):
        for bit in range(8):
            octets[place] ^= 1 << bit
            assert int(bits_of(tensor)) != before[0]
            assert int(words_sum(tensor.view(-1))) != before[1]
            octets[place] ^= 1 << bit
    assert (int(bits_of(tensor)), int(words_sum(tensor.view(-1)))) == before


def test_the_same_bit_of_two_numbers_does_not_cancel() -> None:
    """One number gains what the other loses, as where one bit of a device is wrong in everything it computes."""
    tensor = torch.tensor([1.0, 1.0, 3.0, 3.0])
    words = tensor.view(torch.int32).clone()
    words[0] += 2**10
    words[2] -= 2**10
    assert int(words_sum(words.view(torch.float32))) != int(words_sum(tensor))


def test_a_view_has_the_signature_of_its_copy() -> None:
    tensor = torch.randn(6, 8)
    assert bits_of(tensor.t()) == bits_of(tensor.t().contiguous())
    assert torch.equal(projection_of(tensor[::2]), projection_of(tensor[::2].clone()))


def test_a_projection_changes_by_what_an_element_changes() -> None:
    tensor = torch.randn(3000, generator=torch.Generator().manual_seed(2))
    before = projection_of(tensor)
    for place in (0, 1023, 1024, 2999):
        other = tensor.clone()
        other[place] += 0.5
        assert abs(projection_of(other)[1] - before[1]).item() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("exact", [True, False])
def test_a_record_keeps_its_order_and_comes_back_from_a_message(exact: bool) -> None:
    witness = Witness()
    witness.sent(torch.ones(3))
    witness.begin(exact, sums_gradients=False)
    assert not witness.sums_gradients
    witness.sent(torch.ones(3))
    witness.received(torch.zeros(2, 2))
    record = witness.take()
    assert witness.sums_gradients
    witness.sent(torch.ones(3))
    assert [message.sent for message in record] == [True, False]
    assert from_rows(to_rows(record)) == record
    witness.begin(exact)
    assert witness.take() == []


def test_what_overflows_on_both_sides_is_alike() -> None:
    """As the gradients of a step that a loss scale of fp16 skips."""
    endless, none = Message(True, norm=math.inf, projection=math.nan), Message(True, norm=math.nan)
    assert endless.is_like(endless, 1e-2)
    assert none.is_like(none, 1e-2)
    assert not endless.is_like(none, 1e-2)
    assert not endless.is_like(Message(True, norm=1.0), 1e-2)
