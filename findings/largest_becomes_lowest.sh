#!/usr/bin/env bash
# A layer of torch that is made in bfloat16 begins with weights whose mean is below zero.
#
# Guess: uniform numbers in bfloat16 are those in float32, rounded. Between -b and b their mean is 0 but for chance, so a layer
#   made with dtype=torch.bfloat16 begins like one that is made in float32 and converted.
# Behaviour: on a CPU they are those in float32, rounded, except that a number that rounds up to the upper end becomes the
#   lower end, because the upper end is excluded. Of rand() every 512th number is 0 that was nearly 1. Of nn.Linear's
#   weights every 1,024th has the largest size with the wrong sign. In float16 it is an eighth of that.
# Packages: torch 2.13.0, numpy 2.4.6
# Why it matters: the shift has the same sign for all outputs, so it adds up over inputs of one sign, such as those after a
#   ReLU: with 4,096 inputs all outputs of a layer begin a fifth of their spread too low, with 65,536 (flattened images)
#   four fifths. -log(rand()) is infinite once in 512 draws.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6

venv/bin/python - <<'PY'
import torch

print("version: torch", torch.__version__)
print("guess: made in bfloat16 or converted to it, a layer has outputs around 0")
INPUTS, OUTPUTS = 4096, 2048
positive = torch.rand(INPUTS, generator=torch.Generator().manual_seed(1))


def shift(layer):
    """The mean of a layer's outputs for positive inputs, by their standard deviation."""
    outputs = layer.weight.detach().double() @ positive.double()
    return (outputs.mean() / outputs.std()).item()


def drawn(kind):
    return torch.rand(1_000_000, dtype=kind, generator=torch.Generator().manual_seed(0))


torch.manual_seed(0)
made = shift(torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.bfloat16))
converted = shift(torch.nn.Linear(INPUTS, OUTPUTS, bias=False).to(torch.bfloat16))
exact, rounded = drawn(torch.float32), drawn(torch.bfloat16)
wrapped = exact.to(torch.bfloat16) == 1
print("of a million draws, round to 1:", wrapped.sum().item(), "are 0:", (rounded == 0).sum().item())
print(f"seen: mean of the outputs in standard deviations: converted {converted:.2f}, made in bfloat16 {made:.2f}")
assert torch.equal(rounded, torch.where(wrapped, 0.0, exact.to(torch.bfloat16)))
assert abs(wrapped.double().mean() - 1 / 512) < 0.0002
assert abs(converted) < 0.1
assert -0.35 < made < -0.15
PY
