"""The job file's `tune`: the search space, the method and the limits. Imports neither torch nor Ray."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

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
"""Keys that may change in the middle of training. Jobs that differ only in these can load each other's commits."""
Mode: TypeAlias = Literal["min", "max"]
PARAMETERS = "parameters"
"""The metric that counts the parameters of a trial's last checkpoint."""
BYTES = "bytes"
"""The metric that counts the bytes of their weights, quantised as the trial's job says."""
SIZES = (PARAMETERS, BYTES)
"""The metrics that are known of a checkpoint without a measurement."""
SECOND = "second"
"""The key of the second metric in results and records of a search over two."""
WEIGHS_LOSS = "distill"
"""The section of a job file whose keys are weights of the parts of the loss."""
FIXED_WITHIN = ("train.optimizer.name", "parallel.engine")
"""Keys among these that may not change, because they determine which state a commit holds."""
POPULATION = ("pbt", "pb2")
"""Schedulers whose trials load each other's commits and continue with other values."""


class Dimension(StrictModel):
    """The values of one key, given by exactly one of these kinds."""

    grid: list[Any] | None = Field(
        default=None, min_length=1, description="try each of these (sampler: grid)"
    )
    choice: list[Any] | None = Field(default=None, min_length=1, description="one of these")
    uniform: tuple[float, float] | None = Field(default=None, description="lowest and highest")
    loguniform: tuple[float, float] | None = Field(
        default=None, description="lowest and highest value, uniform in the logarithm"
    )
    integer: tuple[int, int] | None = Field(default=None, description="lowest and highest integer")

    @property
    def kind(self) -> str:
        """Return which of KINDS is given."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def listed(self) -> list[Any] | None:
        """Return the values of a grid or choice; None for a range."""
        return self.grid or self.choice

    @property
    def ends(self) -> tuple[float, float]:
        """Return the lowest and the highest value of a range."""
        result = self.uniform or self.loguniform or self.integer
        assert result is not None
        return result

    @model_validator(mode="after")
    def exactly_one_kind(self) -> Dimension:
        set_kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(set_kinds) != 1:
            kinds = " and ".join(set_kinds) or "nothing"
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
    set: dict[str, Any] = Field(
        min_length=1, description="keys of parallel and resources with their new values"
    )

    @model_validator(mode="after")
    def only_where_it_runs_changes(self) -> Promotion:
        for key in self.set:
            if key.split(".")[0] not in ("parallel", "resources"):
                raise ValueError(f"{key} makes it another run; only parallel and resources may change here")
        return self


class SweepLimits(StrictModel):
    """Limits of the whole search, over all of its trials and commands."""

    steps: Positive | None = Field(default=None, description="total optimizer steps of all trials")
    hours: float | None = Field(
        default=None, gt=0, description="hours of wall-clock time while the search runs"
    )
    cost_usd: float | None = Field(
        default=None, gt=0, description="maximum cost, counted like limits.cost_usd of the job"
    )


class TuneSpec(StrictModel):
    """A search: trials of this job that differ in the keys of `space`. Each trial is a run."""

    space: dict[str, Dimension] = Field(
        min_length=1, description="dotted keys of the job with their possible values"
    )
    metric: str | list[str] = Field(
        default="loss",
        description="a column of metrics.jsonl, averaged over the last steps; or a metric of the last evaluation, "
        "such as validation.loss; or parameters or bytes, the size of the model. A list of two: the trials that no "
        "other one beats in both are the result",
    )
    mode: Mode | list[Mode] | None = Field(
        default=None,
        description="minimise or maximise the metric, or a list for two metrics; unset: max for accuracy and similar "
        "metrics, else min",
    )
    window: Positive = Field(
        default=10,
        description="number of last steps that the metric is averaged over, at most a quarter of those done",
    )
    sampler: Literal["random", "grid", "tpe"] = Field(
        default="random", description="how values are chosen; tpe is Optuna's (Bergstra et al., 2011)"
    )
    scheduler: Literal["none", "asha", "hyperband", "median", "pbt", "pb2"] = Field(
        default="none",
        description="how trials are stopped or continued: asha (Li et al., 2018), pbt (Jaderberg et al., 2017), "
        "pb2 (Parker-Holder et al., 2020)",
    )
    trials: Positive | None = Field(
        default=None, description="number of trials; a grid has one for each point"
    )
    concurrency: Positive | None = Field(
        default=None, description="trials that run at the same time; unset: as many as fit the cluster"
    )
    grace: Positive | None = Field(
        default=None,
        description="steps before the first decision; unset: the warm-up, and all steps divided by reduction twice",
    )
    reduction: int = Field(default=4, ge=2, description="one in this many trials continues (asha, hyperband)")
    interval: Positive | None = Field(
        default=None,
        description="steps between decisions (median, pbt, pb2); unset: a tenth of all steps. Population methods "
        "decide nothing during the warm-up",
    )
    promote: list[Promotion] = Field(default_factory=list, description="layouts for trials that continue")
    register_as: str | None = Field(
        default=None,
        description="model name in MLflow's registry: the best model becomes a version of it, and gets the "
        "alias best if it is better than the version that has it",
    )
    limits: SweepLimits = Field(default_factory=SweepLimits)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics: one, or two."""
        return (self.metric,) if isinstance(self.metric, str) else tuple(self.metric)

    @property
    def directions(self) -> tuple[Mode, ...]:
        """Return min or max for each metric: `mode` if given, else the metric's own direction."""
        if isinstance(self.mode, list):
            return tuple(self.mode)
        own: list[Mode] = ["max" if larger_is_better(metric) else "min" for metric in self.metrics]
        return tuple(self.mode or each for each in own)

    @property
    def first(self) -> str:
        """Return the metric, the first one of two."""
        return self.metrics[0]

    @property
    def direction(self) -> Mode:
        """Return the direction of the first metric."""
        return self.directions[0]

    @model_validator(mode="after")
    def two_metrics_are_compared_at_the_end(self) -> TuneSpec:
        if isinstance(self.metric, list) and len(set(self.metrics)) != len(self.metrics):
            raise ValueError(f"metric names {self.first} twice; name two different ones")
        if isinstance(self.metric, list) and len(self.metrics) != 2:
            raise ValueError(f"metric lists {len(self.metrics)}; give one metric, or a list of two")
        if isinstance(self.mode, list) and len(self.mode) != len(self.metrics):
            raise ValueError(
                f"mode lists {len(self.mode)}, and there are {len(self.metrics)} metrics; give one for each"
            )
        if len(self.metrics) == 1:
            if self.first in SIZES:
                raise ValueError(
                    f"{self.first} is for a list of two metrics; add the metric that they should keep"
                )
            return self
        if isinstance(self.mode, str):
            raise ValueError(f"mode {self.mode} is for one metric; give a list for both, or leave it out")
        if self.scheduler != "none":
            raise ValueError(
                f"{self.scheduler} decides by one metric which trials continue, but this search has two; set "
                "scheduler: none"
            )
        if self.register_as:
            raise ValueError("register_as is for one best model, and two metrics have several; leave it out")
        return self

    @model_validator(mode="after")
    def the_sampler_fits_the_space(self) -> TuneSpec:
        for key, dimension in self.space.items():
            if self.sampler == "grid" and dimension.listed is None:
                hint = "list its values, or use sampler: random"
                raise ValueError(f"sampler grid needs listed values, and {key} is {dimension.kind}; {hint}")
            if self.sampler != "grid" and dimension.kind == "grid":
                raise ValueError(f"{key} is a grid, but sampler is {self.sampler}; write choice instead")
        return self

    @model_validator(mode="after")
    def a_population_changes_what_it_can(self) -> TuneSpec:
        name = self.scheduler
        if name not in POPULATION:
            return self
        if self.sampler != "random":
            raise ValueError(
                f"{name} draws its first population at random, but sampler is {self.sampler}; use sampler: random"
            )
        for key in self.space:
            if not key.startswith(REWRITABLE) or key in FIXED_WITHIN:
                problem = f"{name} cannot change {key} in the middle of training"
                raise ValueError(f"{problem}; it can change what begins with {', '.join(REWRITABLE)}")
        if (self.trials or 0) < 2:
            raise ValueError(f"{name} needs a population; give trials: 4 or more")
        if name == "pb2" and all(dimension.listed for dimension in self.space.values()):
            raise ValueError(
                "pb2 chooses within ranges, but all keys list their values; give one key a range, or use scheduler: pbt"
            )
        return self

    @model_validator(mode="after")
    def the_metric_is_no_sum_that_trials_define(self) -> TuneSpec:
        weighted = next((key for key in self.space if key.partition(".")[0] == WEIGHS_LOSS), None)
        if weighted and "loss" in self.metrics:
            raise ValueError(
                f"loss is the weighted sum that {weighted} changes, so trials cannot be compared by it; set metric to "
                "validation.loss"
            )
        return self

    @model_validator(mode="after")
    def the_trials_are_counted(self) -> TuneSpec:
        if self.sampler == "grid" and self.trials is not None:
            raise ValueError("a grid has one trial per point; leave trials out")
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
