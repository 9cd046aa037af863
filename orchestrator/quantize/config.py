"""Quantisation-aware training: linear layers train with weights that are rounded as the export will round them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from orchestrator.config.records import REFERENCED, REWARDED
from orchestrator.config.strict import Count, Positive, StrictModel
from orchestrator.config.workload import WorkloadSpec
from orchestrator.train.config import TrainSpec
from workloads.model.scheme import BLOCK, OF_GGUF, Format, Scheme

GROUP = 128
"""Weights that share a scale if the job does not say."""
Pattern = Annotated[str, Field(min_length=1)]


class QuantizeSpec(StrictModel):
    """How the linear layers of blocks are quantised. Embeddings, heads, routers and experts stay in full precision."""

    ADDED_LATER: ClassVar[tuple[str, ...]] = ("int8",)

    weights: Format = Field(
        description="format of the weights: int8 and int4, exported for transformers in compressed-tensors' form, int8 "
        "with group row also as ONNX; q8_0 and q4_0, exported as GGUF"
    )
    group: Positive | Literal["row"] | None = Field(
        default=None,
        description="consecutive weights of a row that share a scale; unset: 128, and 32 for q8_0 and q4_0",
    )
    activations: Literal["none", "dynamic"] = Field(
        default="none",
        description="dynamic: the inputs of these layers are rounded to int8, with a scale per token",
    )
    match: list[Pattern] = Field(
        default=["*"],
        min_length=1,
        description="patterns of weights to quantise, among those of linear layers",
    )
    keep: list[Pattern] = Field(
        default_factory=list, description="patterns of weights that stay in full precision"
    )
    int8: list[Pattern] = Field(
        default_factory=list,
        description="with weights: int4, patterns of weights that have int8 instead; checkpoint export --mean-bits "
        "finds which need it",
    )
    from_step: Count = Field(
        default=0, description="steps that are trained in full precision before rounding begins"
    )

    @model_validator(mode="after")
    def parts_are_those_of_the_format(self) -> QuantizeSpec:
        if self.int8 and self.weights != "int4":
            raise ValueError(f"int8 is for weights int4, and these are {self.weights}; leave it out")
        if self.weights not in OF_GGUF:
            return self
        if self.group not in (None, BLOCK):
            raise ValueError(
                f"group {self.group} is not that of {self.weights}, which is {BLOCK}; leave it out"
            )
        if self.activations != "none":
            raise ValueError(f"activations are not stored with {self.weights}; set activations to none")
        return self

    @property
    def scheme(self) -> Scheme:
        """The quantisation as the model applies it."""
        if self.group is None:
            group = BLOCK if self.weights in OF_GGUF else GROUP
        elif self.group == "row":
            group = 0
        else:
            group = self.group
        return Scheme(
            self.weights,
            group,
            self.activations == "dynamic",
            match=tuple(self.match),
            keep=tuple(self.keep),
            int8=tuple(self.int8),
        )

    def at(self, step: int) -> Scheme | None:
        """The quantisation of the weights after `step` steps; None while they are in full precision."""
        return self.scheme if step >= self.from_step else None

    def problem(self, workload: WorkloadSpec, train: TrainSpec, precision: str) -> str:
        """Return what a job has that cannot be quantised; empty if nothing.

        Args:
            workload: the key `workload` of the job.
            train: the key `train`.
            precision: that of the run.
        """
        if workload.adapter is not None:
            return (
                "quantize rounds trained weights, and an adapter changes them when it is merged; leave one of them "
                "out"
            )
        if workload.head_penalty:
            return (
                "quantize rounds weights, into which the export of a run with workload.head_penalty folds gates; "
                "quantise in a run that begins with that export"
            )
        if precision == "fp8":
            return "quantize and train.precision fp8 both replace linear layers; set the precision to bf16"
        if train.compile:
            return (
                "train.compile may compute the rounding with other bits than the export; set it to false with "
                "quantize"
            )
        if workload.objective in (*REFERENCED, *REWARDED):
            return f"quantize would round the reference of {workload.objective} too; leave it out"
        if self.from_step >= train.steps:
            return (
                f"quantize.from_step {self.from_step} is not before the last of {train.steps} steps; lower it"
            )
        return ""
