#!/usr/bin/env bash
# accelerate resumes in the middle of an epoch with another order of the rows, so some train twice and others never.
#
# Guess: save_state in the middle of the second epoch, then load_state and skip_first_batches in a new process, as its guide says, trains
#   the rest of that epoch: save_state stores the state of the random numbers, or of the seedable sampler.
# Behaviour: neither leads to the order of the epoch. The stored random numbers are those of the moment of the save, and the epoch's order
#   was drawn from those before it, so a new order is drawn and its first batches are passed over. With use_seedable_sampler the rest is that
#   of epoch 0's order, and the epoch after it is epoch 0 once more. Only set_epoch before the loop makes the second case right.
# Packages: accelerate 1.15.0, torch 2.13.0, numpy 2.4.6
# Why it matters: after each preemption a part of the rows is trained twice in the epoch and a part never, without a word. The loss does not show it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
export CUDA_VISIBLE_DEVICES=

cat > loop.py <<'PY'
import sys

import accelerate
import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

ROWS, BATCH, SAVED = 60, 5, 6


def prepared(seedable):
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    set_seed(0)
    return accelerator, accelerator.prepare(DataLoader(TensorDataset(torch.arange(ROWS)), batch_size=BATCH, shuffle=True))


def epoch(loader):
    return [row for (rows,) in loader for row in rows.tolist()]


def first_part(seedable, folder):
    """Train one epoch and half of the second, and save; the rows of that half, and its whole order in a run that goes on."""
    accelerator, loader = prepared(seedable)
    epoch(loader)
    rows = []
    for batch, (found,) in enumerate(loader, start=1):
        rows += found.tolist()
        if batch == SAVED:
            accelerator.save_state(folder)
    return rows[: SAVED * BATCH], rows


def second_part(seedable, folder, number=None):
    """Resume as the guide says; the rest of the epoch, and the epoch behind it."""
    accelerator, loader = prepared(seedable)
    accelerator.load_state(folder)
    if number is not None:
        loader.set_epoch(number)
    rest = epoch(accelerator.skip_first_batches(loader, SAVED))
    return rest, epoch(loader)
PY
cat > check.py <<'PY'
import tempfile

import accelerate
from loop import ROWS, epoch, first_part, prepared, second_part

print("version: accelerate", accelerate.__version__)
print(f"guess: after the resume the epoch has trained {ROWS} different rows of {ROWS}")
for seedable in (False, True):
    folder = tempfile.mkdtemp()
    half, whole = first_part(seedable, folder)
    rest, following = second_part(seedable, folder)
    different = len(set(half + rest))
    print(f"seen: use_seedable_sampler={seedable}: {len(half + rest)} rows, {different} different ones")
    assert sorted(whole) == list(range(ROWS)) and len(half + rest) == ROWS
    assert different < ROWS - 5
    if seedable:
        first = epoch(prepared(seedable)[1])
        again, _ = second_part(seedable, folder, number=1)
        print("seen: the epoch behind it is epoch 0 again:", following == first, "- right with set_epoch:", half + again == whole)
        assert following == first and half + again == whole
PY
venv/bin/python -W ignore check.py
