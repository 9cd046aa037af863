#!/usr/bin/env bash
# accelerate's gather_for_metrics drops real rows, or keeps repeated ones, if a sampler draws a part of the data set.
#
# Guess: gather_for_metrics drops exactly the rows that were repeated to fill the last batch of all ranks.
# Behaviour: how many rows it keeps of the last batch follows from the length of the data set, not from the number of rows that
#   the sampler draws. With SubsetRandomSampler over 7 rows, two ranks and batches of 2, one real row is lost if the data set has
#   10 rows, and a row counts twice if it has 12. As Subset(data, rows) the same evaluation is right.
# Packages: accelerate 1.15.0, torch 2.13.0 with gloo, numpy 2.4.6
# Why it matters: evaluations of a part of the held-out rows, to save time, depend on the size of the whole and the number of ranks,
#   and a comparison of two models on "the same" rows is not one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
export CUDA_VISIBLE_DEVICES=

cat > evaluation.py <<'PY'
import os
import socket

import accelerate
import torch
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

RANKS, DRAWN = 2, 7


def rank_main(rank, port):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    accelerator = accelerate.Accelerator(cpu=True)

    def gathered(loader):
        return sorted(row for (batch,) in accelerator.prepare(loader) for row in accelerator.gather_for_metrics(batch).tolist())

    seen = {}
    for rows in (10, 12):
        data = TensorDataset(torch.arange(rows))
        seen[rows] = gathered(DataLoader(data, 2, sampler=SubsetRandomSampler(range(DRAWN))))
        assert gathered(DataLoader(Subset(data, range(DRAWN)), 2)) == list(range(DRAWN))
    if rank == 0:
        for rows, kept in seen.items():
            print(f"rows 0 to {DRAWN - 1} of {rows}: {len(kept)} rows are kept, {len(set(kept))} of them different: {kept}")
        print(f"seen: {len(seen[10])} rows and {len(seen[12])} rows in place of {DRAWN}")
    assert len(seen[10]) == len(set(seen[10])) == DRAWN - 1
    assert len(seen[12]) == DRAWN + 1 and len(set(seen[12])) == DRAWN
    accelerator.end_training()


if __name__ == "__main__":
    print("version: accelerate", accelerate.__version__)
    print(f"guess: the {DRAWN} rows that the sampler draws are kept, each once")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(rank_main, (port,), RANKS)
PY
GLOO_SOCKET_IFNAME=lo venv/bin/python -W ignore evaluation.py
