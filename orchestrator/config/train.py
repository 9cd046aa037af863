"""How it is trained: length, batch size, optimiser and numerics."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from orchestrator.config.optimizer import OptimizerSpec, in_steps
from orchestrator.config.stability import StabilitySpec
from orchestrator.config.strict import Positive, StrictModel

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
"""What matrix products are computed in."""
NEWER = ("freeze", "thaw", "continue_from", "reference", "sequence_warmup", "label_smoothing")
"""Keys that jobs of earlier versions lack; where they have their default they are no part of a run's identity."""


class SequenceWarmup(StrictModel):
    """Shorter sequences at the beginning: samples are cut into rows, and no token is left out."""

    length: Positive = Field(
        ge=8, description="tokens of a row at first; data.sequence_length is this, doubled some times"
    )
    steps: Positive = Field(
        description="steps after which rows are whole samples; between, the length is doubled"
    )

    def at(self, step: int, whole: int) -> int:
        """Tokens of a row in the step that follows `step` steps, of samples of `whole` tokens."""
        doublings = (whole // self.length).bit_length() - 1
        return min(self.length << (step * doublings // self.steps), whole) if step < self.steps else whole

    def fits(self, whole: int) -> bool:
        """Whether samples of `whole` tokens are reached by doubling, once at least."""
        times, rest = divmod(whole, self.length)
        return rest == 0 and times > 1 and times & (times - 1) == 0


class ContinueFrom(StrictModel):
    """Another run, from one of whose commits this one goes on as a phase of the same training: with its weights, its
    optimiser state, its count of steps and tokens, and its receipt."""

    run: str = Field(
        min_length=1,
        description="the run directory, which @<step>, @last or @best may follow; @last if none does",
    )
    position: Literal["keep", "restart"] = Field(
        default="keep",
        description="keep reads on in the same data, each sample that has not been read yet; restart reads data, which "
        "may be others, from their beginning",
    )
    schedule: Literal["keep", "restart"] = Field(
        default="keep",
        description="keep counts the steps of the learning-rate schedule from the beginning of training; restart from "
        "this phase on, its warm-up included",
    )


class TrainSpec(StrictModel):
    """Length, batch size, optimiser and numerics of training."""

    steps: Positive = Field(
        description="optimiser steps; with continue_from those of the run before are counted too"
    )
    global_batch: Positive = Field(description="sequences per step; the same at every number of workers")
    optimizer: OptimizerSpec = Field(
        default_factory=OptimizerSpec, description="how weights follow from gradients, and the learning rate"
    )
    precision: Literal["fp32", "bf16", "fp16", "fp8", "auto"] = Field(
        default="fp32",
        description="dtype of matrix products; weights and optimiser state are fp32. fp8 is bf16, but for the linear "
        "layers of blocks: their products forward and the gradients of their inputs have 8 bits. With auto the planner "
        "chooses the fastest of the others on the devices that the run begins on, and fp32 where none is faster; a run "
        "keeps it",
    )
    z_loss: float = Field(
        default=0.0, ge=0.0, description="weight of the squared logarithm of the softmax normaliser"
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="share of each label that is spread evenly over the vocabulary; losses are told without it",
    )
    compile: bool = Field(default=False, description="torch.compile every block")
    determinism: Literal["rerun", "bitwise"] = Field(
        default="rerun",
        description="bitwise: losses and weights are bit for bit the same at every data-parallel width",
    )
    virtual_shards: Positive = Field(
        default=8, description="parts of the global batch whose gradients bitwise computes separately"
    )
    stability: StabilitySpec = Field(default_factory=StabilitySpec)
    freeze: list[str] = Field(
        default_factory=list,
        description="patterns, as of file names, of parameters that are not trained; neither gradients nor optimiser "
        "state are kept of them, and no commit has them: they are read from where the run began",
    )
    reference: Literal["precomputed", "held"] = Field(
        default="precomputed",
        description="of dpo, ipo and kto: the log-probabilities of the model that the run began with are computed "
        "before the first step and kept beside the data, or a copy of its weights is held, for another forward pass a "
        "step",
    )
    thaw: dict[Positive, list[str]] = Field(
        default_factory=dict,
        description="gradual unfreezing: patterns of frozen parameters by the step after which they are trained too",
    )

    sequence_warmup: SequenceWarmup | None = Field(
        default=None, description="shorter sequences in the first steps, for a causal language model"
    )
    continue_from: ContinueFrom | None = Field(
        default=None,
        description="go on from another run's commit, with all that it has; a run directory may stand alone",
    )

    @field_validator("continue_from", mode="before")
    @classmethod
    def a_run_may_stand_alone(cls, given: Any) -> Any:
        return {"run": given} if isinstance(given, str) else given

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up."""
        return in_steps(self.optimizer.warmup, self.steps)

    @property
    def decay_steps(self) -> int:
        """Steps of the decay, 0 without one."""
        return in_steps(self.optimizer.decay, self.steps)

    @property
    def bitwise_shards(self) -> int:
        """The virtual shards that are computed separately; 0 unless bits are the same at every width."""
        return self.virtual_shards if self.determinism == "bitwise" else 0

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
        left = self.steps - self.warmup_steps
        if self.decay_steps > left:
            raise ValueError(
                f"optimizer.decay {decay} is longer than the {left} steps after the warm-up; "
                "shorten the decay or train longer"
            )
        if isinstance(decay, str) and self.optimizer.schedule == "wsd" and not self.decay_steps:
            raise ValueError(
                f"optimizer.decay {decay} of {self.steps} steps is less than one; lengthen it or train longer"
            )
        return self

    @model_validator(mode="after")
    def what_thaws_has_a_step_in_the_run(self) -> TrainSpec:
        if self.thaw and max(self.thaw) >= self.steps:
            raise ValueError(
                f"thaw {max(self.thaw)} is not below steps {self.steps}; thaw earlier or train longer"
            )
        if self.thaw and self.precision == "fp16":
            raise ValueError(
                "thaw counts the updates of each parameter, and fp16 skips some; set precision to bf16"
            )
        return self

    @property
    def dtype(self) -> Precision:
        """The precision, which is known: who begins a run, or plans one, has chosen it where the job says auto, see
        `orchestrator.resolve.precision`."""
        if self.precision == "auto":
            raise RuntimeError("train.precision auto has not been replaced by the precision that was chosen")
        return self.precision

    def thawed(self, step: int) -> list[str]:
        """The patterns of parameters that are frozen no more after `step` steps."""
        return [pattern for at in sorted(self.thaw) if at <= step for pattern in self.thaw[at]]

    @property
    def decay_from(self) -> int | None:
        """The step with which a decay of the learning rate begins, None without one."""
        return self.steps - self.decay_steps if self.decay_steps else None
