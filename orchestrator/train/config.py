"""How to train: length, batch size, optimizer and numerics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from orchestrator.config.object_reference import users_code
from orchestrator.config.records import REFERENCED, REWARDED
from orchestrator.config.strict import Positive, StrictModel
from orchestrator.config.workload import WorkloadSpec
from orchestrator.optim.config import OptimizerSpec, in_steps
from workloads.own.object_reference import is_object_reference


class StabilitySpec(StrictModel):
    """What to do if a loss is not a number, or jumps: return to the last commit, and continue without those samples."""

    spike: float | None = Field(
        default=None,
        gt=0.0,
        description="a loss this many robust standard deviations above the median of recent losses is a spike; "
        "unset: spikes are not looked for",
    )
    window: int = Field(
        default=32,
        ge=8,
        le=1024,
        description="number of recent losses to compare with, and of steps within which retries are counted",
    )
    skip: int = Field(
        default=1,
        ge=1,
        description="global batches to skip from the unstable step on; each retry also skips one batch before it",
    )
    retries: int = Field(
        default=3,
        ge=0,
        description="number of retries for instabilities within `window` steps; the next one ends the run",
    )
    lr_scale: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="factor on the learning rate from that step on, applied at every retry",
    )


class LayerStatisticsSpec(StrictModel):
    """Statistics by layer in some steps: norms of each trained parameter and its gradient, into rows, MLflow and the
    report. Other steps cost nothing.
    """

    every: Positive = Field(description="optimizer steps from one collection to the next")
    activations: bool = Field(
        default=False, description="also the root mean square of each layer's output, padding included"
    )
    histograms: bool = Field(
        default=False,
        description="also how many elements of each parameter and gradient have which power of two",
    )


Precision = Literal["fp32", "bf16", "fp16", "fp8"]
"""The dtypes of matrix products."""


class SequenceWarmup(StrictModel):
    """Shorter sequences at the beginning: samples are cut into rows, and no token is dropped."""

    length: Positive = Field(
        ge=8, description="initial tokens in a row; data.sequence_length must be this times a power of two"
    )
    steps: Positive = Field(
        description="steps after which rows are whole samples; until then, the length doubles in stages"
    )

    def at(self, step: int, sample_length: int) -> int:
        """Return the tokens of a row in the step after `step` steps, for samples of `sample_length` tokens.

        Args:
            step: steps done.
            sample_length: `data.sequence_length`.
        """
        # log2: `fits` has checked that the ratio is a power of two. Each doubling gets an equal part of the steps.
        doublings = (sample_length // self.length).bit_length() - 1
        return (
            min(self.length << (step * doublings // self.steps), sample_length)
            if step < self.steps
            else sample_length
        )

    def fits(self, sample_length: int) -> bool:
        """Return whether doubling, at least once, reaches samples of `sample_length` tokens."""
        ratio, remainder = divmod(sample_length, self.length)
        return remainder == 0 and ratio > 1 and ratio & (ratio - 1) == 0


class ContinueFrom(StrictModel):
    """Continue another run from one of its commits, as a further phase of the same training: with its weights,
    optimizer state, counts of steps and tokens, and receipt.
    """

    run: str = Field(
        min_length=1,
        description="the run directory, optionally followed by @<step>, @last or @best; default: @last",
    )
    position: Literal["keep", "restart"] = Field(
        default="keep",
        description="keep continues in the same data, with the samples not yet read; restart reads data, possibly "
        "other data, from its beginning",
    )
    schedule: Literal["keep", "restart"] = Field(
        default="keep",
        description="keep counts the learning-rate schedule from the beginning of training; restart counts it "
        "from this phase on, with a new warm-up",
    )


@dataclass(frozen=True)
class Reading:
    """How the steps of a run read samples, as arithmetic on numbers of steps.

    A batch is what one step trains on. A step reads its own batch, unless several updates learn from the same generated
    answers: then the steps of a rollout go through its batches several times, in the same order.

    Attributes:
        samples: samples of a batch: rows, or prompts, each of which has several rows.
        batches: batches of a rollout; 1 without rollouts.
        epochs: how often the steps of a rollout go through its batches; 1 without rollouts.
    """

    samples: int
    batches: int = 1
    epochs: int = 1

    @property
    def steps(self) -> int:
        """Steps of a rollout. Between them nothing is saved, and no task ends."""
        return self.batches * self.epochs

    def batch_of(self, step: int) -> int:
        """Return the number of the batch that the step after `step` steps trains on."""
        rollouts, updates = divmod(step, self.steps)
        return rollouts * self.batches + updates % self.batches

    def batches_before(self, step: int) -> int:
        """Return how many batches the first `step` steps read."""
        rollouts, updates = divmod(step, self.steps)
        return rollouts * self.batches + min(updates, self.batches)

    def samples_before(self, step: int) -> int:
        """Return how many samples the first `step` steps read."""
        return self.batches_before(step) * self.samples

    def first_step_of(self, sample: int) -> int:
        """Return the steps before the first one that trains on a sample, by the number of the sample."""
        rollouts, batch = divmod(sample // self.samples, self.batches)
        return rollouts * self.steps + batch


class TrainSpec(StrictModel):
    """Length, batch size, optimiser and numerics of training."""

    # What was done about an instability is recorded, and the rules may change for the next one.
    NO_IDENTITY: ClassVar[tuple[str, ...]] = ("stability", "layer_statistics")
    ADDED_LATER: ClassVar[tuple[str, ...]] = (
        *("freeze", "thaw", "continue_from", "reference", "sequence_warmup", "label_smoothing"),
    )

    steps: Positive = Field(
        description="optimizer steps; with continue_from, includes the steps of the run before"
    )
    global_batch: Positive = Field(description="sequences in a step, whatever the number of workers")
    optimizer: OptimizerSpec = Field(
        default_factory=OptimizerSpec, description="the optimizer and the learning rate"
    )
    precision: Literal["fp32", "bf16", "fp16", "fp8", "auto"] = Field(
        default="fp32",
        description="dtype of matrix multiplications; weights and optimizer state are fp32. fp8 is bf16, except "
        "that the linear layers of blocks compute their forward pass and input gradients in 8 bits. With "
        "auto, the planner chooses the fastest dtype except fp8 on the devices that the run starts "
        "on, or fp32 if none is faster; the run keeps it",
    )
    z_loss: float = Field(
        default=0.0,
        ge=0.0,
        description="weight of the z-loss: the squared logarithm of the softmax normaliser",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="label smoothing: share of each label that is spread evenly over the vocabulary; reported "
        "losses exclude it",
    )
    compile: bool = Field(default=False, description="compile every block with torch.compile")
    determinism: Literal["rerun", "bitwise"] = Field(
        default="rerun",
        description="bitwise: losses and weights are bit-identical at every data-parallel width",
    )
    virtual_shards: Positive = Field(
        default=8,
        description="number of parts of the global batch whose gradients bitwise computes separately",
    )
    stability: StabilitySpec = Field(default_factory=StabilitySpec)
    freeze: list[str] = Field(
        default_factory=list,
        description="patterns, as for file names, of parameters to freeze. They have no gradients and no "
        "optimizer state, and checkpoints leave them out: they are read from the base",
    )
    reference: Literal["precomputed", "held"] = Field(
        default="precomputed",
        description="for dpo, ipo and kto: how to get the log-probabilities of the initial model. Either they "
        "are computed before the first step and stored next to the data, or a copy of the weights is kept, at "
        "the cost of another forward pass in every step",
    )
    thaw: dict[Positive, list[str]] = Field(
        default_factory=dict,
        description="gradual unfreezing: for each step, patterns of the frozen parameters to train after it",
    )

    sequence_warmup: SequenceWarmup | None = Field(
        default=None, description="shorter sequences in the first steps, for a causal language model"
    )
    continue_from: ContinueFrom | None = Field(
        default=None,
        description="continue another run from a commit, with its complete state; may be just its run directory",
    )

    layer_statistics: LayerStatisticsSpec | None = Field(
        default=None, description="statistics by layer in some steps; unset: none"
    )

    @field_validator("continue_from", mode="before")
    @classmethod
    def continue_from_may_be_a_run(cls, value: Any) -> Any:
        return {"run": value} if isinstance(value, str) else value

    @property
    def warmup_steps(self) -> int:
        """Return the steps of the warm-up."""
        return in_steps(self.optimizer.warmup, self.steps)

    @property
    def decay_steps(self) -> int:
        """Return the steps of the decay; 0 without one."""
        return in_steps(self.optimizer.decay, self.steps)

    @property
    def bitwise_shards(self) -> int:
        """Return the number of virtual shards that are computed separately; 0 unless bits are the same at every
        width.
        """
        return self.virtual_shards if self.determinism == "bitwise" else 0

    @property
    def keeps_row_length(self) -> bool:
        """Return whether rows keep their full length, whatever their samples: their shapes must not change, or the bits
        must not depend on them.
        """
        return bool(self.compile or self.bitwise_shards or self.sequence_warmup)

    @model_validator(mode="after")
    def virtual_shards_divide_the_batch(self) -> TrainSpec:
        shards = self.virtual_shards
        if self.determinism == "bitwise" and (shards & (shards - 1) or self.global_batch % shards):
            raise ValueError(
                f"virtual_shards {shards} must be a power of two that divides global_batch {self.global_batch}; "
                "change one of them"
            )
        return self

    @model_validator(mode="after")
    def warmup_ends_before_training(self) -> TrainSpec:
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"optimizer.warmup {self.optimizer.warmup} is not below steps {self.steps}; "
                "shorten the warm-up or train longer"
            )
        return self

    @model_validator(mode="after")
    def decay_fits_after_the_warmup(self) -> TrainSpec:
        decay = self.optimizer.decay
        remaining = self.steps - self.warmup_steps
        if self.decay_steps > remaining:
            raise ValueError(
                f"optimizer.decay {decay} is longer than the {remaining} steps after the warm-up; "
                "shorten the decay or train longer"
            )
        if isinstance(decay, str) and self.optimizer.schedule == "wsd" and not self.decay_steps:
            raise ValueError(
                f"optimizer.decay {decay} of {self.steps} steps is less than one; lengthen it or train longer"
            )
        return self

    @model_validator(mode="after")
    def thaw_steps_are_in_the_run(self) -> TrainSpec:
        if self.thaw and max(self.thaw) >= self.steps:
            raise ValueError(
                f"thaw {max(self.thaw)} is not below steps {self.steps}; thaw earlier or train longer"
            )
        if self.thaw and self.precision == "fp16":
            raise ValueError(
                "thaw counts the updates of each parameter, but fp16 skips some; set precision to bf16"
            )
        return self

    @property
    def dtype(self) -> Precision:
        """The precision. A job's auto must have been replaced before, see `orchestrator.resolve.precision`."""
        if self.precision == "auto":
            raise RuntimeError("train.precision auto has not been replaced by the precision that was chosen")
        return self.precision

    def thawed(self, step: int) -> list[str]:
        """Return the patterns of frozen parameters that are trained after `step` steps."""
        return [
            pattern
            for thaw_step in sorted(self.thaw)
            if thaw_step <= step
            for pattern in self.thaw[thaw_step]
        ]

    @property
    def decay_from(self) -> int | None:
        """Return the first step of the learning rate's decay; None without one."""
        return self.steps - self.decay_steps if self.decay_steps else None

    @property
    def own_code(self) -> dict[str, str]:
        """The user's optimizer and schedule, each with its key."""
        return users_code(
            ("train.optimizer.name", self.optimizer.name),
            ("train.optimizer.schedule", self.optimizer.schedule),
        )

    def identity(self) -> dict[str, Any]:
        """Return the keys that determine the weights. A warm-up or decay as a share of the steps counts in steps."""
        steps = {"warmup": self.warmup_steps, "decay": self.decay_steps}
        return super().identity() | {"optimizer": self.optimizer.identity() | steps}

    def problem(self, workload: WorkloadSpec, *, sequence_length: int, averaged: int, is_search: bool) -> str:
        """Return what of a job does not go with how it trains; empty if everything does.

        Args:
            workload: its model.
            sequence_length: tokens of a sample.
            averaged: number of earlier commits in the mean that is exported, 0 without a mean.
            is_search: whether the job is a search over its keys.
        """
        return (
            self._problem_with_own_model(workload)
            or ("" if workload.mup is None else self.optimizer.problem_with_mup())
            or self._problem_with_warmup(workload.objective, sequence_length)
            or self._problem_with_reference(workload.objective)
            or self._problem_with_continuing(workload, is_search)
            or self._problem_with_thawing(workload, averaged)
        )

    def _problem_with_own_model(self, workload: WorkloadSpec) -> str:
        for key in ("z_loss", "label_smoothing") if is_object_reference(workload.model) else ():
            if getattr(self, key):
                return f"train.{key} is for losses of this project, and {workload.model} has its own; set it to 0"
        return ""

    def _problem_with_warmup(self, objective: str, sequence_length: int) -> str:
        warmup = self.sequence_warmup
        if warmup is not None and objective != "causal_lm":
            return f"train.sequence_warmup needs causal_lm, and the objective is {objective}; leave it out"
        if warmup is not None and not warmup.fits(sequence_length):
            return (
                f"train.sequence_warmup.length {warmup.length} is not data.sequence_length {sequence_length} halved "
                "some times; change one of them"
            )
        return ""

    def _problem_with_reference(self, objective: str) -> str:
        if self.reference == "held" and objective not in (*REFERENCED, *REWARDED):
            return f"train.reference is for {', '.join(REFERENCED)}, but this is {objective}; leave it out"
        return ""

    def _problem_with_continuing(self, workload: WorkloadSpec, is_search: bool) -> str:
        if self.continue_from is None:
            return ""
        needs_base = self.needs_base(workload) or workload.objective in REFERENCED
        if workload.grow or workload.shrink or (workload.init_from and not needs_base):
            return (
                "train.continue_from brings the weights of another run, and so does workload.init_from; leave one "
                "out"
            )
        if is_search:
            return (
                "tune searches over new runs; leave out train.continue_from, or start from weights alone, by "
                "workload.init_from"
            )
        return ""

    def _problem_with_thawing(self, workload: WorkloadSpec, averaged: int) -> str:
        if workload.shrink and self.freeze:
            return (
                "train.freeze leaves weights out of commits, and workload.shrink chooses them once; leave out one of "
                "them"
            )
        if not self.thaw:
            return ""
        if not self.reads_base(workload):
            return "train.thaw thaws frozen parameters, but this job freezes none; set train.freeze"
        if workload.adapter and workload.adapter.quantize != "none":
            return (
                "train.thaw would train weights that workload.adapter.quantize keeps in 4 bits; leave one of them "
                "out"
            )
        if averaged:
            return "checkpoint.average.last is a mean of checkpoints, and those before a thaw lack weights; use ema"
        return ""

    def reads_base(self, workload: WorkloadSpec) -> bool:
        """Return whether commits lack weights, which are read from where the run began."""
        return bool(self.freeze or workload.adapter)

    def needs_base(self, workload: WorkloadSpec) -> bool:
        """Return whether every start needs the weights that the run began with: commits lack some, or a loss compares
        with them."""
        return self.reads_base(workload) or self.reference == "held"
