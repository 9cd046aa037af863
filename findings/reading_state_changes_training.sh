#!/usr/bin/env bash
# Reading an optimizer's state for a checkpoint before the first step changes the training that follows.
#
# Guess: get_optimizer_state_dict reads. A run that saves a checkpoint at step 0 trains like one that does not.
# Behaviour: torch creates the missing state by a step with gradients and rates of zero. The weights stay, but AdamW's
#   step counter stays at 1, so the bias corrections of the first real update are those of the second: it is
#   0.526 / sqrt(0.5) = 0.744 times as large, and the next updates are off by less and less.
# Packages: torch 2.13.0, numpy 2.4.6
# Why it matters: two runs with the same seed differ from their first step on because one of them writes an initial
#   checkpoint, and a resume from that checkpoint agrees with neither a fresh run nor the paper.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6

venv/bin/python - <<'PY'
import math

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

print("version: torch", torch.__version__)
print("guess: the first update is 0.1, the learning rate, whether the state was read before or not")


def first_update(read):
    """How far AdamW with rate 0.1 moves a weight in its first step, and the step that it counts then."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    if read:
        get_optimizer_state_dict(model, optimizer)
    before = model.weight.detach().clone()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return (model.weight - before).abs().mean().item(), int(optimizer.state[model.weight]["step"])


quiet, read = first_update(False), first_update(True)
print(f"seen: without reading (update, step) {quiet}, after reading {read}")
second = (0.1 / (1 - 0.9**2)) / math.sqrt(0.001 / (1 - 0.999**2))
assert quiet[1] == 1 and abs(quiet[0] - 0.1) < 1e-5
assert read[1] == 2 and abs(read[0] - 0.1 * second) < 1e-5
PY
