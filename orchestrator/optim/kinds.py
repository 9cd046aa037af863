"""The optimizers that a job can name: what the checks, the planner and a checkpoint must know before torch is imported.

To add one, write a module with `build(context)` (see `orchestrator.optim.build`) and add its record to `KINDS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer.

    Attributes:
        module: the module that builds it: `build(context) -> torch.optim.Optimizer`.
        slots: names of the state tensors of a parameter, fp32, each of the parameter's shape.
        bytes_per_parameter: memory traffic of an update for each trained parameter. AdamW's one fused kernel reads four
            numbers and writes three; the others run one kernel for each operation. All include reading the gradient for
            its norm, and reading and writing it for clipping.
        matrices_only: it updates the matrices of the layers alone. All other parameters have AdamW.
        norm_sums: how often a step sums norms over all ranks. A rank that trains nothing must take part.
        has_mup: whether muP defines its learning rates at another width.
        keys: keys of `train.optimizer` that no other optimizer reads.
    """

    module: str
    slots: tuple[str, ...]
    bytes_per_parameter: float
    matrices_only: bool = False
    norm_sums: int = 0
    has_mup: bool = False
    keys: tuple[str, ...] = ()


ADAMW = OptimizerKind("orchestrator.optim.adamw", ("exp_avg", "exp_avg_sq"), 40.0, has_mup=True)
KINDS: Mapping[str, OptimizerKind] = {
    "adamw": ADAMW,
    "lamb": OptimizerKind("orchestrator.optim.lamb", ("exp_avg", "exp_avg_sq"), 128.0, norm_sums=2),
    "lars": OptimizerKind("orchestrator.optim.lars", ("momentum",), 80.0, norm_sums=2),
    "lion": OptimizerKind("orchestrator.optim.lion", ("exp_avg",), 64.0, has_mup=True),
    "muon": OptimizerKind(
        "orchestrator.optim.muon", ("momentum_buffer",), 72.0, matrices_only=True, keys=("momentum",)
    ),
}
"""The optimizers by their name in the job file."""


def kind_of(name: str) -> OptimizerKind:
    """Return the record of an optimizer. The planner assumes AdamW's costs for a user's own optimizer."""
    return KINDS.get(name, ADAMW)
