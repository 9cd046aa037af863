#!/usr/bin/env bash
# WebDataset shuffles its shards once, into the same order for every epoch; with workers, detshuffle does so too.
#
# Guess: shardshuffle draws a new order of the shards for each epoch. With seed=, two runs have the same orders.
# Behaviour: without a seed, one is drawn when the data set is made; shuffling begins from it in every epoch, so all epochs
#   of a run have one order. detshuffle=True counts epochs, but in the worker processes, which a DataLoader starts anew for
#   each epoch: with workers it gives the first order each time, unless persistent_workers is set. ResampledShards with
#   deterministic=True draws the same shards in each epoch for the same reason. shuffle() after it, which mixes rows within
#   a buffer, does differ, even where seed= is given.
# Packages: webdataset 1.0.2, torch 2.13.0, numpy 2.4.6
# Why it matters: rows meet the same neighbours in each epoch and come at the same part of it; with resampling, shards that
#   were not drawn in the first epoch are never trained. A check without workers sees the orders change.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check webdataset==1.0.2 torch==2.13.0 numpy==2.4.6

cat > epochs.py <<'PY'
import importlib.metadata

import webdataset
from torch.utils.data import DataLoader

SHARDS, ROWS, EPOCHS = 8, 4, 4
URLS = [f"{shard}.tar" for shard in range(SHARDS)]


def orders(data, **options):
    """The number of different orders in four epochs, and the shards that the four saw."""
    loader = DataLoader(data, batch_size=None, **options)
    seen = [[int(row[0]) // ROWS for row in loader] for _ in range(EPOCHS)]
    return len({tuple(epoch) for epoch in seen}), len({shard for epoch in seen for shard in epoch})


def shuffled(**options):
    return webdataset.WebDataset(URLS, shardshuffle=SHARDS, **options).decode().to_tuple("cls")


def resampled():
    stages = [webdataset.ResampledShards(URLS, seed=1, deterministic=True), webdataset.tarfile_to_samples()]
    return webdataset.DataPipeline(*stages, webdataset.decode(), webdataset.to_tuple("cls")).with_epoch(SHARDS * ROWS // 2)


if __name__ == "__main__":
    for shard, url in enumerate(URLS):
        with webdataset.TarWriter(url) as writer:
            for row in range(ROWS):
                writer.write({"__key__": f"{shard}-{row}", "cls": shard * ROWS + row})
    print("version: webdataset", importlib.metadata.version("webdataset"))
    print(f"guess: {EPOCHS} epochs have {EPOCHS} orders of the shards, with worker processes and without")
    workers = {"num_workers": 2}
    found = {
        "without a seed": orders(shuffled())[0],
        "with a seed": orders(shuffled(seed=3))[0],
        "detshuffle": orders(shuffled(seed=3, detshuffle=True))[0],
        "detshuffle, 2 workers": orders(shuffled(seed=3, detshuffle=True), **workers)[0],
        "detshuffle, 2 lasting workers": orders(shuffled(seed=3, detshuffle=True), **workers, persistent_workers=True)[0],
        "resampled": orders(resampled()),
        "resampled, 2 workers": orders(resampled(), **workers),
        "shuffle with a seed": orders(shuffled(seed=3).shuffle(8))[0],
    }
    print("seen: orders (and shards, if resampled):", found)
    for name in ("without a seed", "with a seed", "detshuffle, 2 workers"):
        assert found[name] == 1, name
    for name in ("detshuffle", "detshuffle, 2 lasting workers", "shuffle with a seed"):
        assert found[name] == EPOCHS, name
    assert found["resampled"][0] == EPOCHS and found["resampled, 2 workers"][0] == 1
    assert found["resampled, 2 workers"][1] < SHARDS
PY
venv/bin/python -W ignore epochs.py
