#!/usr/bin/env bash
# Rows of the validation split train from the second epoch on, if a stream of datasets is shuffled before it is split.
#
# Guess: shuffled.take(100) and shuffled.skip(100) divide the rows: each row is in one of them, in every epoch.
# Behaviour: the shuffle below take and skip is drawn anew in each epoch. skip(100) then passes over 100 other rows: part of the
#   validation rows are trained, as many training rows never are, and it is another part in each epoch. A prepared loader
#   of accelerate, so Trainer's too, sets the epoch of its dataset by itself. Split first and shuffled after that, all is right.
# Packages: datasets 5.2.0, accelerate 1.15.0, torch 2.13.0, numpy 2.4.6
# Why it matters: the recipe of many tutorials is right for one epoch. After that the validation loss is partly one of training,
#   early stopping and the choice of a checkpoint follow it, and the longer the run, the more rows have leaked.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check datasets==5.2.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
export HF_HUB_OFFLINE=1 HF_HOME="$work/home" CUDA_VISIBLE_DEVICES=

venv/bin/python -W ignore - <<'PY'
import accelerate
import datasets
from datasets import Dataset
from torch.utils.data import DataLoader

ROWS, HELD_OUT, EPOCHS = 1000, 100, 5
print("versions: datasets", datasets.__version__, "accelerate", accelerate.__version__)
print("guess: no row of the validation split is trained in any epoch")
accelerator = accelerate.Accelerator(cpu=True)


def split(shuffle_first):
    """The validation rows, and a prepared loader of the training rows."""
    stream = Dataset.from_dict({"row": list(range(ROWS))}).to_iterable_dataset(num_shards=10)
    if shuffle_first:
        stream = stream.shuffle(seed=7, buffer_size=100)
    held_out, train = stream.take(HELD_OUT), stream.skip(HELD_OUT)
    if not shuffle_first:
        train = train.shuffle(seed=7, buffer_size=100)
    return {each["row"] for each in held_out}, accelerator.prepare(DataLoader(train, batch_size=10))


def leaked(shuffle_first):
    """How many of the validation rows have been trained after each epoch."""
    held_out, loader = split(shuffle_first)
    trained, counts = set(), []
    for _ in range(EPOCHS):
        trained |= {row for batch in loader for row in batch["row"].tolist()}
        counts.append(len(trained & held_out))
    return counts


before, after = leaked(True), leaked(False)
print(f"seen: of {HELD_OUT} validation rows {before} are trained after 1 to {EPOCHS} epochs; split before the shuffle {after}")
assert before[0] == 0 and before[1] > 10 and before[-1] > before[1]
assert after == [0] * EPOCHS
PY
