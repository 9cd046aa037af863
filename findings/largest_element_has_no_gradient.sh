#!/usr/bin/env bash
# The gradient through amax of a DTensor is NaN unless the first rank holds the largest element.
#
# Guess: amax, and the norm of order infinity, of a DTensor have the gradient that they have on the whole tensor: 1 for
#   the largest element and 0 for all others, on whichever rank it lies.
# Behaviour: amax divides its gradient by the number of elements that are as large, and what is counted are the first rank's. If
#   another rank holds the largest, that is division by 0: its gradient is infinite, and that of all other elements, on all
#   ranks, is NaN. If all elements are equal, the gradient is too large by the number of ranks. max(), and amax along a dimension
#   that is not divided, are right. The value is right in all cases.
# Packages: torch 2.13.0 with gloo, numpy 2.4.6
# Why it matters: fake quantisation with one scale a tensor divides by abs().amax() / 127. Under FSDP2 or tensor parallelism it trains until
#   the largest weight is on another rank than the first, and then all weights are NaN. The same code trains on one process.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > largest.py <<'PY'
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 4
LOSSES = {
    "max": lambda x: x.max(),
    "amax of each row": lambda x: x.amax(1).sum(),
    "amax": lambda x: x.amax(),
    "norm of order infinity": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "quantised": lambda x: (x / (x.amax() / 127)).sum(),
}


def rank_main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))

    def gradients(loss, weights):
        """The gradient of the whole tensor, and of the divided one."""
        whole, divided = weights.clone().requires_grad_(), distribute_tensor(weights, mesh, [Shard(0)]).requires_grad_()
        value, divided_value = loss(whole), loss(divided).full_tensor()
        assert torch.allclose(value, divided_value)
        value.backward()
        divided_value.backward()
        return whole.grad, divided.grad.full_tensor()

    seen = {}
    for name, loss in LOSSES.items():
        seen[name] = ""
        for holder in range(RANKS):
            weights = torch.rand(RANKS, 6, generator=torch.Generator().manual_seed(0))
            weights[holder, 2] = 2.0
            gradient, divided = gradients(loss, weights)
            seen[name] += "R" if torch.allclose(gradient, divided) else "N" if divided.isnan().any() else "?"
    gradient, divided = gradients(LOSSES["amax"], torch.ones(RANKS, 6))
    times = round((divided / gradient).max().item(), 3)
    if rank == 0:
        print("R: the gradient is right, N: it has NaN, if rank 0, 1, 2, 3 holds the largest element:", seen)
        print(f"seen: through amax it is NaN on {seen['amax'].count('N')} of {RANKS} places; if all are equal it is {times} times too large")
    assert seen == {
        "max": "RRRR", "amax of each row": "RRRR", "amax": "RNNN", "norm of order infinity": "RNNN", "quantised": "RNNN",
    }
    assert times == RANKS
    dist.destroy_process_group()


if __name__ == "__main__":
    print("version: torch", torch.__version__)
    print("guess: all gradients are right")
    torch.multiprocessing.spawn(rank_main, (os.path.abspath("store"),), RANKS)
PY
GLOO_SOCKET_IFNAME=lo venv/bin/python -W ignore largest.py
