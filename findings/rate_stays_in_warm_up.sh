#!/usr/bin/env bash
# A scheduler of torch that is built after the optimizer's state was loaded trains the rest of the run at the rate of a warm-up.
#
# Guess: optimizer and scheduler both load their states, and both states hold the rate (lr and _last_lr). The order of building and
#   loading makes no difference; if it does, then for one step.
# Behaviour: SequentialLR sets the optimizer's rate to that of step 0 when it is built. Loading its state brings back the step and
#   not the rate, and LinearLR and CosineAnnealingLR compute the next rate from the present one. The cosine then goes on
#   from the warm-up's first rate, here 88 times too low, to the end. LambdaLR, which the schedules of transformers are, is right
#   from the second step on. (A note of torch's documentation asks for the other order.)
# Packages: torch 2.13.0, numpy 2.4.6
# Why it matters: warm-up and cosine is the usual schedule, and a resumed run that loads each thing as it is built learns next to nothing.
#   The loss does not jump: it stops falling, which looks like the end of learning.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6

venv/bin/python -W ignore - <<'PY'
import copy
import math

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

print("version: torch", torch.__version__)
print("guess: the rates after the resume are those of the uninterrupted run, by either order")
STEPS, WARM_UP, RESUME = 1000, 100, 300


def sequential(optimizer):
    parts = [LinearLR(optimizer, 0.01, total_iters=WARM_UP), CosineAnnealingLR(optimizer, STEPS - WARM_UP)]
    return SequentialLR(optimizer, parts, [WARM_UP])


def by_formula(optimizer):
    return LambdaLR(optimizer, lambda step: min(0.01 + 0.99 * step / WARM_UP, 1) * (1 + math.cos(math.pi * step / STEPS)) / 2)


def new_optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def go_on(optimizer, scheduler, steps):
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def ratios(build, optimizer_first):
    """Rates of a resumed run by those of an uninterrupted one: of the first step, the second, and the last but one."""
    optimizer = new_optimizer()
    scheduler = build(optimizer)
    go_on(optimizer, scheduler, RESUME)
    states = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    rates = go_on(optimizer, scheduler, STEPS - RESUME)
    resumed = new_optimizer()
    if optimizer_first:
        resumed.load_state_dict(states[0])
        scheduler = build(resumed)
    else:
        scheduler = build(resumed)
        resumed.load_state_dict(states[0])
    scheduler.load_state_dict(states[1])
    again = go_on(resumed, scheduler, STEPS - RESUME)
    return [round(again[step] / rates[step], 3) for step in (0, 1, STEPS - RESUME - 2)]


seen = {
    (build.__name__, "optimizer loaded before the scheduler is built" if first else "after"): ratios(build, first)
    for build in (sequential, by_formula) for first in (False, True)
}
for case, values in seen.items():
    print(*case, values)
wrong = seen["sequential", "optimizer loaded before the scheduler is built"]
print(f"seen: the rates are {wrong} of the right ones")
assert seen["sequential", "after"] == seen["by_formula", "after"] == [1.0, 1.0, 1.0]
assert all(0.01 <= ratio < 0.012 for ratio in wrong)
assert seen["by_formula", "optimizer loaded before the scheduler is built"][1:] == [1.0, 1.0]
PY
