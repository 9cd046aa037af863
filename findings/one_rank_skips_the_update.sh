#!/usr/bin/env bash
# Under tensor parallelism an overflow on one rank makes that rank alone skip the update, depending on the order of parameter groups.
#
# Guess: GradScaler and DTensor work together: if the gradient of any shard overflows, no rank updates, and the scale is
#   halved on all of them. The order of the groups in the optimizer means nothing.
# Behaviour: for a list of gradients, DTensor reduces the flag by the placement of the first gradient alone. If a sharded
#   weight is first, all ranks learn of the overflow. If a replicated one is first, such as the bias of a RowwiseParallel layer
#   in a group without decay, nothing is reduced: the rank with the overflow skips, the others update. From then on
#   the replicated bias differs between ranks, and so do the loss scales. Nothing is said.
# Packages: torch 2.13.0 with gloo, numpy 2.4.6
# Why it matters: overflows are part of fp16 training, since the scale is doubled every 2,000 steps until one occurs. After the first of
#   them the ranks hold shards of two different models, and the loss goes on without a jump that anybody would look into.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > overflow.py <<'PY'
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 2


def step(mesh, no_decay_first):
    """One step of two divided layers. Returns whether this rank updated, the next scale, and the bias that all hold whole."""
    torch.manual_seed(0)
    up, down = nn.Linear(4, 8), nn.Linear(8, 4)
    with torch.no_grad():
        down.weight[:, 4:] *= 1e20  # so that the gradient of rank 1's half of `up` overflows and rank 0's does not
        down.weight[:, :4] *= 1e-6
    model = nn.Sequential(up, nn.Tanh(), down)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    groups = [
        {"params": [up.weight, up.bias, down.weight], "weight_decay": 0.1},
        {"params": [down.bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups[::-1] if no_decay_first else groups, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)  # float32 has the place of float16 here
    before = up.weight.to_local().clone()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    finite = bool(up.weight.grad.to_local().isfinite().all())
    scaler.step(optimizer)
    scaler.update()
    moved = not torch.equal(before, up.weight.to_local())
    return finite, moved, scaler.get_scale() / 2.0**100, down.bias.to_local().tolist()


def rank_main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    seen = {}
    for no_decay_first in (False, True):
        seen[no_decay_first] = [None] * RANKS
        dist.all_gather_object(seen[no_decay_first], step(mesh, no_decay_first))
    if rank == 0:
        for no_decay_first, ranks in seen.items():
            order = "the group without decay first" if no_decay_first else "the sharded group first"
            print(f"{order}: gradients of the ranks are finite {[each[0] for each in ranks]},",
                  f"updated {[each[1] for each in ranks]}, scale times {[each[2] for each in ranks]}")
        print("seen: with the sharded group first no rank updates; with the other one first, rank 0 updates and rank 1 does not")
    assert [each[0] for each in seen[True]] == [each[0] for each in seen[False]] == [True, False]
    assert [each[1:3] for each in seen[False]] == [(False, 0.5), (False, 0.5)]
    assert [each[1:3] for each in seen[True]] == [(True, 1.0), (False, 0.5)]
    assert seen[False][0][3] == seen[False][1][3] and seen[True][0][3] != seen[True][1][3]
    dist.destroy_process_group()


if __name__ == "__main__":
    print("version: torch", torch.__version__)
    print("guess: no rank updates, in whatever order the groups are")
    torch.multiprocessing.spawn(rank_main, (os.path.abspath("store"),), RANKS)
PY
GLOO_SOCKET_IFNAME=lo venv/bin/python -W ignore overflow.py
