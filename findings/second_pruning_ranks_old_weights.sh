#!/usr/bin/env bash
# torch's pruning ranks the weights that the last forward pass used, from its second call on.
#
# Guess: global_unstructured after optimizer.step() prunes the weights that are smallest now, at every call.
# Behaviour: the first call ranks the parameter itself. It then turns `weight` into a plain attribute, which only a
#   forward pass computes again from `weight_orig` and the mask. A gradual schedule that prunes after optimizer.step()
#   therefore ranks the weights of before the step: a weight that the step made the largest of all is pruned, and one that
#   it made zero is kept. A forward pass before the call gives the other choice.
# Packages: torch 2.13.0, numpy 2.4.6
# Why it matters: gradual pruning (Zhu and Gupta, 2017) as most training loops write it is one step behind, and a test
#   against torch's own masks passes or fails by where the call stands.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6

venv/bin/python - 2>/dev/null <<'PY'
import torch
from torch import nn
from torch.nn.utils import prune

print("version: torch", torch.__version__)
print("guess: after a step that makes weight 6 the largest and weight 0 zero, weight 0 is pruned next and 6 is kept")


def layer():
    found = nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        found.weight.copy_(torch.tensor([[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]]))
    return found


def kept(module):
    return module.weight_mask[0].int().tolist()


def step(parameter):
    """One step of SGD whose gradient sets weight 0 to zero and weight 6, the smallest that is left, to 100."""
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.zeros_like(parameter)
    parameter.grad[0, 0] = parameter[0, 0].item()
    parameter.grad[0, 6] = parameter[0, 6].item() - 100.0
    optimizer.step()


masks = {}
for passes in (False, True):
    module = layer()
    prune.global_unstructured([(module, "weight")], prune.L1Unstructured, amount=1)
    assert kept(module) == [1, 1, 1, 1, 1, 1, 1, 0]
    step(module.weight_orig)
    if passes:
        module(torch.zeros(1, 8))
    prune.global_unstructured([(module, "weight")], prune.L1Unstructured, amount=1)
    masks[passes] = kept(module)
    print(f"seen: {'with' if passes else 'without'} a forward pass after the step, kept {masks[passes]}")

first = layer()
step(first.weight)
prune.global_unstructured([(first, "weight")], prune.L1Unstructured, amount=1)
print(f"seen: a first call after the same step, kept {kept(first)}")
assert masks[False] == [1, 1, 1, 1, 1, 1, 0, 0]  # weight 6 is 100 by now, and weight 0 is 0
assert masks[True] == [0, 1, 1, 1, 1, 1, 1, 0]
assert kept(first) == [0, 1, 1, 1, 1, 1, 1, 1]
print("holds: the second call ranks the weights of the last forward pass")
PY
