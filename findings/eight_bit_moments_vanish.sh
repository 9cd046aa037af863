#!/usr/bin/env bash
# torchao's AdamW in 8 bits moves weights with small gradients by hundreds of learning rates.
#
# Guess: moments in 8 bits cost a few percent of precision, so an update is about as large as AdamW's: at most about one
#   learning rate a step.
# Behaviour: first and second moments are rounded by block, relative to the largest of the block. The second moment is a
#   square, so where a gradient is 10,000 times smaller than the block's largest it rounds to zero while the first moment
#   keeps a code. The update is then divided by eps alone. Forty steps, the last ten without any gradient, move such
#   weights by more than 300 learning rates; AdamW moves them by 30 at most, and by less in the steps without gradient.
# Packages: torchao 0.18.0, torch 2.13.0, numpy 2.4.6
# Why it matters: rows with one large channel, units that are nearly dead, and experts that no token reached in a step
#   have such gradients. The loss spikes, and a lower learning rate seems to help.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torchao==0.18.0 torch==2.13.0 numpy==2.4.6
# The same arithmetic without a compiler.
export TORCHDYNAMO_DISABLE=1

venv/bin/python - 2>/dev/null <<'PY'
import importlib.metadata

import torch
from torchao.optim import AdamW8bit

print("version: torchao", importlib.metadata.version("torchao"))
RATE = 1e-3
print("guess: in 40 steps no weight moves by more than 40 learning rates or so")


def moved(optimizer_class):
    """How far the weights with small gradients have moved after 30 steps and after 10 more without gradients."""
    noise = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(16, 256))
    optimizer = optimizer_class([weight], lr=RATE, weight_decay=0.0)
    found = []
    for step in range(40):
        gradient = torch.randn(16, 256, generator=noise) * 1e-6
        gradient[:, 0] = 1e-2
        weight.grad = gradient if step < 30 else torch.zeros_like(gradient)
        optimizer.step()
        if step in (29, 39):
            found.append(round(weight[:, 1:].abs().max().item() / RATE))
    return found


exact, rounded = moved(torch.optim.AdamW), moved(AdamW8bit)
print(f"seen: in learning rates, after 30 and 40 steps: AdamW {exact}, in 8 bits {rounded}")
assert max(exact) <= 40
assert min(rounded) > 300
PY
