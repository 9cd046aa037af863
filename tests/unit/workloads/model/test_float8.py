"""Products in 8 bits beside those of the same rounded numbers in fp64; on a CPU and, where there is one, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from workloads.model import float8
from workloads.model.float8 import Float8Linear, fits, linear, quantise

HALF = torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def rows(*shape: int, device: str = "cpu") -> Tensor:
    """Numbers of very different sizes, row by row."""
    torch.manual_seed(len(shape) + shape[0])
    spread = torch.logspace(-6, 6, shape[0]).view(-1, *[1] * (len(shape) - 1))
    return (torch.randn(*shape) * spread).to(device, HALF)


def rounded(x: Tensor) -> Tensor:
    """What 8 bits leave of rows, fp64."""
    numbers, scale = quantise(x)
    return numbers.double() * scale.double()


def test_a_number_keeps_four_bits_of_itself() -> None:
    x = rows(32, 64)
    apart = (rounded(x) - x.double()).abs()
    large = x.double().abs() > x.double().abs().amax(1, keepdim=True) * 2.0**-14
    assert (apart / x.double().abs())[large].max() <= 2.0**-4
    assert apart.max(1).values.div(x.double().abs().amax(1)).max() <= 2.0**-4
    _, scale = quantise(x)
    assert (torch.frexp(scale).mantissa == 0.5).all()


def test_a_part_of_a_row_is_rounded_as_in_the_whole() -> None:
    """So that layouts that cut a layer agree."""
    x = rows(16, 128)
    parts = [rounded(part.contiguous()) for part in x.split([16, 48, 64], dim=1)]
    whole, found = rounded(x), torch.cat(parts, 1)
    large = x.double().abs() > x.double().abs().amax(1, keepdim=True) * 2.0**-13
    assert torch.equal(whole[large], found[large])


def test_rows_without_numbers_stay_so_and_what_is_not_finite_is_seen() -> None:
    assert not rounded(torch.zeros(2, 16, dtype=HALF)).any()
    x, weight = torch.ones(3, 16, dtype=HALF), torch.ones(16, 16)
    x[0, 3], x[1, 5] = torch.nan, torch.inf
    with torch.autocast("cpu", HALF):
        y = linear(x, weight)
    assert y[:2].isnan().all()
    assert torch.equal(y[2], torch.full((16,), 16.0, dtype=HALF))


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_has_the_products_of_rounded_numbers(device: str) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(64, 48, device=device)
    layer.__class__ = Float8Linear
    x = rows(2, 20, 64, device=device).requires_grad_()
    with torch.autocast(device, HALF):
        y = layer(x)
    assert y.dtype is HALF
    gradient = torch.randn(2, 20, 48, device=device).to(HALF)
    y.backward(gradient)
    half = layer.weight.detach().to(HALF)
    flat, back = x.detach().flatten(0, 1), gradient.flatten(0, 1)
    expected = rounded(flat) @ rounded(half).t() + layer.bias.detach().double()
    torch.testing.assert_close(
        y.flatten(0, 1).double(), expected, rtol=2**-7, atol=2**-7 * float(flat.abs().max())
    )
    of_x = rounded(back) @ rounded(half.t().contiguous()).t()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.flatten(0, 1).double(), of_x, rtol=2**-7, atol=2**-7)
    exact = back.double() @ half.double()
    assert (x.grad.flatten(0, 1).double() - exact).abs().max() > 2**-6 * exact.abs().max()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float32
    of_weight = back.double().t() @ flat.double()
    torch.testing.assert_close(
        layer.weight.grad.double(), of_weight, rtol=2**-7, atol=2**-7 * float(of_weight.abs().max())
    )


def test_a_weight_that_is_not_trained_has_no_gradient() -> None:
    x, weight = rows(4, 16).requires_grad_(), torch.randn(32, 16)
    with torch.autocast("cpu", HALF):
        linear(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
    first = linear(rows(4, 16), weight.requires_grad_())
    first.sum().backward()
    assert weight.grad is not None


def test_sizes_are_multiples_of_sixteen() -> None:
    assert [fits(torch.empty(*shape)) for shape in ((16, 32), (16, 24), (8, 32))] == [True, False, False]
    assert float8.MULTIPLE == 16
