"""Mixture of experts: a router, a stack of experts, and the sums that keep them balanced."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.config import TransformerConfig
from workloads.feedforward import FeedForward
from workloads.layers import activation
from workloads.parts import MoE

KERNEL = (torch.float32, torch.bfloat16, torch.float16)
"""Types that the grouped kernel takes."""


class Routes(NamedTuple):
    """Where tokens go: weights and experts are [B, L, top_k]; a dropped token has expert -1.

    extra is the weighted balancing and z-loss in units of the mean loss, fp32 scalar. entropy [2] is the sum over
    tokens of the entropy of their scores, in nats, and how many tokens they are; detached.
    """

    weights: Tensor
    experts: Tensor
    extra: Tensor
    entropy: Tensor


class Router(nn.Module):
    """Scores every expert for every token and keeps top_k, in fp32.

    Gate, groups and bias as in Switch (section 2.1), Mixtral (section 2.1) or DeepSeek-V3 (section 2.1.2).
    `bias` steers the choice of experts but not their weights; `MixtureOfExperts.update` moves it.
    """

    def __init__(self, config: TransformerConfig, moe: MoE) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, config.hidden))
        bias = None if moe.bias_rate is None else torch.empty(moe.experts, dtype=torch.float32)
        self.register_buffer("bias", bias)
        self.bias: Tensor | None

    def forward(self, hidden: Tensor) -> Routes:
        """Routes of hidden [B, L, hidden]."""
        with torch.autocast(hidden.device.type, enabled=False):
            logits = F.linear(hidden.float(), self.weight.float())
        scores = logits.sigmoid() if self.moe.gate == "sigmoid" else logits.softmax(-1)
        choice = scores if self.bias is None else scores + self.bias
        experts = self._among_groups(choice.detach()).topk(self.moe.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(-1, experts)
        if self.moe.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        extra = self._extra(logits, scores, experts)
        return Routes(weights * self.moe.scale, self._within_capacity(experts), extra, _entropy(scores))

    def _among_groups(self, choice: Tensor) -> Tensor:
        """Only experts of the best groups stay; a group is as good as its two best experts."""
        moe = self.moe
        if moe.groups == 1:
            return choice
        grouped = choice.unflatten(-1, (moe.groups, -1))
        value = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        best = value.topk(moe.top_groups, dim=-1, sorted=False).indices
        kept = torch.zeros_like(value, dtype=torch.bool).scatter(-1, best, True)
        return grouped.masked_fill(~kept.unsqueeze(-1), -math.inf).flatten(-2)

    def _within_capacity(self, experts: Tensor) -> Tensor:
        """Tokens of a sequence beyond an expert's capacity are dropped, the last first (Switch, section 2.2).

        The capacity is of the sequence, not of the batch, so that it does not depend on how a batch is cut.
        """
        capacity = self.moe.at_length(experts.shape[1])
        if capacity is None:
            return experts
        chosen = F.one_hot(experts.flatten(1), self.moe.experts)
        place = (chosen.cumsum(1) * chosen).sum(-1).view_as(experts)
        return experts.masked_fill(place > capacity, -1)

    def _extra(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        """Balance: experts * sum over experts of (share of tokens * mean score), mean over the sequences.

        Switch, eq. 4 to 6, taken for each sequence alone (DeepSeek-V3, eq. 17 to 20), so that the sum over
        micro-batches does not depend on how the batch is cut. z-loss: ST-MoE, eq. 5.
        """
        moe = self.moe
        extra = logits.new_zeros(())
        if moe.auxiliary:
            share = F.one_hot(experts, moe.experts).sum(2).float().mean(1) / moe.top_k
            score = (scores / scores.sum(-1, keepdim=True)).mean(1)
            extra = extra + moe.auxiliary * moe.experts * (share * score).sum(-1).mean()
        if moe.z_loss:
            extra = extra + moe.z_loss * logits.logsumexp(-1).square().mean()
        return extra


@torch.no_grad()
def _entropy(scores: Tensor) -> Tensor:
    shares = scores / scores.sum(-1, keepdim=True)
    total = torch.special.entr(shares).sum()
    return torch.stack((total, torch.full_like(total, scores.shape[0] * scores.shape[1])))


class Experts(nn.Module):
    """All experts' feed-forward as stacked weights [experts, out, in].

    Expert parallelism cuts the first dimension and replaces the exchange around `forward`, which takes rows
    sorted by expert and how many rows each expert has.
    """

    def __init__(self, config: TransformerConfig, moe: MoE) -> None:
        super().__init__()
        up = (moe.experts, moe.intermediate, config.hidden)
        self.gate = nn.Parameter(torch.empty(up)) if config.gated else None
        self.up = nn.Parameter(torch.empty(up))
        self.down = nn.Parameter(torch.empty(moe.experts, config.hidden, moe.intermediate))
        self.activation = activation(config.activation)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [R, hidden] sorted by expert, counts int64 [experts] with sum R, to [R, hidden]."""
        if self.gate is None:
            inner = self.activation(grouped_linear(rows, self.up, counts))
        else:
            inner = self.activation(grouped_linear(rows, self.gate, counts))
            inner = inner * grouped_linear(rows, self.up, counts)
        return grouped_linear(inner, self.down, counts)


