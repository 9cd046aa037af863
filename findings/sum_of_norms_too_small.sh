#!/usr/bin/env bash
# The sum of column norms of a DTensor is too small; their mean, and the sum of twice the norms, are right.
#
# Guess: x.norm(dim=0).sum() is a sum of numbers that are known on all ranks, so it is that of the whole tensor.
# Behaviour: along a divided dimension norm leaves a reduction to be done: the root of the sum of squares over ranks. sum() goes
#   before it, as if the two could change places: each rank adds up its own norms, and the root of the sum of the squares of these sums is
#   smaller. Any operation between the two brings the reduction forward, and then the value is right. The gradient is right too.
# Packages: torch 2.13.0 with gloo, numpy 2.4.6
# Why it matters: this is the penalty of a group lasso, by which whole channels are pruned. The reported loss falls with the number of ranks
#   while the gradient does not, so losses of two layouts differ for equal weights, and a search compares unequal things.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > norms.py <<'PY'
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 4
PENALTIES = {
    "sum": lambda x: x.norm(dim=0).sum(),
    "mean": lambda x: x.norm(dim=0).mean(),
    "sum of twice the norms": lambda x: (2 * x.norm(dim=0)).sum(),
}


def rank_main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    weights = torch.eye(8).repeat(2, 1)  # 16 rows and 8 columns; each column has two ones

    def computed(penalty, divided):
        rows = (distribute_tensor(weights, mesh, [Shard(0)]) if divided else weights.clone()).requires_grad_()
        value = penalty(rows)
        value = value.full_tensor() if divided else value
        value.backward()
        return value.item(), rows.grad.full_tensor() if divided else rows.grad

    seen = {}
    for name, penalty in PENALTIES.items():
        (value, gradient), (divided, divided_gradient) = computed(penalty, False), computed(penalty, True)
        seen[name] = round(divided / value, 3)
        assert torch.allclose(gradient, divided_gradient)
    if rank == 0:
        print("values by those of the whole tensor:", seen)
        print(f"seen: on {RANKS} ranks the sum of the norms is {seen['sum']} of the right one")
    assert seen == {"sum": 0.707, "mean": 1.0, "sum of twice the norms": 1.0}
    dist.destroy_process_group()


if __name__ == "__main__":
    print("version: torch", torch.__version__)
    print("guess: all values are those of the whole tensor")
    torch.multiprocessing.spawn(rank_main, (os.path.abspath("store"),), RANKS)
PY
GLOO_SOCKET_IFNAME=lo venv/bin/python -W ignore norms.py
