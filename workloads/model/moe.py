"""Mixture of experts: a router, a stack of experts, and the losses that balance them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.model.casts import cast
from workloads.model.config import TransformerConfig
from workloads.model.feedforward import FeedForward
from workloads.model.layers import activation, joined
from workloads.model.parts import MoE

KERNEL = (torch.float32, torch.bfloat16, torch.float16)
"""Types that the grouped kernel supports."""
DROPPED, PADDING = -1, -2
"""Stand in for an expert's number: DROPPED for a token beyond the expert's capacity, PADDING for padding."""
ROWS = 16
"""On a CPU in 16 bits each expert's rows are padded to a multiple of this number."""


class Routes(NamedTuple):
    """The experts of each token.

    Attributes:
        weights: weight of each chosen expert, [B, L, top_k].
        experts: number of each chosen expert, [B, L, top_k]; -1 if the token is dropped, -2 for padding.
        extra: weighted balancing loss and z-loss in units of the mean loss, fp32 scalar; without padding.
        entropy: sum over tokens of the entropy of their scores in nats, and the number of tokens, [2]; detached and
            without padding.
    """

    weights: Tensor
    experts: Tensor
    extra: Tensor
    entropy: Tensor


class Router(nn.Module):
    """Scores every expert for every token and keeps top_k, in fp32.

    Gate, groups and bias are those of Switch (section 2.1), Mixtral (section 2.1) or DeepSeek-V3 (section 2.1.2).
    `bias` changes the choice of experts but not their weights, and `MixtureOfExperts.update` adjusts it. `logit_bias`
    is trained.
    """

    def __init__(self, config: TransformerConfig, moe: MoE) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, config.hidden))
        self.logit_bias = nn.Parameter(torch.empty(moe.experts)) if moe.bias else None
        bias = None if moe.bias_rate is None else torch.empty(moe.experts, dtype=torch.float32)
        self.register_buffer("bias", bias)
        self.bias: Tensor | None

    def forward(self, hidden: Tensor, real: Tensor | None = None) -> Routes:
        """Return the experts of each token of `hidden` [B, L, hidden].

        `real` is a bool mask [B, L], False at padding; None without padding.

        Args:
            hidden: [B, L, hidden].
            real: bool [B, L]; None without padding.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if self.logit_bias is None else self.logit_bias.float()
            # fp32, outside of autocast: rounding to bf16 changes which experts win, and the change would depend on the
            # layout (Switch, section 2.4).
            logits = F.linear(hidden.float(), self.weight.float(), bias)
        scores = logits.sigmoid() if self.moe.gate == "sigmoid" else logits.softmax(-1)
        # The bias steers the choice only. If it also weighed the outputs, balancing would change what the model
        # computes (DeepSeek-V3, section 2.1.2).
        choice = scores if self.bias is None else scores + self.bias
        # topk has no useful gradient: the router learns through `weights` alone.
        experts = self._among_groups(choice.detach()).topk(self.moe.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(-1, experts)
        if self.moe.normalise:
            # 1e-20 as DeepSeek's reference code: sigmoid scores can all round to 0.
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        extra = self._extra(logits, scores, experts, real)
        # After the balancing loss, which counts what the router wanted, dropped or not.
        routed = self._within_capacity(experts, real)
        if real is not None:
            routed = routed.masked_fill(~real.unsqueeze(-1), PADDING)
        return Routes(weights * self.moe.scale, routed, extra, _entropy(scores, real))

    def _among_groups(self, choice: Tensor) -> Tensor:
        """Mask the scores [B, L, experts] outside the best groups; a group scores the sum of its two best experts."""
        moe = self.moe
        if moe.groups == 1:
            return choice
        grouped = choice.unflatten(-1, (moe.groups, -1))
        value = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        best = value.topk(moe.top_groups, dim=-1, sorted=False).indices
        in_best_group = torch.zeros_like(value, dtype=torch.bool).scatter(-1, best, True)
        return grouped.masked_fill(~in_best_group.unsqueeze(-1), -math.inf).flatten(-2)

    def _within_capacity(self, experts: Tensor, real: Tensor | None) -> Tensor:
        """Drop the tokens of a sequence beyond an expert's capacity, the last ones first (Switch, section 2.2).

        The capacity applies to a sequence and not to the batch, so that it does not depend on how a batch is cut.
        """
        capacity = self.moe.at_length(experts.shape[1])
        if capacity is None:
            return experts
        chosen = self._chosen(experts, real).flatten(1, 2)
        # chosen is [B, L x top_k, experts] with a single 1 in each row. The running count at that 1 is the
        # position of the choice in its expert's queue, from 1.
        queue_position = (chosen.cumsum(1) * chosen).sum(-1).view_as(experts)
        return experts.masked_fill(queue_position > capacity, DROPPED)

    def _chosen(self, experts: Tensor, real: Tensor | None) -> Tensor:
        """Return 1 at each expert that a token chose, int64 [B, L, top_k, experts]; 0 throughout for padding."""
        chosen = F.one_hot(experts, self.moe.experts)
        return chosen if real is None else chosen * real[..., None, None]

    def _extra(self, logits: Tensor, scores: Tensor, experts: Tensor, real: Tensor | None) -> Tensor:
        """Return auxiliary x balance + z_loss x z, an fp32 scalar.

        balance = experts x sum over experts of (share of tokens x mean score), mean over sequences (Switch, eq. 4 to 6,
        for each sequence alone as in DeepSeek-V3, eq. 17 to 20, so that it does not depend on how the batch is cut).
        z = mean over tokens of logsumexp(logits)^2 (ST-MoE, eq. 5).
        """
        moe = self.moe
        extra = logits.new_zeros(())
        if moe.auxiliary:
            # f_i is a count without a gradient; the gradient flows through the mean score P_i.
            share = _mean(self._chosen(experts, real).sum(2).float(), real) / moe.top_k
            # Sigmoid scores do not sum to 1, so they are normalised first (DeepSeek-V3, equation 19).
            score = _mean(scores / scores.sum(-1, keepdim=True), real)
            # 1 x auxiliary for an even load: both share and score are then 1 / experts.
            extra = extra + moe.auxiliary * moe.experts * (share * score).sum(-1).mean()
        if moe.z_loss:
            squares = logits.logsumexp(-1).square()
            extra = extra + moe.z_loss * (squares if real is None else _mean(squares, real)).mean()
        return extra


def _mean(values: Tensor, real: Tensor | None) -> Tensor:
    """Return the mean over the real tokens of each sequence, [B, L, ..] to [B, ..]; 0 without real tokens."""
    if real is None:
        return values.mean(1)
    real = real.view(*real.shape, *[1] * (values.dim() - 2))
    return (values * real).sum(1) / real.sum(1).clamp(min=1)


@torch.no_grad()
def _entropy(scores: Tensor, real: Tensor | None) -> Tensor:
    each = torch.special.entr(scores / scores.sum(-1, keepdim=True))
    if real is not None:
        return torch.stack(((each * real.unsqueeze(-1)).sum(), real.sum().to(each.dtype)))
    total = each.sum()
    return torch.stack((total, torch.full_like(total, scores.shape[0] * scores.shape[1])))


class Experts(nn.Module):
    """All experts' feed-forward as stacked weights [experts, out, in].

    Expert parallelism cuts the first dimension and wraps `forward` in an exchange of tokens. `total` sums the products
    of tensor-parallel ranks before the last bias is added. An adapter may add a low-rank pair to each weight, see
    `workloads.adapters.lora.add_to_experts`.
    """

    lora_scale = 1.0

    def __init__(self, config: TransformerConfig, moe: MoE) -> None:
        super().__init__()
        up = (moe.experts, moe.intermediate, config.hidden)
        self.gate = nn.Parameter(torch.empty(up)) if config.gated else None
        self.up = nn.Parameter(torch.empty(up))
        self.down = nn.Parameter(torch.empty(moe.experts, config.hidden, moe.intermediate))
        if moe.bias:
            for name in ("gate", "up", "down") if config.gated else ("up", "down"):
                self.register_parameter(
                    f"{name}_bias", nn.Parameter(torch.empty(getattr(self, name).shape[:2]))
                )
        self.activation, self.joined = activation(config.activation), joined(config)
        self.total: Callable[[Tensor], Tensor] = lambda rows: rows

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return [R, hidden] for rows [R, hidden] sorted by expert and counts int64 [experts] with sum R.

        Args:
            rows: [R, hidden], sorted by expert.
            counts: rows of each expert, int64 [experts].
        """
        # One synchronisation for the three products below.
        sizes = rows_by_expert(counts, rows) if _asks_for_sizes(rows) else None
        up = self._biased("up", self._product("up", rows, counts, sizes), counts)
        if self.gate is None:
            inner = self.activation(up)
        else:
            inner = self.joined(self._biased("gate", self._product("gate", rows, counts, sizes), counts), up)
        return self._biased("down", self.total(self._product("down", inner, counts, sizes)), counts)

    def _biased(self, name: str, rows: Tensor, counts: Tensor) -> Tensor:
        """Add each expert's bias of the weight `name` to its rows, if it has one."""
        bias: Tensor | None = getattr(self, f"{name}_bias", None)
        if bias is None:
            return rows
        # `output_size` is given, or torch would read the sum of the counts from the device.
        return rows + bias.to(rows.dtype).repeat_interleave(counts, 0, output_size=len(rows))

    def _product(self, name: str, rows: Tensor, counts: Tensor, sizes: list[int] | None) -> Tensor:
        """Multiply each expert's rows by its weight `name`, and add the product with its low-rank pair."""
        product = grouped_linear(rows, getattr(self, name), counts, sizes)
        narrow = getattr(self, f"{name}_lora_a", None)
        if narrow is None:
            return product
        low = grouped_linear(rows, narrow, counts, sizes)
        return product + grouped_linear(low, getattr(self, f"{name}_lora_b"), counts, sizes) * self.lora_scale


