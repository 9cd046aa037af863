"""How a job prunes its weights: what is chosen, by which score, and at which steps."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import Field, model_validator

from orchestrator.config.strict import Positive, StrictModel
from orchestrator.config.workload import WorkloadSpec
from orchestrator.train.config import TrainSpec

TO_CLOSE = 4.9
"""How far log alpha of a head's gate falls from its start until the gate is 0, see `workloads.model.head_gates`."""
GATES = tuple(f"{stack}layers.0.attention.gates.log_alpha" for stack in ("", "encoder.", "decoder."))
"""Names of gates in all kinds of models."""


class PruneSpec(StrictModel):
    """Weights that training sets to zero, and keeps there.

    A share of the weights grows from 0 to `sparsity` (Zhu and Gupta, 2017), or every group of M weights keeps N of them
    (`pattern`).
    """

    method: Literal["magnitude", "movement"] = Field(
        default="magnitude",
        description="the score of a weight: its magnitude, or how far training moves it away from zero (movement "
        "pruning), by which a pruned weight may return until the last of steps",
    )
    scope: Literal["global", "layer"] = Field(
        default="global",
        description="the weights that are compared: all together, or those of each tensor alone",
    )
    sparsity: float | None = Field(
        default=None, gt=0.0, lt=1.0, description="share of the weights that is pruned in the end"
    )
    pattern: str | None = Field(
        default=None,
        pattern=r"^[1-9][0-9]?:[1-9][0-9]?$",
        description="N:M instead of a share, such as 2:4: keep N of M neighbours along the input dimension",
    )
    steps: tuple[Positive, Positive] | None = Field(
        default=None,
        description="the first and the last step after which weights are chosen: sparsity grows from the first, "
        "where it is 0, to the last. A pattern is complete from the first on",
    )
    choose_every: Positive = Field(default=100, description="steps from one choice of weights to the next")
    match: list[str] = Field(
        default_factory=list,
        description="patterns, as for file names, of the matrices to prune; none: those of the layers, without "
        "routers and biases by distance",
    )
    keep: bool = Field(
        default=False,
        description="weights that are zero when the run begins stay zero, as for the fine-tuning of a pruned model",
    )

    @model_validator(mode="after")
    def something_is_pruned(self) -> PruneSpec:
        if self.sparsity is not None and self.pattern is not None:
            raise ValueError("prune has a share or a pattern; leave out sparsity or pattern")
        if not (self.grows or self.keep):
            raise ValueError("prune says nothing to prune; give sparsity or pattern, or set keep")
        if self.grows and self.steps is None:
            raise ValueError("prune lacks the steps at which weights are chosen; give steps: [first, last]")
        if self.steps and not self.grows:
            raise ValueError(
                "prune.steps chooses weights, but the job sets no share of them; give sparsity or pattern"
            )
        if self.steps and self.steps[0] > self.steps[1]:
            raise ValueError("prune.steps ends before it begins; give [first, last]")
        if self.keep and self.method == "movement":
            raise ValueError("prune.keep holds zeros, but movement lets weights return; use method magnitude")
        return self

    @model_validator(mode="after")
    def a_pattern_keeps_some_of_a_group(self) -> PruneSpec:
        if self.pattern and self.group[0] >= self.group[1]:
            raise ValueError(
                f"pattern {self.pattern} keeps all weights; keep fewer than a group has, as in 2:4"
            )
        if self.pattern and self.scope == "layer":
            raise ValueError(
                "scope compares weights for a share, but a pattern compares those of a group; leave it out"
            )
        return self

    @property
    def grows(self) -> bool:
        """Whether the run prunes weights beyond those that are zero when it begins."""
        return self.sparsity is not None or self.pattern is not None

    @property
    def group(self) -> tuple[int, int]:
        """The weights that the pattern keeps, and those of a group."""
        kept, of = (self.pattern or "1:1").split(":")
        return int(kept), int(of)

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of state for each parameter to prune: its mask; for movement also its score and its hidden value."""
        return 9.0 if self.method == "movement" else 1.0

    def is_due(self, step: int) -> bool:
        """Return whether weights are chosen after `step` updates."""
        if self.steps is None:
            return False
        first, last = self.steps
        if self.pattern and self.method == "magnitude":
            return (
                step == first
            )  # a pruned weight has the least magnitude, so that later choices would be the same
        return first <= step <= last and ((step - first) % self.choose_every == 0 or step == last)

    def shortened(self, before: int, after: int) -> dict[str, Any]:
        """Return plain data for a run of `after` steps instead of `before`; the pruning steps keep their shares of
        the run.

        Args:
            before: steps of the job.
            after: steps of the shorter run.
        """
        document = self.model_dump(mode="json")
        if self.steps is not None:
            document["steps"] = [max(1, round(step / before * after)) for step in self.steps]
            document["choose_every"] = max(1, round(self.choose_every / before * after))
        return document

    def share(self, step: int) -> float:
        """Return the share of weights to prune after `step` updates.

        s_t = s_f (1 - (1 - (t - t_0) / (t_n - t_0))^3), Zhu and Gupta, 2017, "To prune, or not to prune", equation 1
        with s_i = 0.
        """
        assert self.steps is not None
        assert self.sparsity is not None
        first, last = self.steps
        progress = 1.0 if step >= last else (step - first) / (last - first)
        return self.sparsity * (1.0 - (1.0 - progress) ** 3)

    def problem(self, workload: WorkloadSpec, train: TrainSpec, averaged: int) -> str:
        """Return what of a job does not go with its pruning; empty if everything does.

        Args:
            workload: its model.
            train: how it trains.
            averaged: number of earlier commits in the mean that is exported, 0 without a mean.
        """
        if self.steps and self.steps[1] > train.steps:
            return f"prune.steps ends after step {train.steps}, the last of train.steps; change one of them"
        if workload.adapter is not None:
            return (
                "prune sets trained weights to zero, and an adapter does not train those of the base; prune in a run "
                "without an adapter before or after this one"
            )
        if train.thaw:
            return (
                "prune compares the weights that are trained, and train.thaw changes which are; leave out one of "
                "them"
            )
        if averaged and self.grows:
            return (
                "checkpoint.average.last is a mean of commits, and a weight that one of them has pruned would "
                "not be zero "
                "in it; use ema"
            )
        return ""


def gates_notes(workload: WorkloadSpec, train: TrainSpec) -> list[str]:
    """Return one line if no gate of a head can close within the run.

    An update of AdamW is about as large as its learning rate, so log alpha moves at most by the sum of the rates.

    Args:
        workload: the key `workload` of the job.
        train: the key `train`.
    """
    if not workload.head_penalty:
        return []
    of_gates = (
        group.lr_scale
        for group in train.optimizer.groups
        if any(fnmatchcase(name, pattern) for name in GATES for pattern in group.match)
    )
    moves = train.optimizer.lr * next(of_gates, 1.0) * train.steps
    if moves >= TO_CLOSE:
        return []
    scale = 2 * TO_CLOSE / (train.optimizer.lr * train.steps)
    digit = 10 ** math.floor(math.log10(scale))
    return [
        f"no gate of a head can close: log alpha has to fall by {TO_CLOSE}, and {train.steps} steps move it by "
        f"{moves:.2g} at most; give gates a larger learning rate, as in train.optimizer.groups: "
        f'[{{match: ["*.gates.*"], lr_scale: {math.ceil(scale / digit) * digit:g}}}]'
    ]
