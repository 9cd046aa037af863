"""Collectives with a backward pass do not depend on how a tensor or its gradient lies in memory.

Those of torch do: see findings/gathered_gradient_is_scrambled.sh.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.parallel import collectives
from orchestrator.parallel.mesh import ProcessGroup

RANKS = 2
FUNCTIONS: dict[str, Callable[[Tensor, ProcessGroup], Tensor]] = {
    "copy": collectives.copy,
    "reduce": collectives.reduce,
    "exchange": lambda x, group: collectives.exchange(x, [2, 2], [2, 2], group),
    **{
        f"{function.__name__} {dim}": lambda x, group, function=function, dim=dim: function(x, dim, group)
        for function in (collectives.gather, collectives.scatter, collectives.split, collectives.join)
        for dim in (0, 1)
    },
}


def turned(x: Tensor) -> Tensor:
    """Return the same numbers, laid out by columns."""
    return x.t().contiguous().t()


def results(
    function: Callable[[Tensor, ProcessGroup], Tensor],
    group: ProcessGroup,
    by_columns: bool,
    turned_back: bool,
) -> tuple[Tensor, Tensor]:
    """Return the result and the gradient of the input, whose layouts in memory are given."""
    draw = torch.Generator().manual_seed(group.index)
    x = torch.randn(4, 6, generator=draw).requires_grad_()
    out = function(turned(x) if by_columns else x, group)
    weights = torch.randn(out.shape, generator=draw)
    (gradient,) = torch.autograd.grad(out, x, turned(weights) if turned_back else weights)
    return out.detach(), gradient


def rank_main(rank: int, store: str) -> None:
    """Compare all layouts on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    group = ProcessGroup(tuple(range(RANKS)), rank, dist.group.WORLD)
    for name, function in FUNCTIONS.items():
        plain = results(function, group, by_columns=False, turned_back=False)
        for by_columns, turned_back in ((True, False), (False, True), (True, True)):
            found = results(function, group, by_columns, turned_back)
            for part, ours, theirs in zip(("result", "gradient"), found, plain, strict=True):
                assert torch.equal(ours, theirs), (name, part, by_columns, turned_back)
    dist.destroy_process_group()


@pytest.mark.slow
def test_the_layout_in_memory_changes_no_result_and_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(rank_main, (str(tmp_path / "store"),), RANKS)
