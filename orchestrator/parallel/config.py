"""The key `parallel` of a job file: a layout given by hand, completely or in part."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from orchestrator.config.object_reference import ObjectReference, users_code
from orchestrator.config.strict import Positive, StrictModel
from orchestrator.config.workload import WorkloadSpec
from workloads.own.object_reference import is_object_reference

OF_PLANNER = frozenset({"rest", "cost"})
"""Keys that are not part of a layout."""


class ParallelSpec(StrictModel):
    """A layout given by hand, or with `rest: auto` a part of one. The data-parallel width follows from the number of
    workers, tp, pp and cp.
    """

    engine: Literal["torch", "deepspeed"] = Field(
        default="torch",
        description="the training engine: torch, this project's own, or deepspeed for ZeRO and offload",
    )
    tp: Positive = Field(
        default=1, description="tensor parallelism: number of ranks that split the matrices of each layer"
    )
    pp: Positive = Field(default=1, description="pipeline parallelism: number of ranks that split the layers")
    cp: Positive = Field(
        default=1, description="context parallelism: number of ranks that split each sequence"
    )
    ep: Positive = Field(
        default=1,
        description="expert parallelism: number of data-parallel ranks that split the experts of a layer",
    )
    zero: Literal[0, 1, 2, 3] = Field(
        default=0,
        description="what data-parallel ranks shard: 0 nothing, 1 optimizer state, 2 also gradients, 3 also "
        "weights",
    )
    shard: int | None = Field(
        default=None,
        ge=2,
        description="number of replicas over which ZeRO 2 and 3 shard weights and gradients, such as those of a "
        "node; gradients are summed between such groups once a step (HSDP); unset: all replicas",
    )
    micro_batch: Positive | None = Field(
        default=None,
        description="sequences that a rank computes at once; fewer if its share of the batch is no multiple of it",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="activations to recompute in the backward pass: none; selective, everything in a layer except "
        "the results of matrix multiplications and attention (with train.compile: except attention); or "
        "full, everything in a layer",
    )
    recompute_layers: int = Field(
        default=0,
        ge=0,
        description="recompute only this many first layers of each pipeline stage; 0: all of them",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = Field(
        default="1f1b", description="pipeline schedule"
    )
    virtual: int = Field(
        default=2, ge=2, le=64, description="stages of a rank in the interleaved and zero_bubble schedules"
    )
    first_less: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="number of layers that the embedding counts as when layers are assigned to stages; the first stage "
        "may so be left without layers",
    )
    last_less: int = Field(
        default=1,
        ge=0,
        le=1000,
        description="number of layers that the head counts as when layers are assigned to stages; the last stage may "
        "so be left without layers",
    )
    sequence: bool = Field(
        default=False,
        description="sequence parallelism: split norms and residuals over tensor-parallel ranks",
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        default="none",
        description="what to keep in host memory instead of GPU memory: optimizer state, or also weights",
    )
    rest: Literal["default", "auto"] = Field(
        default="default",
        description="how to set the keys that are missing here: by their defaults, or by the planner",
    )
    cost: ObjectReference | None = Field(
        default=None,
        description="your own code that adds seconds to a layout's predicted step time, or refuses the layout",
    )

    @property
    def divides_model(self) -> bool:
        """Whether the job file itself asks for tensor or pipeline parallelism."""
        return self.tp > 1 or self.pp > 1

    @property
    def own_code(self) -> dict[str, str]:
        """The user's planner cost with its key."""
        return users_code(("parallel.cost", self.cost))

    def problem(self, workload: WorkloadSpec) -> str:
        """Return why a job's model cannot be run like this; empty if it can."""
        if is_object_reference(workload.model) and self.engine != "torch":
            return (
                f"own models are run by the torch engine, and parallel.engine is {self.engine}; leave it out"
            )
        return ""

    @property
    def is_partial(self) -> bool:
        """Whether the planner chooses the missing keys."""
        return self.rest == "auto"

    @property
    def pins(self) -> dict[str, Any]:
        """Return the fields of the layout that the job file fixes. A micro-batch is included only if given."""
        fixed = self.model_fields_set if self.is_partial else set(type(self).model_fields)
        fields = {name: getattr(self, name) for name in type(self).model_fields if name in fixed - OF_PLANNER}
        return {name: value for name, value in fields.items() if value is not None}

    @model_serializer(mode="wrap")
    def _written(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave unset what the planner decides, so that the file reads back the same."""
        fields: dict[str, Any] = dump(self)
        if self.is_partial:
            return {name: value for name, value in fields.items() if name in self.model_fields_set}
        return {
            name: value
            for name, value in fields.items()
            if name != "rest" and (name, value) != ("cost", None)
        }


ParallelChoice: TypeAlias = Literal["auto"] | ParallelSpec
"""The key `parallel` of a job file."""


def cost_of(parallel: ParallelChoice) -> ObjectReference | None:
    """Return the user's own planner cost, see `orchestrator.planner.own_cost.Cost`."""
    return parallel.cost if isinstance(parallel, ParallelSpec) else None
