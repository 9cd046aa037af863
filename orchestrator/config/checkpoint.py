"""Commits of a job: when they are made, which are kept, what is exported, and of which weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from orchestrator.config.strict import Positive, StrictModel


class AverageSpec(StrictModel):
    """An average of the weights over the training, which is evaluated and exported in their place. One of the keys."""

    ema: float | None = Field(
        default=None,
        gt=0.0,
        lt=1.0,
        description="decay of an exponential moving average, updated after every step and part of every commit; 0.999 "
        "is over about the last 1000 steps",
    )
    last: int | None = Field(
        default=None,
        ge=2,
        le=1000,
        description="mean of the weights of the last so many commits, which are kept for it; computed when a commit is "
        "evaluated or exported, so not for the evaluations of the run itself",
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
}
"""The keys of `checkpoint` in a job of which nothing is exported."""


class CheckpointSpec(StrictModel):
    """When to commit, what to keep, and the export."""

    every: Positive = Field(default=100, description="steps between commits")
    keep: Positive = Field(default=3, description="how many of the newest commits are kept")
    keep_every: Positive | None = Field(
        default=None, description="commits whose step is a multiple of this are kept too"
    )
    keep_best: bool | str = Field(
        default=False,
        description="keep also the commit with the least training loss, a mean over the steps since the commit before; "
        "or that with the best value of an evaluation's metric, as in validation.loss, which is then exported too",
    )
    average: AverageSpec | None = Field(
        default=None, description="the average of the weights that is evaluated and exported"
    )
    snapshot_every: Positive | Literal["auto"] | None = Field(
        default="auto",
        description="steps between snapshots into the memory of other nodes; auto: as often as costs one hundredth of "
        "the time, if there are several nodes with enough memory",
    )
    export: Literal["hf", "adapter", "safetensors", "dcp", "gguf", "onnx"] | None = Field(
        default="hf",
        description="what is exported: a model for transformers, with an adapter merged into it; the adapter alone, "
        "for peft; safetensors, the weights of an own model under its own names; dcp, gguf and onnx, other formats, "
        "made of that for transformers",
    )
    export_names: Literal["hf", "torchtitan", "olmo"] | None = Field(
        default=None, description="with export dcp, the names of the tensors; hf if unset"
    )
    export_numbers: Literal["f32", "f16", "bf16", "q8_0"] | None = Field(
        default=None, description="with export gguf, the format of the matrices; f16 if unset"
    )
    export_at: Literal["end", "commit"] = Field(
        default="end", description="once at the end, or at every commit, beside training"
    )
    export_to: str | None = Field(
        default=None, description="folder or URI of the export; <run>/export if unset"
    )

    @model_validator(mode="after")
    def what_is_kept_is_committed(self) -> CheckpointSpec:
        if self.keep_every is not None and self.keep_every % self.every:
            raise ValueError(
                f"keep_every {self.keep_every} is no multiple of every {self.every}, so that few of those steps "
                "are committed; change one of them"
            )
        return self

    @model_validator(mode="after")
    def options_are_of_the_export(self) -> CheckpointSpec:
        for key, of in (("export_names", "dcp"), ("export_numbers", "gguf")):
            if getattr(self, key) is not None and self.export != of:
                raise ValueError(f"{key} is for export {of}, and export is {self.export}; leave it out")
        if self.export is None and (self.export_to or self.export_at == "commit"):
            key = "export_to" if self.export_to else "export_at"
            raise ValueError(
                f"nothing is exported, since export is null; leave out {key}, or set export to hf"
            )
        return self

    @property
    def best_metric(self) -> str | None:
        """The metric of an evaluation by which the best commit is told; None if it is told by the training loss, or not
        at all."""
        return self.keep_best if isinstance(self.keep_best, str) else None

    @property
    def averaged(self) -> int:
        """Commits before one that are averaged with it."""
        return self.average.last - 1 if self.average and self.average.last else 0

    @property
    def ema(self) -> float | None:
        """The decay of the moving average of the weights, None without one."""
        return self.average.ema if self.average else None
