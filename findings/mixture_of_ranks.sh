#!/usr/bin/env bash
# A distributed checkpoint of torch holds one tensor of a module from one rank and the next tensor from another.
#
# Guess: what every rank has whole is written once, by one rank. Where ranks differ, as in the statistics of BatchNorm under
#   data parallelism, the checkpoint holds those of rank 0, as with torch.save on rank 0.
# Behaviour: each entry that several ranks hold is given to the rank with the fewest bytes so far. The mean of a BatchNorm
#   comes from one rank, its variance from a second, and its count from a third: a state that no rank had. The state of a
#   generator and a plain number, too, are some rank's. Nothing is compared and nothing is said. Only
#   DefaultSavePlanner(dedup_save_to_lowest_rank=True), which is not the default, takes all of it from rank 0.
# Packages: torch 2.13.0 with gloo, numpy 2.4.6
# Why it matters: mean and variance of different rows normalise evaluations after a resume, all ranks go on with the random
#   numbers of one of them, and a change of any tensor's size changes which rank that is.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > ranks.py <<'PY'
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

RANKS = 3


def filled(value):
    """The state of a BatchNorm, and of a generator, in which every number is the same."""
    norm = torch.nn.BatchNorm1d(4)
    state = {**norm.state_dict(), "generator": torch.empty(5056, dtype=torch.uint8), "step": value}
    for tensor in state.values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(value)
    return state


def rank_main(rank, store, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)

    def origin(folder, planner=None):
        """The rank that each entry was saved by."""
        dcp.save(filled(rank), checkpoint_id=folder, planner=planner)
        loaded = filled(9)
        dcp.load(loaded, checkpoint_id=folder)
        return {name: int(torch.as_tensor(value).flatten()[0]) for name, value in loaded.items()}

    found = origin(folder)
    asked = origin(f"{folder}-asked", dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    if rank == 0:
        print("with the option:", asked)
        print("seen: the rank that each was saved by:", found)
    assert set(asked.values()) == {0}
    assert found == {
        "weight": 0, "bias": 1, "running_mean": 2, "running_var": 0, "num_batches_tracked": 1, "generator": 2, "step": 1
    }
    dist.destroy_process_group()


if __name__ == "__main__":
    print("version: torch", torch.__version__)
    print("guess: all of it was saved by rank 0")
    torch.multiprocessing.spawn(rank_main, (os.path.abspath("store"), os.path.abspath("saved")), RANKS)
PY
GLOO_SOCKET_IFNAME=lo venv/bin/python -W ignore ranks.py
