"""The key `parallel` of a job file: a layout that is given by hand, whole or in part."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from orchestrator.config.object_reference import ObjectReference
from orchestrator.config.strict import Positive, StrictModel

OF_PLANNER = frozenset({"rest", "cost"})
"""Keys that are no part of a layout."""


class ParallelSpec(StrictModel):
    """A layout given by hand, or with `rest: auto` a part of one. The data-parallel width follows from the number of
    workers, tp, pp and cp."""

    engine: Literal["torch", "deepspeed"] = Field(
        default="torch",
        description="what makes a step: this project's own engine, or DeepSpeed for ZeRO and offload",
    )
    tp: Positive = Field(
        default=1, description="tensor parallelism: ranks that divide the matrices of each layer"
    )
    pp: Positive = Field(default=1, description="pipeline parallelism: ranks that divide the layers")
    cp: Positive = Field(default=1, description="context parallelism: ranks that divide each sequence")
    ep: Positive = Field(
        default=1, description="expert parallelism: data-parallel ranks that divide the experts of a layer"
    )
    zero: Literal[0, 1, 2, 3] = Field(
        default=0,
        description="what data-parallel ranks divide: nothing, optimiser state, gradients too, or weights as well",
    )
    shard: int | None = Field(
        default=None,
        ge=2,
        description="replicas over which ZeRO 2 and 3 divide weights and gradients, such as those of a node, between "
        "copies of which gradients are summed once a step (HSDP); without it over all",
    )
    micro_batch: Positive | None = Field(default=None, description="sequences that a rank computes at once")
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="activations that the backward pass computes again: none, all within a layer but the results of "
        "matrix products and attention (under train.compile of attention alone), or all within a layer",
    )
    recompute_layers: int = Field(
        default=0,
        ge=0,
        description="recompute the first layers of each pipeline stage alone; 0 is all of them",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = Field(
        default="1f1b", description="pipeline schedule"
    )
    virtual: int = Field(
        default=2, ge=2, le=64, description="stages of a rank under interleaved and zero_bubble schedules"
    )
    first_less: int = Field(
        default=0, ge=0, le=1000, description="layers that the embedding counts as where a pipeline is cut"
    )
    last_less: int = Field(
        default=1, ge=0, le=1000, description="layers that the head counts as where a pipeline is cut"
    )
    sequence: bool = Field(
        default=False,
        description="sequence parallelism: norms and residuals are split over tensor-parallel ranks",
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        default="none",
        description="what is kept in host memory instead of the GPU's: optimiser state, or weights too",
    )
    rest: Literal["default", "auto"] = Field(
        default="default",
        description="what is not written here: as its default says, or chosen by the planner",
    )
    cost: ObjectReference | None = Field(
        default=None,
        description="own code that adds seconds to those which the planner predicts of a layout, or refuses it",
    )

    @property
    def divides_model(self) -> bool:
        """Whether the job file itself asks for tensor or pipeline parallelism."""
        return self.tp > 1 or self.pp > 1

    @property
    def is_partial(self) -> bool:
        """Whether the planner chooses what is not written."""
        return self.rest == "auto"

    @property
    def pins(self) -> dict[str, Any]:
        """What the job file fixes of the layout, by the names of its fields; a micro-batch only if there is one."""
        fixed = self.model_fields_set if self.is_partial else set(type(self).model_fields)
        found = {name: getattr(self, name) for name in type(self).model_fields if name in fixed - OF_PLANNER}
        return {name: value for name, value in found.items() if value is not None}

    @model_serializer(mode="wrap")
    def _written(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What is left to the planner stays unwritten, so that the file reads the same again."""
        found: dict[str, Any] = dump(self)
        if self.is_partial:
            return {name: value for name, value in found.items() if name in self.model_fields_set}
        return {
            name: value for name, value in found.items() if name != "rest" and (name, value) != ("cost", None)
        }


def cost_of(parallel: Literal["auto"] | ParallelSpec) -> ObjectReference | None:
    """The user's own planner cost, see `orchestrator.planner.own_cost.Cost`."""
    return parallel.cost if isinstance(parallel, ParallelSpec) else None
