#!/usr/bin/env bash
# A contrastive loss over gathered rows has a wrong gradient in torch if it is written with einsum, and a right one with @.
#
# Guess: torch.distributed.nn.functional.all_gather is differentiable. How the result is used, and how its gradient lies in
#   memory, makes no difference to values.
# Behaviour: with gloo, the backward pass exchanges the gradients by all_to_all into tensors that are laid out like them.
#   If a gradient is transposed in memory, as einsum's is, the numbers arrive in another order. The loss is right. Written
#   as a product with .t(), the same loss has the right gradient. (Version 2.13 warns that the function will be replaced,
#   by one whose gradients are right in both forms. It does not warn of this.)
# Packages: torch 2.13.0 with gloo, numpy 2.4.6
# Why it matters: in-batch negatives over all ranks are written in both ways. Training goes on with scrambled gradients for
#   the rows of other ranks, a test with one process passes, and a change that is equal on paper changes the result.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > gather.py <<'PY'
import os

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather

RANKS, ROWS, SIZE = 2, 3, 4
FORMS = {
    "a @ b.t()": lambda a, b: a @ b.t(),
    'einsum("id,jd->ij", a, b)': lambda a, b: torch.einsum("id,jd->ij", a, b),
}


def loss_of(form, asked, rows):
    """Cross-entropy of the right row among the rows of all ranks."""
    return torch.nn.functional.cross_entropy(form(asked, rows), torch.arange(ROWS))


def rank_main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    draw = torch.Generator().manual_seed(0)
    every = [torch.randn(ROWS, SIZE, generator=draw) for _ in range(RANKS)]
    asked = [torch.randn(ROWS, SIZE, generator=draw) for _ in range(RANKS)]
    found = {}
    for name, form in FORMS.items():
        own = every[rank].clone().requires_grad_()
        loss = loss_of(form, asked[rank], torch.cat(all_gather(own)))
        loss.backward()
        # one process that has the rows and the questions of all
        alone = [rows.clone().requires_grad_() for rows in every]
        losses = [loss_of(form, each, torch.cat(alone)) for each in asked]
        sum(losses).backward()
        assert torch.equal(loss, losses[rank])
        found[name] = ((own.grad - alone[rank].grad).abs().max() / alone[rank].grad.abs().max()).item()
    if rank == 0:
        for name, error in found.items():
            print(f"seen: {name}: equal losses; the gradient differs from one process by {error:.0%} of its largest element")
        right, wrong = found.values()
        assert right < 1e-5 and wrong > 0.1
    dist.destroy_process_group()


if __name__ == "__main__":
    print("version: torch", torch.__version__)
    print("guess: both forms have the gradient of one process")
    torch.multiprocessing.spawn(rank_main, (os.path.abspath("store"),), RANKS)
PY
GLOO_SOCKET_IFNAME=lo venv/bin/python gather.py 2>/dev/null
