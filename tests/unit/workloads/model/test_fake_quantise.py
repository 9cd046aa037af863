"""Fake-quantised numbers are those of the formats' libraries, bit for bit, and gradients those of a plain loop."""

from __future__ import annotations

import gguf
import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from torch import Tensor, nn
from traced_cases import vocabulary_of

from workloads.errors import WorkloadError
from workloads.inference import with_weights
from workloads.load import load
from workloads.model.fake_quantise import (
    FakeQuantisedLinear,
    FakeQuantiser,
    check_scheme,
    extremes,
    fake_quantised,
    fake_quantised_tokens,
    largest_of_tokens,
    quantise,
    quantised_layers,
)
from workloads.model.scheme import Scheme


def weights(rows: int = 96, columns: int = 256) -> Tensor:
    """Of several sizes, with ties, zeros, and a group that is zero."""
    torch.manual_seed(0)
    found = torch.randn(rows, columns) * torch.logspace(-6, 3, rows)[:, None]
    found[::7] = found[::7].mul(8).round().div(8)
    found[3, :128] = 0.0
    found[5] = 0.0
    found[11, 2], found[11, 40] = 5.0, -5.0
    return found


@pytest.mark.parametrize("group", [32, 128, 0])
@pytest.mark.parametrize("form", ["int4", "int8"])
def test_integers_are_those_of_compressed_tensors(form: str, group: int) -> None:
    weight = weights()
    scheme = Scheme(form, group)  # type: ignore[arg-type]
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=scheme.bits, symmetric=True, **strategy)
    scale = quantise(weight, scheme)[1].squeeze(-1)
    assert torch.equal(fake_quantised(weight, scheme), fake_quantize(weight, scale, None, args))
    block, most = (1, group or weight.shape[1]), 2 ** (scheme.bits - 1)
    groups = weight.unflatten(-1, (-1, block[1]))
    wanted = torch.maximum(groups.amin(-1) / -most, groups.amax(-1) / (most - 1))
    zero = scale == torch.finfo(torch.float32).eps
    assert torch.equal(scale[~zero], wanted[~zero])
    assert zero.sum() == (wanted == 0).sum() > 0


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_a_last_bit_does_not_move_the_largest_weights(form: str) -> None:
    """With compressed-tensors' own scale the lowest weight of a group lies between two integers."""
    torch.manual_seed(0)
    weight = torch.randn(512, 64)
    moved = weight * (1 + 2.0**-22)
    scheme = Scheme(form, 32)  # type: ignore[arg-type]
    assert torch.equal(quantise(weight, scheme)[0], quantise(moved, scheme)[0])
    args = QuantizationArgs(num_bits=scheme.bits, symmetric=True, strategy="group", group_size=32)
    theirs = []
    for each in (weight, moved):
        groups = each.unflatten(-1, (-1, 32))
        theirs.append(ct_quantize(each, *calculate_qparams(groups.amin(-1), groups.amax(-1), args), args))
    assert (theirs[0] != theirs[1]).sum() > 10


@pytest.mark.parametrize("form", ["q4_0", "q8_0"])
def test_integers_are_those_of_gguf(form: str) -> None:
    weight = weights()
    kind = getattr(gguf.GGMLQuantizationType, form.upper())
    wanted = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
    assert torch.equal(fake_quantised(weight, Scheme(form, 32)), torch.from_numpy(wanted))  # type: ignore[arg-type]


def test_tokens_are_rounded_as_by_compressed_tensors() -> None:
    x = weights(12, 64).view(3, 4, 64)
    args = QuantizationArgs(num_bits=8, symmetric=True, strategy="token", dynamic=True)
    wanted = fake_quantize(x, *compute_dynamic_scales_and_zp(x, args, nn.Linear(1, 1)), args)
    assert torch.equal(fake_quantised_tokens(x, largest_of_tokens(x)), wanted)


@pytest.mark.parametrize("form", ["int4", "int8", "q4_0", "q8_0"])
def test_parts_of_a_row_are_rounded_as_the_row(form: str) -> None:
    """By whole groups anywhere; of a row with one scale, with the largest number of all parts."""
    weight = weights()
    group = 32
    scheme = Scheme(form, group)  # type: ignore[arg-type]
    halves = [fake_quantised(part, scheme) for part in weight.chunk(2, 1)]
    assert torch.equal(torch.cat(halves, 1), fake_quantised(weight, scheme))
    if not scheme.is_of_gguf:
        row = Scheme(form, 0)  # type: ignore[arg-type]
        largest = torch.maximum(*(extremes(part, row) for part in weight.chunk(2, 1)))
        halves = [fake_quantised(part, row, largest) for part in weight.chunk(2, 1)]
        assert torch.equal(torch.cat(halves, 1), fake_quantised(weight, row))


