#!/usr/bin/env bash
# Leaving an evaluation loop early changes which micro-batches of the training end in an update, in accelerate.
#
# Guess: a break in an evaluation inside the training loop ends the evaluation. accumulate() goes on counting training batches.
# Behaviour: accelerate notes which loader runs and forgets it only when it is exhausted, so the evaluation loader stays the running one
#   for the rest of the epoch. If the break came before its last batch, the end of the training epoch is not noticed: its last
#   group makes no update and joins the next epoch's first one. If it came at the last batch, every training batch is now the
#   end of a loader, and each makes an update of its own: at accumulation 4, four times as many, each with a quarter of the gradient.
# Packages: accelerate 1.15.0, torch 2.13.0, numpy 2.4.6
# Why it matters: "if step + 1 == max_eval_batches: break" is in most training scripts. Raising that limit to the number of batches turns
#   accumulation off in the middle of an epoch: batches are four times smaller, at the same rate, and the schedule runs four times faster.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
export CUDA_VISIBLE_DEVICES=

venv/bin/python -W ignore - <<'PY'
import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, TensorDataset

EVALUATION = 6
print("version: accelerate", accelerate.__version__)
print("guess: the updates are the same, whatever the evaluation does")


def updates(stop):
    """For each of two epochs of 10 micro-batches: 1 where an update follows. The evaluation stops after `stop` batches."""
    GradientState._reset_state()
    AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    training, evaluation = (DataLoader(TensorDataset(torch.ones(rows, 1)), 1) for rows in (10, EVALUATION))
    model, optimizer, training, evaluation = accelerator.prepare(model, optimizer, training, evaluation)
    epochs = []
    for _ in range(2):
        epochs.append("")
        for number, (rows,) in enumerate(training):
            with accelerator.accumulate(model):
                accelerator.backward(model(rows).sum())
                optimizer.step()
                optimizer.zero_grad()
            epochs[-1] += str(int(accelerator.sync_gradients))
            if number == 1 and stop is not None:
                for batch, (rows,) in enumerate(evaluation):
                    with torch.no_grad():
                        model(rows)
                    if batch + 1 == stop:
                        break
    return epochs


seen = {stop: updates(stop) for stop in (None, EVALUATION + 1, 3, EVALUATION)}
names = {None: "no evaluation", EVALUATION + 1: "a whole one", 3: "left after 3 batches of 6", EVALUATION: "left at its last batch"}
for stop, epochs in seen.items():
    print(f"{names[stop]}: {epochs}")
print("seen: " + ", ".join(f"{sum(epoch.count('1') for epoch in seen[stop])} updates ({names[stop]})" for stop in seen))
assert seen[None] == seen[EVALUATION + 1] == ["0001000101"] * 2
assert seen[3] == ["0001000100", "0100010001"]
assert seen[EVALUATION] == ["0011111111"] * 2
PY