class MixtureOfExperts(nn.Module):
    """Routed experts, and optional shared ones, which also process padding.

    `routing_statistics` sums the statistics of routing since they were last read, float64 [experts + 3]: dropped
    choices, choices of each expert, entropy, tokens. Recomputation counts a token twice, so only ratios are meaningful.
    """

    def __init__(self, config: TransformerConfig, moe: MoE) -> None:
        super().__init__()
        self.moe = moe
        self.router = Router(config, moe)
        self.experts = Experts(config, moe)
        self.shared = FeedForward(config, moe.shared * moe.intermediate) if moe.shared else None
        self.shared_gate = nn.Linear(config.hidden, 1, bias=False) if moe.shared_gate else None
        # Not a buffer: it is not saved, and a buffer would be lost when the model is built on the meta device.
        self.routing_statistics: Tensor | None = None

    def forward(self, hidden: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return [B, L, hidden] for hidden [B, L, hidden], and the router's extra loss; `real` as for `Router`.

        Args:
            hidden: [B, L, hidden].
            real: bool [B, L]; None without padding.
        """
        routes = self.router(hidden, real)
        flat = hidden.flatten(0, 1)
        experts = routes.experts.flatten()
        # Stable: equal experts keep the order of tokens, so the products have the same rows in the same order in every
        # run.
        order = experts.argsort(stable=True)
        counts = torch.zeros(self.moe.experts - PADDING, dtype=torch.int64, device=flat.device)
        # Shifted by two, so that padding (-2) and dropped choices (-1) are counted in entries 0 and 1.
        counts.index_add_(0, experts - PADDING, torch.ones_like(experts))
        if self.moe.at_length(hidden.shape[1]) is not None or real is not None:
            # Padding and dropped choices sort first. Without them this synchronisation with the device is avoided.
            order = order[counts[0] + counts[1] :]
        statistics = torch.cat((counts[1:].double(), routes.entropy.double())).detach()
        self.routing_statistics = (
            statistics if self.routing_statistics is None else self.routing_statistics + statistics
        )
        counts = counts[2:]
        # Choice c belongs to token c // top_k, since each token has top_k neighbouring choices.
        rows = self.experts(flat[order // self.moe.top_k], counts)
        # Each row is written to its own place, so that a token's experts are summed in a fixed order on any device.
        # Zeros for dropped choices and padding, whose routed part is 0: the residual passes them on.
        placed = rows.new_zeros(len(experts), rows.shape[-1]).index_copy(0, order, rows)
        weights = routes.weights.to(rows.dtype).unsqueeze(-1)
        mixed = (placed.view(*routes.weights.shape, -1) * weights).sum(2)
        return (mixed if self.shared is None else mixed + self._shared(self.shared, hidden)), routes.extra

    def _shared(self, shared: nn.Module, hidden: Tensor) -> Tensor:
        output: Tensor = shared(hidden)
        return output if self.shared_gate is None else self.shared_gate(hidden).sigmoid() * output

    def update(self, load: Tensor) -> None:
        """Add bias_rate x sign(mean load - load) to the bias (DeepSeek-V3, section 2.1.2).

        load [experts] is the number of tokens that chose each expert in this step on all ranks, or any multiple of it.
        """
        assert self.router.bias is not None
        assert self.moe.bias_rate is not None
        load = load.to(self.router.bias.device).float()
        # Only the sign: the step does not depend on the batch's size, and any multiple of the load will do.
        self.router.bias += self.moe.bias_rate * (load.mean() - load).sign()


def rows_by_expert(counts: Tensor, rows: Tensor) -> list[int]:
    """Return the number of rows of each expert.

    A trace replaces this function by one that divides the number of `rows` evenly, because fake counts have no values.

    Args:
        counts: rows of each expert, int64 [experts].
        rows: [R, in]; only a trace reads their number.
    """
    sizes: list[int] = counts.tolist()
    return sizes


def _asks_for_sizes(rows: Tensor) -> bool:
    """Return whether to read the counts from the device once, before the products of a layer.

    torch has a grouped CUDA kernel for bf16 on Hopper and Blackwell only. Elsewhere its product reads the counts in
    each pass of each weight, nine times a layer.
    """
    if not rows.is_cuda:
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else rows.dtype
    return dtype is not torch.bfloat16 or torch.cuda.get_device_capability(rows.device)[0] not in (9, 10)


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor, sizes: list[int] | None = None) -> Tensor:
    """Return x W_e^T for the rows of each expert, [R, out].

    Args:
        rows: [R, in], sorted by expert.
        weight: [experts, out, in].
        counts: rows of each expert, int64 [experts].
        sizes: the counts as a list if they are known; each expert then has a product of its own.
    """
    if torch.is_autocast_enabled(rows.device.type):
        rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        weight = cast(weight)
    aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])
    # torch 2.13 compiles the grouped kernel in bf16 only.
    usable = (torch.bfloat16,) if torch.compiler.is_compiling() else KERNEL
    if sizes is None and aligned and weight.dtype in usable:
        if compiles_by_size(rows):
            return _in_few_sizes(rows, weight, counts)
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=_ends(counts))
    # The grouped kernel supports neither fp64 nor rows whose size is not a multiple of 16 bytes.
    sizes = rows_by_expert(counts, rows) if sizes is None else sizes
    parts = zip(rows.split(sizes), weight.unbind(), strict=True)
    return torch.cat([F.linear(part, expert) for part, expert in parts])


def compiles_by_size(rows: Tensor) -> bool:
    """Return whether torch compiles a kernel for each new number of rows, as it does on CPUs in 16 bits."""
    return not rows.is_cuda and rows.dtype is not torch.float32


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


def _in_few_sizes(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return the grouped product, computed with rows of zeros so that each expert has a multiple of ROWS rows.

    Compiling a kernel takes a millisecond, and torch keeps a thousand of them, which take a gigabyte.
    """
    padded = (counts + ROWS - 1) // ROWS * ROWS
    # How far each expert's rows move: the padding of all experts before it.
    before = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    target_rows = torch.arange(len(rows), device=rows.device)
    target_rows = target_rows + before.repeat_interleave(counts, output_size=len(rows))
    # The largest size that padding can need, so that the shape depends on the number of rows alone.
    apart = rows.new_zeros(len(rows) + (ROWS - 1) * len(counts), rows.shape[1]).index_copy(
        0, target_rows, rows
    )
    return F.grouped_mm(apart, weight.transpose(-2, -1), offs=_ends(padded))[target_rows]
