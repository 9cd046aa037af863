#!/usr/bin/env bash
# The gradient of mse_loss of a DTensor is as many times too large as there are ranks; that of l1_loss is right.
#
# Guess: an operation of a DTensor has the value and the gradient that it has on the whole tensor, however rows are divided.
#   mse_loss(a, b) is (a - b).square().mean().
# Behaviour: forwards each rank takes the mean of its rows, and the loss is the average of these. Backwards each rank
#   divides by the number of its own rows, and nothing divides by the number of ranks: with two ranks every gradient is
#   doubled. smooth_l1_loss and huber_loss are alike. Written by hand, or as l1_loss, it is right. With five rows on
#   two ranks the loss itself is wrong too: three rows weigh as much as two.
# Packages: torch 2.13.0 with gloo, numpy 2.4.6
# Why it matters: the logged loss is that of one process, and the rate that was found on one process diverges on eight. With
#   AdamW nothing shows but in the norm, where clipping then acts, and in sums with other losses, which weigh less.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > losses.py <<'PY'
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

RANKS = 2
LOSSES = {
    "by hand": lambda outputs, targets: (outputs - targets).square().mean(),
    "l1_loss": functional.l1_loss,
    "mse_loss": functional.mse_loss,
    "huber_loss": functional.huber_loss,
}


def rank_main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))

    def computed(loss, rows, divided):
        """The loss of some rows, and its gradient."""
        outputs, targets = torch.tensor(rows), torch.zeros(len(rows))
        if divided:
            outputs, targets = (distribute_tensor(part, mesh, [Shard(0)]) for part in (outputs, targets))
        outputs.requires_grad_()
        value = loss(outputs, targets)
        value = value.full_tensor() if divided else value
        value.backward()
        return value.item(), outputs.grad.full_tensor() if divided else outputs.grad

    def ratios(loss, rows):
        """Loss and gradients of the divided rows, by those of the whole ones."""
        (value, gradient), (other, other_gradient) = computed(loss, rows, False), computed(loss, rows, True)
        return [round(ratio, 3) for ratio in (other / value, *(other_gradient / gradient).tolist())]

    even = {name: ratios(loss, [1.0, 1.0, 2.0, 2.0]) for name, loss in LOSSES.items()}
    uneven = ratios(functional.mse_loss, [1.0, 1.0, 1.0, 2.0, 2.0])
    if rank == 0:
        print("loss and gradients of two ranks by those of one process:", even)
        print(f"seen: of mse_loss, four rows: loss times {even['mse_loss'][0]}, gradients times {even['mse_loss'][1]};",
              f"five rows: loss times {uneven[0]}, gradients times {uneven[1]} and {uneven[-1]}")
    assert even["by hand"] == even["l1_loss"] == [1.0] * 5
    assert even["mse_loss"] == even["huber_loss"] == [1.0, 2.0, 2.0, 2.0, 2.0]
    assert uneven == [1.136, 1.667, 1.667, 1.667, 2.5, 2.5]
    dist.destroy_process_group()


if __name__ == "__main__":
    print("version: torch", torch.__version__)
    print("guess: all ratios are 1")
    torch.multiprocessing.spawn(rank_main, (os.path.abspath("store"),), RANKS)
PY
GLOO_SOCKET_IFNAME=lo venv/bin/python -W ignore losses.py
