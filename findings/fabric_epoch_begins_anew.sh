#!/usr/bin/env bash
# Lightning Fabric ignores the epoch that is set on its sampler: a run that resumes at epoch 3 reads the order of epoch 0.
#
# Guess: sampler.set_epoch(3), which DistributedSampler asks for, gives the order of epoch 3. Fabric puts that sampler in, so it keeps to it.
# Behaviour: the loader counts how often it was iterated in this process, and sets that count as the epoch at the beginning of each
#   iteration, over whatever was set. After a resume the count is 0: the orders of the first epochs come again.
# Packages: lightning-fabric 2.6.6, torch 2.13.0 with gloo, numpy 2.4.6
# Why it matters: a run that is interrupted once an epoch reads one order for ever. One that resumes in the middle of epoch 3 and passes
#   over the first half passes over the first half of epoch 0's order: some rows train twice, and others not at all.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check lightning-fabric==2.6.6 torch==2.13.0 numpy==2.4.6
export CUDA_VISIBLE_DEVICES=

cat > epochs.py <<'PY'
import importlib.metadata

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset


def main(fabric):
    data = TensorDataset(torch.arange(24))

    def new_loader():
        return fabric.setup_dataloaders(DataLoader(data, batch_size=2, shuffle=True))

    def rows(loader):
        return [row for (batch,) in loader for row in batch.tolist()]

    loader = new_loader()
    epochs = [rows(loader) for _ in range(4)]
    resumed = new_loader()
    orders = []
    for epoch in (2, 3):
        resumed.sampler.set_epoch(epoch)
        orders.append(epochs.index(rows(resumed)))
    if fabric.global_rank == 0:
        print(f"seen: set_epoch(2) and set_epoch(3) after a resume give the orders of epochs {orders[0]} and {orders[1]}")
    assert len({tuple(order) for order in epochs}) == 4
    assert orders == [0, 1]


if __name__ == "__main__":
    print("version: lightning-fabric", importlib.metadata.version("lightning-fabric"))
    print("guess: the orders of epochs 2 and 3")
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn")
    fabric.launch(main)
PY
GLOO_SOCKET_IFNAME=lo venv/bin/python -W ignore epochs.py 2>/dev/null