class MixtureOfExperts(nn.Module):
    """Routed experts and optional shared ones.

    `load` sums the tokens each expert got in training since `update`. `seen` sums, since someone took it, what
    routing is judged by, float64 [experts + 3]: choices dropped, choices of each expert, entropy, tokens. It may
    count a token twice (recomputation does), so only ratios of it say something.
    """

    def __init__(self, config: TransformerConfig, moe: MoE) -> None:
        super().__init__()
        self.moe = moe
        self.router = Router(config, moe)
        self.experts = Experts(config, moe)
        self.shared = FeedForward(config, moe.shared * moe.intermediate) if moe.shared else None
        # No buffer: it is no state of the run, and a buffer would be lost when built on the meta device.
        self.load: Tensor | None = None
        self.seen: Tensor | None = None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[B, L, hidden] to the same, and the extra loss of the router."""
        routes = self.router(hidden)
        flat, experts = hidden.flatten(0, 1), routes.experts.flatten()
        order = experts.argsort(stable=True)
        counts = torch.zeros(self.moe.experts + 1, dtype=torch.int64, device=flat.device)
        counts.index_add_(0, experts + 1, torch.ones_like(experts))
        if self.moe.at_length(hidden.shape[1]) is not None:
            # Dropped tokens have expert -1 and sort first. Without a capacity this wait for the count is saved.
            order = order[counts[0] :]
        if self.training:
            seen = torch.cat((counts.double(), routes.entropy.double()))
            self.seen = seen if self.seen is None else self.seen + seen
        counts = counts[1:]
        rows = self.experts(flat[order // self.moe.top_k], counts)
        # Every row has its own place, so that the sum over a token's experts is in a fixed order on any device.
        placed = rows.new_zeros(len(experts), rows.shape[-1]).index_copy(0, order, rows)
        weights = routes.weights.to(rows.dtype).unsqueeze(-1)
        mixed = (placed.view(*routes.weights.shape, -1) * weights).sum(2)
        if self.moe.bias_rate is not None and self.training:
            self.load = counts if self.load is None else self.load + counts
        return (mixed if self.shared is None else mixed + self.shared(hidden)), routes.extra

    def update(self, load: Tensor) -> None:
        """Move the bias a step towards the experts with less load than the mean (DeepSeek-V3, section 2.1.2).

        load [experts] is `self.load` summed over the ranks that saw other tokens; it starts anew after.
        """
        assert self.router.bias is not None
        assert self.moe.bias_rate is not None
        load = load.float()
        self.router.bias += self.moe.bias_rate * (load.mean() - load).sign()
        self.load = None


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x W_e^T for the rows of each expert: rows [R, in] sorted by expert, weight [experts, out, in]."""
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight = rows.to(dtype), weight.to(dtype)
    aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])
    # torch 2.13 compiles the grouped kernel in bf16 alone.
    usable = (torch.bfloat16,) if torch.compiler.is_compiling() else KERNEL
    if aligned and weight.dtype in usable:
        ends = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
    # The grouped kernel takes neither fp64 nor rows that are no multiple of 16 bytes.
    parts = zip(rows.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([F.linear(part, expert) for part, expert in parts])
