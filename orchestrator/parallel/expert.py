"""Expert parallelism: data-parallel ranks divide the experts, and tokens travel to them.

One all-to-all sends rows to the ranks that hold their experts, and a second one returns the results (Lepikhin et al.,
2021, GShard, section 3.2). Nothing is padded: each rank sends exactly the rows that were routed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.parallel.collectives import exchange
from orchestrator.parallel.mesh import ProcessGroup
from workloads.model.moe import Experts


def apply_expert(model: nn.Module, group: ProcessGroup) -> None:
    """Wrap the experts of every layer in the exchange of tokens. Their parameters must be cut to this rank already.

    Args:
        model: a stage of the model; changed in place.
        group: the ranks that divide the experts.
    """
    for module in model.modules():
        if isinstance(module, Experts):
            module.forward = Exchange(module, group).forward  # type: ignore[method-assign]


def rows_by_rank(sent: Tensor, received: Tensor, rows: Tensor) -> tuple[list[int], list[int]]:
    """Return how many rows go to each rank and how many come from each.

    A trace replaces this function by one that assumes equal loads, because fake tensors have no values.

    Args:
        sent: rows that this rank has for each expert, int64 [ranks, experts of a rank].
        received: rows that each rank has for this rank's experts, of the same shape.
        rows: the rows to send, [R, hidden]. Only a trace reads their number.
    """
    outgoing, incoming = torch.stack((sent.sum(1), received.sum(1))).tolist()  # one synchronisation for both
    return outgoing, incoming


class Exchange:
    """Sends rows to the ranks of their experts, applies the experts there, and returns the results."""

    def __init__(self, experts: Experts, group: ProcessGroup) -> None:
        self._local = experts.forward
        self._group = group

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return [R, hidden] like `Experts.forward`, for rows [R, hidden] sorted by expert and counts [all experts].

        Args:
            rows: the tokens' hidden states, once for each chosen expert, [R, hidden].
            counts: rows of each expert, int64 [all experts]; they sum to R.
        """
        # [ranks, experts of a rank]: experts are numbered by rank, rank 0 has the first ones.
        sent = counts.view(self._group.size, -1)
        received = torch.empty_like(sent)
        # The numbers must travel first: without padding a receiver cannot know how much memory the rows need.
        self._group.sent(sent)
        with self._group.communicating():
            dist.all_to_all_single(received, sent.contiguous(), group=self._group.handle)
        self._group.received(received)
        outgoing, incoming = rows_by_rank(sent, received, rows)
        # Differentiable: its backward pass is the all-to-all with the sizes swapped, so each gradient returns to its
        # token's rank.
        arrived = exchange(rows, incoming, outgoing, self._group)
        # Rows arrive sorted by (rank, expert), and the experts need them sorted by (expert, rank). Each arrived row
        # gets the number of its expert; a stable sort by it keeps the ranks in order.
        experts = torch.arange(received.shape[1], device=rows.device).repeat(self._group.size)
        order = experts.repeat_interleave(received.flatten(), output_size=sum(incoming)).argsort(stable=True)
        # [rows that arrived, hidden]. The sum over ranks counts the rows of each local expert, as `Experts.forward`
        # needs them.
        results = self._local(arrived[order], received.sum(0))
        # The inverse permutation by one scatter; a second argsort would cost R log R.
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return exchange(results[inverse], outgoing, incoming, self._group)
