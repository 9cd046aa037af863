#!/usr/bin/env bash
# After a resume, torchdata's StatefulDataLoader finishes the epoch as before and shuffles all later ones otherwise.
#
# Guess: a resumed loader gives the rows that the loader would have given, in this epoch and in all after it. Giving it a
#   generator of one's own is the safe way to a reproducible order.
# Behaviour: with generator= and no worker processes the rest of the epoch is right, and every epoch after it has an order
#   that the uninterrupted loader never has. A state taken at the end of an epoch gives another next epoch at once. Without a
#   generator, under torch's global seed, and with worker processes, all epochs agree.
# Packages: torchdata 0.11.0, torch 2.13.0, numpy 2.4.6
# Why it matters: a test of the resume that compares the rest of its epoch passes. Losses of the resumed run leave the other
#   run's only at the next epoch, and so the resume isn't suspected.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torchdata==0.11.0 torch==2.13.0 numpy==2.4.6

cat > resume.py <<'PY'
import importlib.metadata
from itertools import islice

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

EPOCHS, BEFORE = 4, 2


def loader(own_generator, workers):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5) if own_generator else None
    return StatefulDataLoader(range(10), batch_size=2, shuffle=True, num_workers=workers, generator=generator)


def rows(batches):
    return [row for batch in batches for row in batch.tolist()]


def agreeing(own_generator, workers):
    """Which epochs are equal, in an uninterrupted run and in one that resumes after two batches of the second epoch."""
    whole = loader(own_generator, workers)
    wanted = [rows(whole) for _ in range(EPOCHS)]
    first = loader(own_generator, workers)
    found = [rows(first)]
    begun = iter(first)
    found.append(rows(islice(begun, BEFORE)))
    state = first.state_dict()
    resumed = loader(own_generator, workers)
    resumed.load_state_dict(state)
    found[1] += rows(resumed)
    found += [rows(resumed) for _ in range(EPOCHS - 2)]
    assert all(sorted(epoch) == list(range(10)) for epoch in found)
    return [epoch == other for epoch, other in zip(wanted, found, strict=True)]


if __name__ == "__main__":
    print("version: torchdata", importlib.metadata.version("torchdata"))
    print("guess: all four epochs agree in every case")
    own, seeded, worked = agreeing(True, 0), agreeing(False, 0), agreeing(True, 2)
    print("global seed:", seeded, "own generator and two workers:", worked)
    print("seen: epochs that agree with an own generator and no workers:", own)
    assert own == [True, True, False, False]
    assert seeded == worked == [True] * EPOCHS
PY
venv/bin/python -W ignore resume.py
