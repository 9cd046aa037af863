"""The optimiser of a job and its learning-rate schedule."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, GetPydanticSchema, ValidatorFunctionWrapHandler, WithJsonSchema, model_validator
from pydantic_core import core_schema

from orchestrator.config.object_reference import ObjectReference
from orchestrator.config.strict import Count, Fraction, StrictModel
from orchestrator.optim.kinds import KINDS

EXTENDABLE = ("constant", "inverse_sqrt", "wsd")
"""Schedules whose rates, before any decay, do not depend on the number of all steps. Others span the whole run."""
SHARE = r"^[0-9]+(\.[0-9]+)?%$"


def _steps_or_share(value: Any, parse_steps: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, str) and re.match(SHARE, value):
        return value
    if isinstance(value, str) and not value.strip().isdecimal():
        raise ValueError("is neither a number of steps nor a share of them such as 5%")
    return parse_steps(value)


Steps = Annotated[
    int | str,
    GetPydanticSchema(
        lambda _, handler: core_schema.no_info_wrap_validator_function(
            _steps_or_share,
            handler(Count),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda said: said),
        )
    ),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": SHARE}]}),
]
"""Steps, or a share of all steps such as "5%". The share is kept as text, because the total may change; `in_steps`
converts it.
"""


def in_steps(value: int | str, steps: int) -> int:
    """Return the number of steps: a share of `steps` is rounded down.

    Args:
        value: a number of steps, or a share such as "5%".
        steps: all steps.
    """
    return int(steps * _share(value) / 100) if isinstance(value, str) else value


def _share(text: str) -> float:
    """Return the percentage of a share."""
    return float(text.removesuffix("%"))


if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(KINDS)]


class ParameterGroup(StrictModel):
    """Parameters, by their names, that learn or decay otherwise than the rest."""

    match: list[str] = Field(
        min_length=1, description="patterns, as of file names, of parameters that are in no group before"
    )
    lr_scale: float = Field(default=1.0, gt=0.0, description="factor of their learning rate")
    weight_decay: float | None = Field(
        default=None, ge=0.0, description="overrides the optimizer's, for those that are matrices"
    )

    @model_validator(mode="after")
    def a_group_changes_something(self) -> ParameterGroup:
        if self.lr_scale == 1.0 and self.weight_decay is None:
            raise ValueError("the group changes nothing; give it lr_scale or weight_decay")
        return self


class OptimizerSpec(StrictModel):
    """AdamW (Loshchilov and Hutter, 2019), also with moments in 8 bits (Dettmers et al., 2022), LAMB (You et al.,
    2020), LARS (You et al., 2017), Lion (Chen et al., 2023), Muon (Jordan et al., 2024) for the matrices of the layers,
    with AdamW for the rest.

    LARS uses the first of betas as its momentum. An own one is `module:name`, see `workloads.own.protocols`; betas, eps
    and momentum are not for it.
    """

    ADDED_LATER: ClassVar[tuple[str, ...]] = ("momentum", "layer_decay", "groups", "first_lr")

    name: OptimizerName | ObjectReference = Field(
        default="adamw", description="the optimizer, or your own module:name"
    )
    lr: float = Field(default=3e-4, gt=0.0, description="the largest learning rate of the schedule")
    betas: tuple[Fraction, Fraction] = Field(
        default=(0.9, 0.95), description="decay of the averages of the gradient and of its square"
    )
    eps: float = Field(default=1e-8, gt=0.0, description="added to the root of the second average")
    weight_decay: float = Field(
        default=0.1, ge=0.0, description="applied to matrices, not to vectors, biases and norms"
    )
    momentum: Fraction = Field(default=0.95, description="muon: momentum of the matrices")
    layer_decay: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="factor of the learning rate from each layer to the one below it: heads learn at lr, the last "
        "layer at lr times this, embeddings slowest",
    )
    groups: list[ParameterGroup] = Field(
        default_factory=list,
        description="parameters with another learning rate or weight decay; the first that matches counts",
    )
    clip: float | None = Field(default=1.0, gt=0.0, description="largest global gradient norm")
    warmup: Steps = Field(
        default=0, description="steps of linear warm-up, or a share of train.steps such as 5%"
    )
    schedule: (
        Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt", "range_test"] | ObjectReference
    ) = Field(
        default="cosine",
        description="learning rate after the warm-up, or an own function module:name; "
        "wsd is constant up to the decay; a run under constant, wsd or "
        "inverse_sqrt can be extended by raising train.steps; range_test rises by the same factor from step to step, "
        "see `orchestrator run --lr-range`",
    )
    decay: Steps = Field(
        default=0,
        description="wsd: the last steps, in which the learning rate falls, or a share of train.steps such as 20%",
    )
    final_lr: float = Field(
        default=0.1, ge=0.0, le=1.0, description="linear, cosine, wsd: last learning rate as a share of lr"
    )

    first_lr: float = Field(
        default=1e-6, gt=0.0, lt=1.0, description="range_test: first learning rate as a share of lr"
    )

    @model_validator(mode="after")
    def keys_of_one_optimizer_are_not_for_others(self) -> OptimizerSpec:
        for optimizer, kind in KINDS.items():
            set_keys = set(kind.keys) - self.at_default(*kind.keys)
            if set_keys and self.name != optimizer:
                raise ValueError(
                    f"{min(set_keys)} is for {optimizer}, but this is {self.name}; remove it, or set betas"
                )
        return self

    @model_validator(mode="after")
    def an_own_optimizer_has_its_own_numbers(self) -> OptimizerSpec:
        set_keys = (
            {"betas", "eps"} - self.at_default("betas", "eps")
            if isinstance(self.name, ObjectReference)
            else set()
        )
        if set_keys:
            raise ValueError(f"{min(set_keys)} is not for {self.name}; give it in the options of name")
        return self

    @model_validator(mode="after")
    def only_wsd_has_a_decay(self) -> OptimizerSpec:
        percentage = _share(self.decay) if isinstance(self.decay, str) else self.decay
        if self.schedule == "wsd" and not percentage:
            raise ValueError("schedule wsd has no decay; set decay to its steps, or schedule to constant")
        if self.schedule != "wsd" and percentage:
            raise ValueError(
                f"decay {self.decay} is for schedule wsd, but this is {self.schedule}; remove it or set wsd"
            )
        return self

    @model_validator(mode="after")
    def only_a_range_test_has_a_first_rate(self) -> OptimizerSpec:
        if self.schedule != "range_test" and not self.at_default("first_lr"):
            raise ValueError(
                f"first_lr is for schedule range_test, but this is {self.schedule}; remove it, or set warmup"
            )
        return self

    def problem_with_mup(self) -> str:
        """Return why maximal update parametrisation does not work with this optimizer; empty if it does."""
        defined = [name for name, kind in KINDS.items() if kind.has_mup]
        if self.name in defined:
            return ""
        return (
            f"workload.mup says how {' and '.join(defined)} learn at another width, but the optimizer is {self.name}; "
            "set train.optimizer.name to one of them, or workload.mup to null"
        )

    def settled(self, steps: int) -> int | None:
        """Return how many first updates of a run of `steps` steps equal those of every longer run.

        None under a schedule that spans the whole run.
        """
        if self.schedule in EXTENDABLE:
            return steps - in_steps(self.decay, steps)
        return None
