#!/usr/bin/env bash
# DistributedDataParallel gives other gradients in its first backward pass than in the next, from the same weights and rows.
#
# Guess: gradients are a function of weights and rows. Computing a step again gives the same bits on a CPU with one thread.
# Behaviour: after the first backward pass DDP orders its buckets anew, by the order in which gradients came. The sum over
#   four ranks adds an element's four terms in an order that depends on where the element lies in its bucket. A third of
#   the elements differ in the last bit between the first pass and the second; from the second on all passes agree.
# Packages: torch 2.13.0 with gloo, numpy 2.4.6
# Why it matters: a run that resumes begins with a first pass again, so it does not have the bits of the run that never
#   stopped; a check that computes a step twice to find broken hardware raises a false alarm at the first step.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > passes.py <<'PY'
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANKS, PASSES = 4, 4


def rank_main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    parallel = DistributedDataParallel(model)
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    seen = []
    for _ in range(PASSES):
        parallel.zero_grad()
        parallel(rows).square().mean().backward()
        seen.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).clone())
    if rank == 0:
        moved = [int((gradient != seen[-1]).sum()) for gradient in seen]
        print(f"seen: of {len(seen[-1])} elements {moved} differ from pass {PASSES} in pass 1 to {PASSES}")
        assert moved[0] > 1000 and moved[1:] == [0] * (PASSES - 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    print("version: torch", torch.__version__)
    print("guess: four passes from the same weights and rows give the same gradients")
    torch.multiprocessing.spawn(rank_main, (os.path.abspath("store"),), RANKS)
PY
GLOO_SOCKET_IFNAME=lo venv/bin/python passes.py
