#!/usr/bin/env bash
# Rows at the end of an epoch count less in accelerate if the accumulation does not divide the epoch.
#
# Guess: accumulate() ends a group at the end of the epoch, so a last group of two micro-batches instead of four is a step with
#   the mean gradient of two. (It does make the step.)
# Behaviour: every loss is divided by gradient_accumulation_steps as soon as backward() is called, before anybody knows how
#   long the group becomes. The last step of an epoch has half of the gradient, at the full learning rate and decay.
# Packages: accelerate 1.15.0, torch 2.13.0, numpy 2.4.6
# Why it matters: with SGD the rows at the end teach half as much, and in a data set without shuffling they are always
#   the same ones. A batch that is cut into micro-batches is not the same training, and the logged norm falls once an epoch.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
export CUDA_VISIBLE_DEVICES=

venv/bin/python - 2>/dev/null <<'PY'
import accelerate
import torch
from torch.utils.data import DataLoader, TensorDataset

print("version: accelerate", accelerate.__version__)
print("guess: six equal rows, in groups of four: every step of two epochs moves the weight by 1.0")


def moves(micro_batch, accumulation):
    """How far each step moves a weight whose gradient is 1 for every row; six rows, two epochs."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(TensorDataset(torch.ones(6, 1)), micro_batch)
    )
    found = []
    for _ in range(2):
        for (rows,) in loader:
            with accelerator.accumulate(model):
                before = model.weight.item()
                accelerator.backward(model(rows).mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                found.append(round(before - model.weight.item(), 4))
    return found


whole, cut = moves(4, 1), moves(1, 4)
print(f"seen: batches of four {whole}, four micro-batches of one {cut}")
assert whole == [1.0] * 4
assert cut == [1.0, 0.5, 1.0, 0.5]
PY
