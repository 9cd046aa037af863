"""Expert parallelism: experts are shared out over data-parallel ranks, and tokens travel to them.

Lepikhin et al., 2021, GShard (section 3.2): an all-to-all takes rows to the ranks that hold their experts and
another one takes the results back. Nothing is padded; each rank sends as many rows as were routed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.parallel.collectives import exchange
from orchestrator.parallel.mesh import ProcessGroup
from workloads.model.moe import Experts


def apply_expert(model: nn.Module, group: ProcessGroup) -> None:
    """Wrap the experts of every layer, whose parameters are sharded already, in the exchange of tokens."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.forward = Exchange(module, group).forward  # type: ignore[method-assign]


def rows_by_rank(sent: Tensor, received: Tensor, rows: Tensor) -> tuple[list[int], list[int]]:
    """How many of `rows` go to each rank, and how many rows come from each, of counts [ranks, experts of a rank].

    A trace, in which counts have no values, puts a function in this one's place that goes by the number of `rows`."""
    to, come = torch.stack((sent.sum(1), received.sum(1))).tolist()  # one wait for the device
    return to, come


class Exchange:
    """All-to-all of rows to the ranks of their experts and back."""

    def __init__(self, experts: Experts, group: ProcessGroup) -> None:
        self._local, self._group = experts.forward, group

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """As `Experts.forward`: rows [R, hidden] sorted by expert, counts [all experts]."""
        sent = counts.view(self._group.size, -1)
        received = torch.empty_like(sent)
        with self._group.communicating():
            dist.all_to_all_single(received, sent.contiguous(), group=self._group.handle)
        to, come = rows_by_rank(sent, received, rows)
        arrived = exchange(rows, come, to, self._group)
        # They come by rank and, of each rank, by expert; experts want them by expert.
        local = torch.arange(received.shape[1], device=rows.device).repeat(self._group.size)
        order = local.repeat_interleave(received.flatten(), output_size=sum(come)).argsort(stable=True)
        done = self._local(arrived[order], received.sum(0))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return exchange(done[back], to, come, self._group)
