"""Commits of a job: when to make and keep them, and what to export with which weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.config.strict import Positive, StrictModel
from orchestrator.config.workload import AdapterSpec
from orchestrator.data.config import CleanStep, Source
from orchestrator.export.kinds import OF_THE_CORE, names, with_numbers
from orchestrator.observe.config import TrackingSpec

SNAPSHOT_SHARE = 0.03
"""Share of a rank's time that snapshots may cost with `snapshot_every: auto`."""
GENERATIONS = 2
"""Copies of its state that a writer holds without snapshots: one is written to storage while the other is filled."""
SNAPSHOT_GENERATIONS = 2
"""More of them with snapshots: the last whole one, and the newest that this writer has made."""


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a job. A run directory is compared with it, so that a run continues only with its own job.

    Attributes:
        keys: what makes two runs the same run, see `JobSpec.identity`.
        own_code: the user's own code, see `JobSpec.own_code`.
        accepted: hashes of changed code that the job accepts.
        set_sources: the held-out sets with text of their own, see `JobSpec.set_sources`.
        clean: the cleaning steps.
    """

    keys: Mapping[str, Any]
    own_code: Mapping[str, str]
    accepted: Sequence[str]
    set_sources: Mapping[str, tuple[str, list[Source]]]
    clean: Sequence[CleanStep]

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return int(self.keys["train"]["steps"])


class AverageSpec(StrictModel):
    """An average of the weights over training, which is evaluated and exported instead of them. Give one of the
    keys."""

    ema: float | None = Field(
        default=None,
        gt=0.0,
        lt=1.0,
        description="decay of an exponential moving average, updated at every step and part of every commit; "
        "0.999 averages about the last 1000 steps",
    )
    last: int | None = Field(
        default=None,
        ge=2,
        le=1000,
        description="average the weights of this many last commits, which are kept for it. The average is "
        "computed when a commit is evaluated or exported, so the run's own evaluations do not use it",
    )

    @model_validator(mode="after")
    def is_of_one_kind(self) -> AverageSpec:
        if (self.ema is None) == (self.last is None):
            raise ValueError(
                "average has one of the keys ema and last; write it as in {ema: 0.999} or {last: 5}"
            )
        return self


NO_EXPORT = {
    "export": None,
    "export_to": None,
    "export_at": "end",
    "export_names": None,
    "export_numbers": None,
    "push": None,
}
"""The export keys of `checkpoint` in a job that exports nothing."""


def _is_a_form(name: str) -> str:
    if name not in OF_THE_CORE and name not in (known := names()):
        *others, last = map(repr, known)
        raise PydanticCustomError("export", f"Input should be {', '.join(others)} or {last}")
    return name


def _forms(schema: dict[str, Any]) -> None:
    """Give the JSON Schema the forms that are installed."""
    (text,) = (option for option in schema["anyOf"] if option["type"] == "string")
    text["enum"] = names()


class CheckpointSpec(StrictModel):
    """When to commit, what to keep, and what to export."""

    every: Positive = Field(default=100, description="steps between commits")
    keep: Positive = Field(default=3, description="number of newest commits to keep")
    keep_every: Positive | None = Field(
        default=None, description="also keep commits whose step is a multiple of this"
    )
    keep_best: bool | str = Field(
        default=False,
        description="also keep the best commit: by the training loss, averaged since the commit before, or by an "
        "evaluation's metric such as validation.loss; then the best one is exported",
    )
    average: AverageSpec | None = Field(
        default=None, description="the average of the weights to evaluate and export"
    )
    snapshot_every: Positive | Literal["auto"] | None = Field(
        default="auto",
        description="steps between snapshots in the memory of nodes, which outlive the loss of any one node; "
        "auto: as often as costs three percent of the time, if there are several nodes with enough memory",
    )
    export: Annotated[str, AfterValidator(_is_a_form)] | None = Field(
        default="hf",
        json_schema_extra=_forms,
        description="what to export: hf, a model for transformers, with an adapter merged; adapter, the adapter "
        "alone, for peft; safetensors, the weights of your own model under their names; dcp, gguf "
        "and onnx, other formats made from hf",
    )
    export_names: Literal["hf", "torchtitan", "olmo"] | None = Field(
        default=None, description="with export dcp: the naming of the tensors; unset: hf"
    )
    export_numbers: str | None = Field(
        default=None,
        description="the format of the matrices: with export gguf f32, f16, bf16, q8_0 or q4_0; with onnx f32, int8 "
        "(activations are rounded as they come) or int8_static (by ranges measured on training samples); unset: f16 "
        "of gguf, f32 of onnx",
    )
    export_at: Literal["end", "commit"] = Field(
        default="end", description="export once at the end, or every commit while training continues"
    )
    export_to: str | None = Field(
        default=None, description="folder or URI of the export; unset: <run>/export"
    )
    push: str | None = Field(
        default=None,
        description="USER/NAME: upload the final export to this private repository of the Hugging Face Hub; the token "
        "is HF_TOKEN where the run's controller is. A failure is reported, and does not fail the run",
    )

    @model_validator(mode="after")
    def what_is_kept_is_committed(self) -> CheckpointSpec:
        if self.keep_every is not None and self.keep_every % self.every:
            raise ValueError(
                f"keep_every {self.keep_every} is not a multiple of every {self.every}, so few of those steps "
                "have a checkpoint; change one of them"
            )
        return self

    @model_validator(mode="after")
    def options_are_of_the_export(self) -> CheckpointSpec:
        if self.export_names is not None and self.export != "dcp":
            raise ValueError(f"export_names is for export dcp, and export is {self.export}; leave it out")
        if self.export_numbers is not None:
            self._has_numbers(self.export_numbers)
        if self.export is None and (self.push or self.export_to or self.export_at == "commit"):
            if self.push:
                key = "push"
            elif self.export_to:
                key = "export_to"
            else:
                key = "export_at"
            raise ValueError(f"export is null, so nothing is exported; leave out {key}, or set export to hf")
        return self

    def _has_numbers(self, numbers: str) -> None:
        """Raise ValueError if the export has no such format of matrices."""
        known = with_numbers()
        if self.export not in known:
            forms = " and ".join(known)
            raise ValueError(
                f"export_numbers is for export {forms}, and export is {self.export}; leave it out"
            )
        if numbers not in known[self.export]:
            raise ValueError(
                f"export {self.export} has no export_numbers {numbers}; use {', '.join(known[self.export])}"
            )

    @property
    def best_metric(self) -> str | None:
        """The evaluation metric that decides the best commit; None if it is the training loss, or if no best commit
        is kept.
        """
        return self.keep_best if isinstance(self.keep_best, str) else None

    @property
    def averaged(self) -> int:
        """Number of earlier commits that are averaged with one."""
        return self.average.last - 1 if self.average and self.average.last else 0

    @property
    def ema(self) -> float | None:
        """The decay of the moving average of the weights; None without one."""
        return self.average.ema if self.average else None

    def identity(self) -> dict[str, Any]:
        """Return the moving average, which cannot begin later; empty without one. Nothing else changes weights."""
        return {} if self.ema is None else {"average": {"ema": self.ema}}

    def problem(self, adapter: AdapterSpec | None, tracking: TrackingSpec | None) -> str:
        """Return why what is exported does not go with the adapter, or with MLflow's registry; empty if it does.

        Args:
            adapter: the key `workload.adapter` of the job.
            tracking: the key `tracking`.
        """
        register = tracking is not None and tracking.register_as
        if self.export == "adapter" and adapter is None:
            return "checkpoint.export adapter needs an adapter; set it to hf, or workload.adapter"
        if self.export == "adapter" and register:
            return "tracking.register_as is about a model, not about an adapter alone; set checkpoint.export to hf"
        if register and self.export not in ("hf", "safetensors"):
            exported = (
                "nothing is exported" if self.export is None else f"MLflow has no model in {self.export}"
            )
            return f"tracking.register_as is about the exported model, and {exported}; set checkpoint.export to hf"
        return ""
