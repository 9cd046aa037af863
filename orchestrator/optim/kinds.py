"""The optimizers that a job can name: what the checks, the planner and a checkpoint must know before torch is imported.

To add one, write a module with `build(context)` (see `orchestrator.optim.build`) and add its record to `KINDS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BLOCK = 256
"""Numbers of a parameter that share a scale where its moments are 8-bit codes."""


@dataclass(frozen=True)
class Slot:
    """A state tensor of a parameter. It has the parameter's shape unless it is a scale.

    Attributes:
        name: its name in the optimizer's state and in a checkpoint.
        is_code: whether its elements are 8-bit codes (uint8) instead of fp32 numbers.
        is_scale: whether it has one fp32 number for each block of the parameter, see `orchestrator.optim.blocks`.
    """

    name: str
    is_code: bool = False
    is_scale: bool = False


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer.

    Attributes:
        module: the module that builds it: `build(context) -> torch.optim.Optimizer`.
        slots: the state tensors of a parameter.
        bytes_per_parameter: memory traffic of an update for each trained parameter. AdamW's one fused kernel reads four
            numbers and writes three; the others run one kernel for each operation. All include reading the gradient for
            its norm, and reading and writing it for clipping.
        matrices_only: it updates the matrices of the layers alone. All other parameters have AdamW.
        in_8_bits: its slots are codes and scales. Embeddings and small parameters have AdamW's slots.
        norm_sums: how often a step sums norms over all ranks. A rank that trains nothing must take part.
        has_mup: whether muP defines its learning rates at another width.
        keys: keys of `train.optimizer` that no other optimizer reads.
    """

    module: str
    slots: tuple[Slot, ...]
    bytes_per_parameter: float
    matrices_only: bool = False
    in_8_bits: bool = False
    norm_sums: int = 0
    has_mup: bool = False
    keys: tuple[str, ...] = ()

    @property
    def needs_every_rank(self) -> bool:
        """Whether a rank without a parameter of its own still takes part in the update."""
        return self.matrices_only or self.in_8_bits


MOMENTS = (Slot("exp_avg"), Slot("exp_avg_sq"))
MOMENTS_IN_8_BITS = (
    Slot("exp_avg_code", is_code=True),
    Slot("exp_avg_sq_code", is_code=True),
    Slot("exp_avg_scale", is_scale=True),
    Slot("exp_avg_sq_scale", is_scale=True),
)
ADAMW = OptimizerKind("orchestrator.optim.adamw", MOMENTS, 40.0, has_mup=True)
KINDS: Mapping[str, OptimizerKind] = {
    "adamw": ADAMW,
    "adamw_8bit": OptimizerKind(
        "orchestrator.optim.adamw_8bit", MOMENTS_IN_8_BITS, 240.0, in_8_bits=True, has_mup=True
    ),
    "lamb": OptimizerKind("orchestrator.optim.lamb", MOMENTS, 128.0, norm_sums=2),
    "lars": OptimizerKind("orchestrator.optim.lars", (Slot("momentum"),), 80.0, norm_sums=2),
    "lion": OptimizerKind("orchestrator.optim.lion", (Slot("exp_avg"),), 64.0, has_mup=True),
    "muon": OptimizerKind(
        "orchestrator.optim.muon", (Slot("momentum_buffer"),), 72.0, matrices_only=True, keys=("momentum",)
    ),
}
"""The optimizers by their name in the job file."""


def kind_of(name: str) -> OptimizerKind:
    """Return the record of an optimizer. The planner assumes AdamW's costs for a user's own optimizer."""
    return KINDS.get(name, ADAMW)


def needs_its_shard_alone(name: str) -> bool:
    """Whether the update of a shard depends on that shard alone, so that another rank can compute it again.

    That is not known of a user's own optimizer.
    """
    kind = KINDS.get(name)
    return kind is not None and not (kind.norm_sums or kind.needs_every_rank)
