"""Build the optimizer that a job names for the parameter shards of one rank."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestrator.config.object_reference import ObjectReference
from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.groups import Rate, default_rate, groups_of_shards
from orchestrator.optim.kinds import ADAMW, KINDS, Slot
from orchestrator.optim.own import OwnOptimizer, slots_of_own
from orchestrator.parallel.block_maxima import Maxima, own_maxima
from orchestrator.parallel.full_matrices import FullMatrices
from orchestrator.parallel.parameter_shard import ParameterShard

Norms = Callable[[Sequence[Tensor]], list[Tensor]]
"""Maps one tensor per shard, in the order of the shards, to the norms of the full tensors that their slices are parts
of, see `ParameterShard.slices`."""


CPU = torch.device("cpu")


@dataclass(frozen=True)
class OptimizerContext:
    """The arguments from which an optimizer is built.

    Attributes:
        spec: the job's `train.optimizer`.
        shards: the trained parameters of this rank, flat parts of them under ZeRO.
        norms: sums norms over the ranks that share a parameter. All ranks call it together.
        rate: the factors of the learning rate and the weight decay by parameter name.
        full: brings divided matrices together, for an optimizer that reads them whole (Muon).
        matmul_dtype: the type of matrix products within an update (Muon's iterations).
        in_8_bits: the parameters whose moments an 8-bit optimizer rounds.
        maxima: the largest values of the blocks that several ranks hold parts of. All ranks call it together.
        device: where the shards are. A rank without a shard takes part in collectives from there.
    """

    spec: OptimizerSpec
    shards: Sequence[ParameterShard]
    norms: Norms
    rate: Callable[[str], Rate] = default_rate
    full: FullMatrices | None = None
    matmul_dtype: torch.dtype = torch.float32
    in_8_bits: Container[str] = ()
    maxima: Maxima = own_maxima
    device: torch.device = CPU


def build_optimizer(context: OptimizerContext) -> torch.optim.Optimizer:
    """Return the optimizer over this rank's shards. Raises InputError if the user's own optimizer cannot be made."""
    name = context.spec.name
    if isinstance(name, ObjectReference):
        if not context.shards:
            return NothingToTrain()
        return OwnOptimizer(
            groups_of_shards(context.spec, context.shards, context.rate), name, context.spec.lr
        )
    kind = KINDS[name]
    if not context.shards and not kind.needs_every_rank:
        return NothingToTrain(context.norms, kind.norm_sums)
    optimizer: torch.optim.Optimizer = importlib.import_module(kind.module).build(context)
    return optimizer


def slots_of(spec: OptimizerSpec, name: str, special: Container[str]) -> tuple[Slot, ...]:
    """Return the state tensors of a parameter.

    Args:
        spec: the job's optimizer.
        name: name of the parameter.
        special: the parameters that the optimizer treats in its own way: the matrices that a matrix optimizer
            (Muon) updates, or those whose moments are rounded to 8 bits. All other parameters then have AdamW's state.
    """
    if isinstance(spec.name, ObjectReference):
        return tuple(Slot(slot) for slot in slots_of_own(spec.name))
    kind = KINDS[spec.name]
    return ADAMW.slots if kind.needs_every_rank and name not in special else kind.slots


class NothingToTrain(torch.optim.Optimizer):
    """The optimizer of a rank whose parameters are all frozen. It only takes part in sums over ranks."""

    def __init__(self, norms: Norms | None = None, norm_sums: int = 0) -> None:
        super().__init__([{"params": [], "lr": 0.0, "lr_scale": 1.0}], {})
        self._norms = norms
        self._norm_sums = norm_sums

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change nothing. The other ranks wait for this one in each sum of norms."""
        for _ in range(self._norm_sums):
            assert self._norms is not None
            self._norms([])
