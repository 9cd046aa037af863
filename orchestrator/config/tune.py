"""The job file's `tune`: the search space, the method and the limits. Importable without torch or ray."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from orchestrator.config.metric_names import larger_is_better
from orchestrator.config.strict import Positive, StrictModel

KINDS = ("grid", "choice", "uniform", "loguniform", "integer")
REWRITABLE = (
    "train.optimizer.",
    "train.z_loss",
    "train.label_smoothing",
    "train.stability",
    "parallel",
    "resources",
)
"""Keys that may change in the middle of training: a commit can be loaded by a job that differs in these only."""
FIXED_WITHIN = ("train.optimizer.name", "parallel.engine")
"""Of these, keys that may not change, since they determine which state a commit holds."""
POPULATION = ("pbt", "pb2")
"""Schedulers under which trials load each other's commits and continue with other values."""


class Dimension(StrictModel):
    """The values of one key: exactly one of these kinds."""

    grid: list[Any] | None = Field(default=None, min_length=1, description="each of these (sampler: grid)")
    choice: list[Any] | None = Field(default=None, min_length=1, description="one of these")
    uniform: tuple[float, float] | None = Field(default=None, description="lowest and highest")
    loguniform: tuple[float, float] | None = Field(
        default=None, description="lowest and highest, uniform in the logarithm"
    )
    integer: tuple[int, int] | None = Field(default=None, description="lowest and highest whole number")

    @property
    def kind(self) -> str:
        """Which of KINDS is given."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def listed(self) -> list[Any] | None:
        """The values of a grid or choice; None for a range."""
        return self.grid or self.choice

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest value of a range."""
        found = self.uniform or self.loguniform or self.integer
        assert found is not None
        return found

    @model_validator(mode="after")
    def exactly_one_kind(self) -> Dimension:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            kinds = " and ".join(given) or "nothing"
            raise ValueError(f"gives {kinds}; give exactly one of {', '.join(KINDS)}")
        return self

    @model_validator(mode="after")
    def a_range_has_a_width(self) -> Dimension:
        if self.listed is None and self.ends[0] >= self.ends[1]:
            raise ValueError(
                f"the range {self.ends[0]} to {self.ends[1]} is empty; give lowest, then highest"
            )
        if self.loguniform and self.loguniform[0] <= 0:
            raise ValueError("a logarithm needs values above 0; raise the lowest, or use uniform")
        return self

    @model_serializer(mode="wrap")
    def _only_what_is_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}


class Promotion(StrictModel):
    """Trials that reach a step continue under another layout."""

    at: Positive = Field(description="step from which on")
    set: dict[str, Any] = Field(min_length=1, description="keys of parallel and resources, and their values")

    @model_validator(mode="after")
    def only_where_it_runs_changes(self) -> Promotion:
        for key in self.set:
            if key.split(".")[0] not in ("parallel", "resources"):
                raise ValueError(f"{key} makes it another run; only parallel and resources may change here")
        return self


class SweepLimits(StrictModel):
    """Limits of the search, over all its trials and commands."""

    steps: Positive | None = Field(default=None, description="optimiser steps of all trials")
    hours: float | None = Field(
        default=None, gt=0, description="wall-clock hours during which the search runs"
    )
    cost_usd: float | None = Field(default=None, gt=0, description="counted as limits.cost_usd of the job")


class TuneSpec(StrictModel):
    """A search: trials of this job that differ in the keys of `space`; each trial is a run."""

    space: dict[str, Dimension] = Field(min_length=1, description="dotted keys of the job, and their values")
    metric: str = Field(
        default="loss",
        description="a number of metrics.jsonl, mean over the last steps; or one of the last evaluation, as in "
        "validation.loss",
    )
    mode: Literal["min", "max"] | None = Field(
        default=None,
        description="whether less or more of metric is better; max for accuracy and its kin, else min, if unset",
    )
    window: Positive = Field(
        default=10, description="last steps that the metric is the mean of, at most a quarter of those done"
    )
    sampler: Literal["random", "grid", "tpe"] = Field(
        default="random", description="tpe is Optuna's (Bergstra et al., 2011)"
    )
    scheduler: Literal["none", "asha", "hyperband", "median", "pbt", "pb2"] = Field(
        default="none",
        description="which trials go on: asha (Li et al., 2018), pbt (Jaderberg et al., 2017), "
        "pb2 (Parker-Holder et al., 2020)",
    )
    trials: Positive | None = Field(default=None, description="how many; a grid has as many as it has points")
    concurrency: Positive | None = Field(default=None, description="at once; as many as have room if unset")
    grace: Positive | None = Field(
        default=None, description="steps before the first decision; all, divided by reduction twice, if unset"
    )
    reduction: int = Field(default=4, ge=2, description="of so many trials one goes on (asha, hyperband)")
    interval: Positive | None = Field(
        default=None, description="steps between decisions (median, pbt, pb2); a tenth of all if unset"
    )
    promote: list[Promotion] = Field(default_factory=list, description="layouts for those that go on")
    register_as: str | None = Field(
        default=None,
        description="name in MLflow's registry of which the best model becomes a version; the alias best goes to it if "
        "it is better than what has it",
    )
    limits: SweepLimits = Field(default_factory=SweepLimits)

    @property
    def direction(self) -> Literal["min", "max"]:
        """Whether less or more of the metric is better: as `mode` says, else as the metric has it."""
        return self.mode or ("max" if larger_is_better(self.metric) else "min")

    @model_validator(mode="after")
    def the_sampler_fits_the_space(self) -> TuneSpec:
        for key, dimension in self.space.items():
            if self.sampler == "grid" and dimension.listed is None:
                hint = "list its values, or use sampler: random"
                raise ValueError(f"a grid has no point for {key}, which is {dimension.kind}; {hint}")
            if self.sampler != "grid" and dimension.kind == "grid":
                raise ValueError(f"{key} is a grid, and the sampler is {self.sampler}; write choice instead")
        return self

    @model_validator(mode="after")
    def a_population_changes_what_it_can(self) -> TuneSpec:
        name = self.scheduler
        if name not in POPULATION:
            return self
        if self.sampler != "random":
            raise ValueError(
                f"{name} draws its first population itself and sampler is {self.sampler}; use sampler: random"
            )
        for key in self.space:
            if not key.startswith(REWRITABLE) or key in FIXED_WITHIN:
                what = f"{name} cannot change {key} in the middle of training"
                raise ValueError(f"{what}; it can change what begins with {', '.join(REWRITABLE)}")
        if (self.trials or 0) < 2:
            raise ValueError(f"{name} needs a population; give trials: 4 or more")
        if name == "pb2" and all(dimension.listed for dimension in self.space.values()):
            raise ValueError(
                "pb2 chooses within ranges, and all values are listed; give one, or use scheduler: pbt"
            )
        return self

    @model_validator(mode="after")
    def the_trials_are_counted(self) -> TuneSpec:
        if self.sampler == "grid" and self.trials is not None:
            raise ValueError("a grid has as many trials as points; leave trials out")
        if self.sampler != "grid" and self.trials is None:
            raise ValueError("trials is missing; say how many")
        return self

    @model_validator(mode="after")
    def what_does_not_apply_is_not_given(self) -> TuneSpec:
        if self.grace is not None and self.scheduler not in ("asha", "median"):
            raise ValueError(f"grace has no meaning under scheduler {self.scheduler}; leave it out")
        if self.interval is not None and self.scheduler not in ("median", *POPULATION):
            raise ValueError(f"interval has no meaning under scheduler {self.scheduler}; leave it out")
        return self
