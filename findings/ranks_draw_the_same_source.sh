#!/usr/bin/env bash
# All ranks of a mixture in datasets draw from the same source at every step, if the files divide among them.
#
# Guess: with interleave_datasets(probabilities=[0.5, 0.5]) and split_dataset_by_node each rank draws its own sources. Of
#   the global batches of four ranks with a row each, one in eight has rows of one source alone.
# Behaviour: the draws follow from the seed alone, and each rank has a copy of the generator. Where the files divide among
#   the ranks, all ranks have the same sequence of sources, so every global batch is of one source. shuffle() and set_epoch
#   change the sequence, on all ranks alike. With a file less, ranks share out the rows of one stream, and the mixture is
#   right. Worker processes of one rank do differ.
# Packages: datasets 5.2.0
# Why it matters: steps alternate between a batch of code and a batch of prose. The gradient's noise does not fall with the
#   number of ranks, a loss by step jumps, and the repair that the documentation suggests for speed, as many files as ranks
#   divide, is what brings it about.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check datasets==5.2.0
export HF_HUB_OFFLINE=1 HF_HOME="$work/home" HF_DATASETS_DISABLE_PROGRESS_BARS=1

venv/bin/python - <<'PY'
import datasets
from datasets import IterableDataset, interleave_datasets
from datasets.distributed import split_dataset_by_node

RANKS, STEPS = 4, 400


def rows(files, source):
    for file in files:
        for row in range(200):
            yield {"source": source, "row": (file, row)}


def of_one_source(files, shuffled=False, epoch=0):
    """The share of steps in which all ranks have rows of the same source."""
    sources = [IterableDataset.from_generator(rows, gen_kwargs={"files": list(range(files)), "source": name}) for name in "ab"]
    mixture = interleave_datasets(sources, probabilities=[0.5, 0.5], seed=1)
    if shuffled:
        mixture = mixture.shuffle(seed=2, buffer_size=50)
    ranks = []
    for rank in range(RANKS):
        part = split_dataset_by_node(mixture, rank=rank, world_size=RANKS)
        part.set_epoch(epoch)
        ranks.append(list(part.take(STEPS))[:STEPS])
    assert len({(row["source"], *row["row"]) for rank in ranks for row in rank}) == sum(map(len, ranks))  # no row twice
    steps = list(zip(*([row["source"] for row in rank] for rank in ranks)))
    return sum(len(set(step)) == 1 for step in steps) / len(steps)


print("version: datasets", datasets.__version__)
print("guess: one step in eight, 0.125, has rows of one source alone, however many files there are")
found = {
    "8 files a source": of_one_source(8),
    "8 files, shuffled": of_one_source(8, shuffled=True),
    "8 files, shuffled, epoch 3": of_one_source(8, shuffled=True, epoch=3),
    "7 files a source": of_one_source(7),
}
print("seen:", found)
assert all(share == 1 for name, share in found.items() if name.startswith("8")), found
assert 0.05 < found["7 files a source"] < 0.25, found
PY
