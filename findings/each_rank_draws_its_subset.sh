#!/usr/bin/env bash
# In Lightning Fabric each rank draws a random subset of its own, so some rows come twice in an epoch and others never.
#
# Guess: a loader with SubsetRandomSampler or WeightedRandomSampler is divided among the ranks: together they read what the sampler drew,
#   each row once. RandomSampler(num_samples=12) keeps to 12 rows.
# Behaviour: every rank lets the sampler draw by its own random numbers, and takes every second row of its own draw. If ranks have different
#   seeds, as they are given for dropout and augmentation, the draws differ: of 12 rows some come twice and others not at all. A
#   RandomSampler is replaced by one over the whole data set, and num_samples is lost. A generator with the same seed on all ranks
#   is the remedy for the first.
# Packages: lightning-fabric 2.6.6, torch 2.13.0 with gloo, numpy 2.4.6
# Why it matters: about a quarter of a subset is left out of each epoch on two ranks, and more on eight. A test with one seed for all ranks
#   passes. An epoch that was to be an eighth of the data is all of it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check lightning-fabric==2.6.6 torch==2.13.0 numpy==2.4.6
export CUDA_VISIBLE_DEVICES=

cat > subset.py <<'PY'
import importlib.metadata

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

ROWS, DRAWN = 480, 240


def main(fabric):
    data = TensorDataset(torch.arange(ROWS))

    def different(sampler, by_rank):
        """How many rows the ranks read together in an epoch, and how many of them are different."""
        torch.manual_seed(17 + by_rank * fabric.global_rank)
        loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, sampler=sampler))
        parts = [None] * fabric.world_size
        dist.all_gather_object(parts, [row for (batch,) in loader for row in batch.tolist()])
        rows = sum(parts, [])
        return len(rows), len(set(rows))

    def subset(generator=None):
        return SubsetRandomSampler(range(DRAWN), generator)

    seen = {
        "a subset, one seed": different(subset(), 0),
        "a subset, a seed for each rank": different(subset(), 1),
        "weighted, a seed for each rank": different(WeightedRandomSampler([1.0] * ROWS, DRAWN, replacement=False), 1),
        "a subset, with a generator": different(subset(torch.Generator().manual_seed(3)), 1),
        "num_samples": different(RandomSampler(data, num_samples=DRAWN), 0),
    }
    if fabric.global_rank == 0:
        print("rows, and different ones:", seen)
        print(f"seen: with a seed for each rank {seen['a subset, a seed for each rank'][1]} of {DRAWN} rows are read;",
              f"num_samples={DRAWN} reads {seen['num_samples'][0]}")
    assert seen["a subset, one seed"] == seen["a subset, with a generator"] == (DRAWN, DRAWN)
    for case in ("a subset, a seed for each rank", "weighted, a seed for each rank"):
        assert seen[case][0] == DRAWN and seen[case][1] < 0.95 * DRAWN
    assert seen["num_samples"] == (ROWS, ROWS)


if __name__ == "__main__":
    print("version: lightning-fabric", importlib.metadata.version("lightning-fabric"))
    print(f"guess: {DRAWN} rows and {DRAWN} different ones in all cases")
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn")
    fabric.launch(main)
PY
GLOO_SOCKET_IFNAME=lo venv/bin/python -W ignore subset.py 2>/dev/null