@pytest.mark.parametrize("activations", [False, True])
def test_the_gradient_passes_straight_through_the_rounding(activations: bool) -> None:
    torch.manual_seed(0)
    scheme = Scheme("int4", 16, activations)
    weight, bias = nn.Parameter(torch.randn(8, 32)), nn.Parameter(torch.randn(8))
    x = torch.randn(2, 3, 32, requires_grad=True)
    FakeQuantiser(scheme)(x, weight, bias).square().sum().backward()
    found = [each.grad for each in (x, weight, bias)]
    for each in (x, weight, bias):
        each.grad = None
    rounded = weight + (fake_quantised(weight, scheme) - weight).detach()
    read = x
    if activations:
        read = x + (fake_quantised_tokens(x, largest_of_tokens(x)) - x).detach()
    F.linear(read, rounded, bias).square().sum().backward()
    for one, other in zip(found, (x, weight, bias), strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-5, atol=1e-5)


def test_off_it_is_a_plain_linear_layer() -> None:
    torch.manual_seed(0)
    product, x, weight = FakeQuantiser(Scheme("int4", 16)), torch.randn(3, 32), torch.randn(8, 32)
    assert not torch.equal(product(x, weight), F.linear(x, weight))
    product.is_on = False
    assert torch.equal(product(x, weight), F.linear(x, weight))


def test_in_16_bits_the_weight_is_rounded_from_fp32() -> None:
    torch.manual_seed(0)
    scheme, x, weight = Scheme("int4", 16), torch.randn(3, 32), torch.randn(8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        found = FakeQuantiser(scheme)(x, weight)
        wanted = F.linear(x, fake_quantised(weight, scheme))
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, wanted)


def test_the_gate_of_a_feed_forward_block_is_no_router() -> None:
    workload = load("llama-tiny", "causal_lm", vocabulary_of(192), sequence_length=16)
    with torch.device("meta"):
        model = workload.build()
    found = quantised_layers(model, workload.blocks(model), Scheme("int8"))
    assert {name.split(".")[3] for name in found if ".feedforward." in name} == {"gate", "up", "down"}


def test_the_layers_are_those_of_blocks_that_the_patterns_name() -> None:
    workload = load("mixtral-tiny", "causal_lm", vocabulary_of(192), sequence_length=16)
    with torch.device("meta"):
        model = workload.build()
    blocks = workload.blocks(model)
    every = quantised_layers(model, blocks, Scheme("int8"))
    assert {name.rpartition(".attention.")[2] for name in every} == {
        "query.weight",
        "key.weight",
        "value.weight",
        "output.weight",
    }
    some = quantised_layers(
        model, blocks, Scheme("int8", match=("*.query.*", "*.key.*"), keep=("layers.0.*",))
    )
    assert {name.split(".")[1] for name in some} == {name.split(".")[1] for name in every} - {"0"}
    assert {name.split(".")[3] for name in some} == {"query", "key"}


@pytest.mark.parametrize(
    ("scheme", "wanted"),
    [
        (
            Scheme("int8", match=("*.weights",)),
            r"'\*\.weights' matches no weight of a linear layer in a block",
        ),
        (Scheme("int8", keep=("*",)), "keep leaves no linear layer"),
        (Scheme("int8", 48), "rows of .*, which is not a multiple of the group of 48"),
        (
            Scheme("int4", keep=("*.query.*",), int8=("*.query.*",)),
            r"'\*\.query\.\*' matches no quantised weight",
        ),
    ],
)
def test_what_cannot_be_quantised_is_told(scheme: Scheme, wanted: str) -> None:
    workload = load("gpt-tiny", "causal_lm", vocabulary_of(192), sequence_length=16)
    with torch.device("meta"):
        model = workload.build()
    with pytest.raises(WorkloadError, match=wanted):
        check_scheme(model, workload.blocks(model), scheme)


def test_a_model_for_inference_computes_what_the_layers_of_training_do() -> None:
    workload = load("gpt-tiny", "causal_lm", vocabulary_of(192), sequence_length=16)
    scheme = Scheme("int4", 32, activations=True, int8=("*.query.*", "layers.1.*"))
    read = {name: workload.initial(name, 3) for name in workload.shapes}
    tokens = torch.arange(32).view(2, 16)
    model = with_weights(workload, read.__getitem__)
    plain = model({"tokens": tokens}).logits
    bits = []
    for name, module in quantised_layers(model, workload.blocks(model), scheme).items():
        module.__class__ = FakeQuantisedLinear
        module.product = FakeQuantiser(scheme.of(name))
        bits.append((scheme.of(name).bits, ".query." in name or name.startswith("layers.1.")))
    assert {*bits} == {(8, True), (4, False)}
    trained = model({"tokens": tokens}).logits
    found = with_weights(workload, read.__getitem__, scheme=scheme)({"tokens": tokens}).logits
    torch.testing.assert_close(found, trained, rtol=1e-6, atol=1e-6)
    assert (plain - trained).abs().max() > 1e-4
