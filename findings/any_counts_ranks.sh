#!/usr/bin/env bash
# any() of a DTensor counts the ranks that have one, where it is summed or multiplied.
#
# Guess: (x != 0).any(0).sum() of a DTensor is the number of columns that are not all zero, as for the whole tensor. all() does
#   the same.
# Behaviour: any() leaves a sum over ranks to be done, without saying that the summands are true or false. As a truth value it is
#   right. Made a number, it is the number of ranks on which it is true: of five live columns eight are counted, one tensor
#   with NaN counts twice, and a mask of columns multiplies by 2. all() is right.
# Packages: torch 2.13.0 with gloo, numpy 2.4.6
# Why it matters: live channels for structured pruning, experts that any token reached, and tensors with NaN are counted so.
#   With one process the count is right; with eight, a channel that lives on all ranks counts eight times.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > counts.py <<'PY'
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 2
WEIGHTS = torch.tensor([
    [1.0, 1.0, 1.0, 1.0, 0.0, 0.0],
    [0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
    [1.0, 1.0, 1.0, 0.0, 0.0, 0.0],
    [0.0, 0.0, 0.0, 0.0, 2.0, 0.0],
])
COUNTS = {
    "live columns": lambda x: (x != 0).any(0).sum(),
    "is any weight 1": lambda x: (x == 1).any().float(),
    "sum of the columns that are live": lambda x: ((x != 0).any(0) * x).sum(),
    "columns below 3": lambda x: (x < 3).all(0).sum(),
}


def rank_main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    divided = distribute_tensor(WEIGHTS, init_device_mesh("cpu", (RANKS,)), [Shard(0)])
    seen = {name: (count(WEIGHTS).item(), count(divided).full_tensor().item()) for name, count in COUNTS.items()}
    truth = bool((divided == 1).any().full_tensor())
    if rank == 0:
        print("whole and divided:", seen)
        print(f"seen: {seen['live columns'][0]} columns are live, and {seen['live columns'][1]} are counted")
    assert truth is True
    assert seen == {
        "live columns": (5, 8),
        "is any weight 1": (1.0, 2.0),
        "sum of the columns that are live": (10.0, 17.0),
        "columns below 3": (6, 6),
    }
    dist.destroy_process_group()


if __name__ == "__main__":
    print("version: torch", torch.__version__)
    print("guess: both numbers of each pair are the same")
    torch.multiprocessing.spawn(rank_main, (os.path.abspath("store"),), RANKS)
PY
GLOO_SOCKET_IFNAME=lo venv/bin/python -W ignore counts.py
