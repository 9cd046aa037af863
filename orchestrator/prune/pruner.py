"""The masks of pruned weights: chosen after an update, applied after every update, committed by tensor name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.checkpoint.pieces import PRUNE, TensorPiece
from orchestrator.checkpoint.reader import Reader
from orchestrator.parallel.full_matrices import FullMatrices
from orchestrator.parallel.parameter_shard import ParameterShard
from orchestrator.prune.config import PruneSpec
from orchestrator.prune.selection import ordered, smallest

PRUNED_FIRST = -1
"""The key of a weight that is pruned already: less than that of any magnitude."""


@dataclass
class _State:
    """The state of a shard; every tensor has its size.

    Attributes:
        mask: which weights are kept, bool.
        slots: for movement, `score` (fp32, the larger the better) and `hidden` (the values of pruned weights, else 0).
        product: gradient times weight of this step, for movement; set between the backward pass and the update.
    """

    mask: Tensor
    slots: dict[str, Tensor]
    product: Tensor | None = None


class Pruner:
    """Prunes the weights of this rank's shards. Without a `spec` nothing is pruned, and every method does nothing.

    A pruned weight is zero in the forward pass, in commits and in exports, and its gradient is set to zero before the
    norm of the gradients is computed, as if the model did not have it.

    Magnitude: pruned weights never return. Their moments are set to zero when they are pruned, and stay zero, so they
    count neither in trust ratios (LAMB) nor in the orthogonal update (Muon).

    Movement (Sanh et al., 2020, "Movement Pruning", section 3, hard top-v): with W' = W * M, each update adds
    -dL/dW' * W to the score of every weight. This is the gradient step of a score that the straight-through estimator
    sees as a factor of W; its learning rate is left out, since it does not change the order. dL/dW' is the gradient
    that the optimizer gets, after clipping. A pruned weight keeps its value W in `hidden` and returns with it, and with
    moments of zero. Scores are zero at first and are added up from the first step to the last of `steps`.
    """

    def __init__(
        self,
        spec: PruneSpec | None,
        names: Sequence[str],
        shards: Sequence[ParameterShard],
        full: FullMatrices,
    ) -> None:
        """Prepare the masks; `begin` or `restore` fills them.

        Args:
            spec: how the job prunes; None for not at all.
            names: the parameters to prune, those of other pipeline stages included, ascending.
            shards: this rank's shards of all parameters.
            full: collects the matrices to prune, for patterns.
        """
        self._spec = spec
        self._names = list(names)
        chosen = set(self._names)
        self._shards = [shard for shard in shards if spec and shard.name in chosen]
        self._full = full
        self._moves = spec is not None and spec.method == "movement"
        slots = ("score", "hidden") if self._moves else ()
        self._states = {
            shard.name: _State(
                torch.ones_like(shard.parameter, dtype=torch.bool),
                {slot: torch.zeros_like(shard.parameter.detach()) for slot in slots},
            )
            for shard in self._shards
        }
        self._sizes: list[int] = []
        self._pruned = 0

    @property
    def metrics(self) -> dict[str, float]:
        """The share of the weights in question that is pruned; empty without pruning."""
        return {"sparsity": self._pruned / max(1, sum(self._sizes))} if self._spec else {}

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that stay between two steps."""
        return [each for state in self._states.values() for each in (state.mask, *state.slots.values())]

    @torch.no_grad()
    def begin(self) -> None:
        """Start with all weights, or with `keep` with those that are not zero."""
        for shard in self._shards:
            state = self._states[shard.name]
            state.mask.fill_(True)
            if self._spec and self._spec.keep:
                state.mask.copy_(shard.parameter != 0)
            for slot in state.slots.values():
                slot.zero_()
        self._count()

    @torch.no_grad()
    def mask_gradients(self) -> None:
        """Set the gradients of pruned weights to zero. Call it when gradients are complete, before their norm."""
        for shard in self._shards:
            state = self._states[shard.name]
            gradient = shard.parameter.grad
            if gradient is None:
                continue
            if self._moves:
                # Before the gradient is masked: a pruned weight's gradient is the only way in which its score can rise
                # again. Its value stands in `hidden`, since the parameter is 0.
                state.product = gradient * (shard.parameter + state.slots["hidden"])
            gradient.mul_(state.mask)

    @torch.no_grad()
    def update(
        self, step: int, scale: float, optimizer: torch.optim.Optimizer, averages: Mapping[Tensor, Tensor]
    ) -> None:
        """Prune after the optimizer's update. All ranks call it together.

        Args:
            step: number of updates done.
            scale: the factor of the gradients of `mask_gradients` that made them those of the update.
            optimizer: holds the moments.
            averages: averaged weights by parameter, which are pruned too.
        """
        if self._spec is None:
            return
        for state in self._states.values():
            if state.product is not None:
                # `scale` makes it the gradient that the optimizer got: with clipping, steps of large gradients must
                # not count more for the scores than for the weights.
                state.slots["score"].sub_(state.product, alpha=scale)
                state.product = None
        chosen = self._spec.is_due(step)
        if chosen:
            # Scores may have changed places, so hidden weights return first and the new choice hides them again.
            self._restore_hidden()
            self._choose(step)
        for shard in self._shards:
            state = self._states[shard.name]
            if chosen and self._moves:
                # Only a choice stores hidden values: between two choices the parameters of pruned weights are zero.
                torch.mul(shard.parameter, ~state.mask, out=state.slots["hidden"])
            # At every update: an optimizer may move a weight whose gradient is zero, as Muon does.
            _zero(shard.parameter, state.mask)
            if chosen:
                _zero_all(shard.parameter, state.mask, optimizer, averages)
        if chosen:
            self._count()

    def pieces(self, shard: ParameterShard) -> Iterator[TensorPiece]:
        """Yield the masks and scores of a shard that this rank saves."""
        state = self._states.get(shard.name)
        tensors = {} if state is None else {"mask": state.mask, **state.slots}
        for slot, tensor in tensors.items():
            for box, view in shard.views(tensor):
                yield TensorPiece(f"{PRUNE}{shard.name}.{slot}", shard.cut.shape, box.start, view)

    @torch.no_grad()
    def restore(self, reader: Reader) -> None:
        """Load this rank's masks and scores from a commit. Those that the commit lacks start as in `begin`."""
        self.begin()
        for shard in self._shards:
            state = self._states[shard.name]
            for slot, tensor in {"mask": state.mask, **state.slots}.items():
                name = f"{PRUNE}{shard.name}.{slot}"
                for box, view in shard.views(tensor) if name in reader.manifest.tensors else ():
                    view.copy_(reader.read(name, box.start, box.extent))
        self._count()

    def _restore_hidden(self) -> None:
        for shard in self._shards:
            if self._moves:
                shard.parameter.add_(self._states[shard.name].slots["hidden"])

    def _score(self, shard: ParameterShard) -> Tensor:
        """Return the scores of a shard, fp32: the smallest are pruned."""
        state = self._states[shard.name]
        if self._moves:
            return state.slots["score"]
        # Pruned weights stay pruned: they come before a kept weight that happens to be zero.
        return torch.where(state.mask, shard.parameter.abs(), float(PRUNED_FIRST))

    def _choose(self, step: int) -> None:
        """Set the masks from the scores."""
        assert self._spec is not None
        if self._spec.pattern:
            keep, of = self._spec.group
            for shard, mask in self._full.changed(self._score, partial(_n_of_m, keep=keep, of=of)):
                self._set_mask(shard, mask != 0)
            return
        # All ranks must have the same units in the same order, those of other stages included, since `smallest` counts
        # collectively.
        units = [self._names] if self._spec.scope == "global" else [[name] for name in self._names]
        size = dict(zip(self._names, self._sizes, strict=True))
        share = self._spec.share(step)
        counts = [round(share * sum(size[name] for name in unit)) for unit in units]
        keys = [ordered(self._score(shard).reshape(-1)) for shard in self._shards]
        chosen = smallest(keys, self._shards, units, counts, self._full.device)
        for shard, pruned in zip(self._shards, chosen, strict=True):
            self._set_mask(shard, ~pruned.view(shard.parameter.shape))

    def _set_mask(self, shard: ParameterShard, keep: Tensor) -> None:
        """Set a mask. By magnitude no weight returns, even if more were zero at the start than are to be pruned."""
        mask = self._states[shard.name].mask
        mask.copy_(keep if self._moves else keep & mask)

    def _count(self) -> None:
        """Count the weights of each parameter and those that are pruned, over all ranks."""
        if self._spec is None:
            return
        number = {name: n for n, name in enumerate(self._names)}
        device = self._full.device
        counts = torch.zeros(2, len(number), dtype=torch.int64, device=device)
        for shard in self._shards:
            # Copies of a shard on other ranks would be counted twice.
            if shard.counted:
                mask = self._states[shard.name].mask
                counts[0, number[shard.name]] += mask.numel()
                counts[1, number[shard.name]] += (~mask).sum()
        dist.all_reduce(counts)
        self._sizes = counts[0].tolist()
        self._pruned = int(counts[1].sum())


def _n_of_m(scores: Tensor, keep: int, of: int) -> Tensor:
    """Return 1 for the `keep` largest of every `of` scores along the last dimension, else 0; of equal ones the last."""
    groups = scores.unflatten(-1, (-1, of))
    # Stable, so that equal scores are decided by their index and not by the kernel.
    pruned = groups.argsort(dim=-1, stable=True)[..., : of - keep]
    return torch.ones_like(groups).scatter_(-1, pruned, 0.0).flatten(-2)


def _zero(tensor: Tensor, mask: Tensor) -> None:
    """Set the elements outside of the mask to zero, never to -0."""
    tensor.masked_fill_(~mask, 0.0)


def _zero_all(
    parameter: Tensor, mask: Tensor, optimizer: torch.optim.Optimizer, averages: Mapping[Tensor, Tensor]
) -> None:
    """Set what belongs to pruned weights to zero: moments, and averages of weights."""
    state = optimizer.state.get(parameter, {})
    tensors = [each for each in state.values() if isinstance(each, Tensor) and each.shape == mask.shape]
    if parameter in averages:
        tensors.append(averages[parameter])
    for tensor in tensors:
        _zero(tensor, mask)
