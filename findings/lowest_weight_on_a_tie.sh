#!/usr/bin/env bash
# The symmetric int4 scale of compressed-tensors and torchao puts the lowest weight of a group between two integers.
#
# Guess: the weight of largest absolute value of a group is the one that symmetric quantisation keeps best, and the same
#   formula gives the same integers in two libraries.
# Behaviour: both divide the largest absolute value by 7.5, half of the range -8 .. 7. A negative weight of that size is
#   then at -7.5, and its last bit decides between -7 and -8: 6.7 % below or above. Multiplying all weights by
#   1 + 2^-22 moves every fifth of them. torchao multiplies by the reciprocal of the scale, where
#   compressed-tensors divides, and has other integers for the same scales.
# Packages: compressed-tensors 0.20.0, torchao 0.18.0, transformers 5.23.0, torch 2.13.0, numpy 2.4.6
# Why it matters: an export by one library is not what another evaluated; fake-quantised training depends on the order
#   of sums at the weights that matter most. torchao's SYMMETRIC_NO_CLIPPING_ERR has no such tie.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    compressed-tensors==0.20.0 torchao==0.18.0 transformers==5.23.0 torch==2.13.0 numpy==2.4.6

venv/bin/python - 2>/dev/null <<'PY'
import importlib.metadata

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

for package in ("compressed-tensors", "torchao"):
    print("version:", package, importlib.metadata.version(package))
print("guess: the same integers by both, and no integer moves by a factor of 1 + 2^-22")
GROUP = 128
torch.manual_seed(0)
weight = torch.randn(1024, 1024)
args = QuantizationArgs(num_bits=4, symmetric=True, strategy="group", group_size=GROUP)


def compressed(weight, mapping=None):
    groups = weight.unflatten(1, (-1, GROUP))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    if mapping is not None:
        scale = choose_qparams_affine(weight, mapping, (1, GROUP), torch.int8, -8, 7)[0].view_as(scale)
    return scale, quantize(weight, scale, zero, args)


scale, ours = compressed(weight)
other_scale, zero = choose_qparams_affine(weight, MappingType.SYMMETRIC, (1, GROUP), torch.int8, -8, 7)
theirs = quantize_affine(weight, (1, GROUP), other_scale, zero, torch.int8, -8, 7)
moved = compressed(weight * (1 + 2.0**-22))[1]
lowest = (weight.unflatten(1, (-1, GROUP)) == -weight.unflatten(1, (-1, GROUP)).abs().amax(-1, True)).flatten(1)
integers = {int(value): int(count) for value, count in zip(*ours[lowest].unique(return_counts=True))}
robust = [compressed(each, MappingType.SYMMETRIC_NO_CLIPPING_ERR)[1] for each in (weight, weight * (1 + 2.0**-22))]
print(f"seen: of {int(lowest.sum())} groups whose extreme is negative, it becomes {integers}")
print(f"seen: the factor moves {int((ours != moved).sum())} integers, {int((ours != moved)[lowest].sum())} of them these")
print(f"seen: scales equal: {torch.equal(scale, other_scale.view_as(scale))}; integers apart: {int((ours != theirs).sum())}")
print(f"seen: without clipping error the factor moves {int((robust[0] != robust[1]).sum())}")
assert set(integers) == {-8.0, -7.0} and min(integers.values()) > 100
assert (ours != moved)[lowest].sum() > 100
assert torch.equal(scale, other_scale.view_as(scale)) and (ours != theirs).sum() > 100
assert (robust[0] != robust[1]).sum() < 10
PY
