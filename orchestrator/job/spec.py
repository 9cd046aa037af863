"""The job file: one typed, frozen value that says everything about a run.

Unknown keys are refused, every rule across fields is a validator with a name, and a wrong file becomes
one `InputError` line. Importable without torch or ray.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from orchestrator.job.errors import InputError
from orchestrator.job.overrides import override
from orchestrator.job.resources import ResourceSpec
from orchestrator.job.stability import StabilitySpec
from orchestrator.job.strict import Count, Fraction, Positive, StrictModel
from orchestrator.job.tune import TuneSpec
from orchestrator.job.validation_messages import input_error


class WorkloadSpec(StrictModel):
    """What is trained."""

    model: str = Field(description="a preset's name, or hf:<config or checkpoint folder>")
    changes: dict[str, Any] = Field(default_factory=dict, description="fields of the preset to change")
    objective: str = Field(default="causal_lm", description="the pre-training recipe")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the objective")
    mup: dict[str, Any] | None = Field(
        default=None,
        description="sizes of the narrow model that the learning rate was found for, as in changes; weights, learning "
        "rates and logits are scaled beside it (maximal update parametrisation)",
    )
    dropout: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="share of the features of embeddings and of every sub-layer's output that is zeroed in training; "
        "what a configuration in hf:<folder> says of dropout does not count",
    )


class Source(StrictModel):
    """Files of text and how many times one epoch passes over them."""

    uri: str = Field(description="a path, glob or fsspec URI of .txt, .jsonl or .parquet files")
    weight: float = Field(default=1.0, gt=0.0, description="passes over this source in one epoch")
    field: str | tuple[str, str] = Field(
        default="text",
        description="the text's key in .jsonl and .parquet; two keys for pairs, a source and its target",
    )


class TrainBpe(StrictModel):
    """Train a byte-level BPE tokenizer on the sources."""

    train_bpe: int = Field(ge=300, le=1_000_000, description="entries in the vocabulary")


class DataSpec(StrictModel):
    """Raw text to token sequences."""

    sources: list[Source] = Field(min_length=1)
    tokenizer: TrainBpe | str = Field(description="train_bpe: N, or a tokenizer.json, or its folder")
    sequence_length: int = Field(ge=8, description="tokens in one sequence")
    cache: str | None = Field(
        default=None, description="where token shards are kept; beside the run if unset"
    )


class OptimizerSpec(StrictModel):
    """AdamW (Loshchilov and Hutter, 2019), LAMB (You et al., 2020), LARS (You et al., 2017), Lion (Chen et al., 2023).

    LARS takes its momentum from the first of betas.
    """

    name: Literal["adamw", "lamb", "lars", "lion"] = "adamw"
    lr: float = Field(default=3e-4, gt=0.0)
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.1, ge=0.0, description="of matrices; vectors are not decayed")
    clip: float | None = Field(default=1.0, gt=0.0, description="largest global gradient norm")
    warmup: Count = Field(default=0, description="steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    final_lr: float = Field(default=0.1, ge=0.0, le=1.0, description="last learning rate as a share of lr")


class TrainSpec(StrictModel):
    """How long and with what."""

    steps: Positive
    global_batch: Positive = Field(description="sequences a step; never changes")
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec)
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="type of matrix products; weights and optimiser state are fp32"
    )
    z_loss: float = Field(
        default=0.0, ge=0.0, description="weight of the squared log of the softmax's normaliser"
    )
    compile: bool = Field(default=False, description="torch.compile every block")
    determinism: Literal["rerun", "bitwise"] = Field(
        default="rerun",
        description="bitwise: losses and weights have the same bits at every data-parallel width",
    )
    virtual_shards: Positive = Field(
        default=8, description="parts of the global batch that bitwise computes alone"
    )
    stability: StabilitySpec = Field(default_factory=StabilitySpec)

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
        if self.optimizer.warmup >= self.steps:
            raise ValueError(
                f"optimizer.warmup {self.optimizer.warmup} is not below steps {self.steps}; "
                "shorten the warm-up or train longer"
            )
        return self


class ParallelSpec(StrictModel):
    """A layout written by hand. The data-parallel width is what the workers leave after tp, pp and cp."""

    engine: Literal["torch", "deepspeed"] = "torch"
    tp: Positive = 1
    pp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    zero: Literal[0, 1, 2, 3] = 0
    micro_batch: Positive | None = Field(default=None, description="sequences a rank computes at once")
    recompute: Literal["none", "selective", "full"] = "none"
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = Field(
        default="1f1b", description="order of a pipeline's work"
    )
    sequence: bool = Field(
        default=False, description="tensor-parallel ranks share norms and residuals out too"
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        default="none", description="what of a GPU stands in host memory: optimiser state, or the weights too"
    )


class CheckpointSpec(StrictModel):
    """When to commit and what to keep."""

    every: Positive = Field(default=100, description="steps between commits")
    keep: Positive = Field(default=3, description="newest commits that stay")
    keep_every: Positive | None = Field(
        default=None, description="commits whose step is a multiple of this stay too"
    )
    keep_best: bool = Field(
        default=False,
        description="so does the one with the least training loss, a mean over the steps since the commit before",
    )
    snapshot_every: Positive | Literal["auto"] | None = Field(
        default="auto",
        description="steps between snapshots into the memory of other nodes; auto is every step as far as they cost "
        "one hundredth of the time, where there are several nodes and their memory suffices",
    )
    export: Literal["hf"] | None = Field(default="hf", description="format of the exported model")
    export_at: Literal["end", "commit"] = Field(
        default="end", description="once, or beside training at every commit"
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


class TrackingSpec(StrictModel):
    """Where experiments are followed."""

    uri: str = Field(default="sqlite:///mlflow.db", description="an MLflow tracking URI")
    experiment: str = "default"


class LimitSpec(StrictModel):
    """Ceilings of the whole job, all attempts together."""

    hours: float | None = Field(default=None, gt=0)
    cost_usd: float | None = Field(default=None, gt=0)
    usd_per_worker_hour: float = Field(
        default=0.0, ge=0, description="price that cost_usd is counted with; from prices if 0"
    )
    prices: str | None = Field(
        default=None,
        description="a CSV with the columns machine,market,zone,usd_per_hour; zone may be empty: any",
    )
    restarts: Count = Field(default=10, description="failures allowed within restart_window")
    restart_window: float = Field(default=3600.0, gt=0, description="seconds")
    wait: float = Field(default=600.0, gt=0, description="seconds to wait for the smallest gang")
    unsaved: float = Field(
        default=3600.0, gt=0, description="seconds to train on while every save fails; then the run stops"
    )


class JobSpec(StrictModel):
    """One run, whole."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="also the run directory's name"
    )
    seed: Count = 0
    workload: WorkloadSpec
    data: DataSpec
    train: TrainSpec
    parallel: Literal["auto"] | ParallelSpec = "auto"
    resources: ResourceSpec = Field(default_factory=ResourceSpec)
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    tracking: TrackingSpec | None = None
    limits: LimitSpec = Field(default_factory=LimitSpec)
    tune: TuneSpec | None = Field(
        default=None, description="a search over keys of this job, for `orchestrator tune`"
    )

    @model_validator(mode="after")
    def mup_has_an_optimizer_that_it_is_defined_for(self) -> JobSpec:
        name = self.train.optimizer.name
        if self.workload.mup is not None and name not in ("adamw", "lion"):
            raise ValueError(
                f"workload.mup says how adamw and lion learn at another width, and the optimizer is {name}; "
                "set train.optimizer.name to one of them, or workload.mup to null"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """What makes two runs the same run: all that decides the samples and the weights, nothing else.

        What is done about an instability is on record once it has been, and may change for the next one.
        """
        return self.model_dump(
            mode="json",
            include={"seed", "workload", "data", "train"},
            exclude={"data": {"cache"}, "train": {"stability"}},
        )


def load(path: str | Path, overrides: Iterable[str] = ()) -> JobSpec:
    """Read the job file at `path`, apply `a.b=c` overrides, and check it whole.

    Raises InputError, one line, for anything wrong with it.
    """
    path = Path(path)
    try:
        document = document_of(path.read_text(), str(path))
    except FileNotFoundError:
        raise InputError(
            "there is no such job file", str(path), "write one with `orchestrator init`"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"cannot be read ({why})", str(path), "give a job file") from None
    for text in overrides:
        override(document, text)
    return parse(document, str(path))


def document_of(text: str, where: str) -> dict[str, Any]:
    """The mapping in a job file's text. Raises InputError."""
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that is none is a plain ValueError
        mark = getattr(error, "problem_mark", None)
        line = f"{where}:{mark.line + 1}" if mark else where
        raise InputError(f"is not YAML ({getattr(error, 'problem', None) or error})", line) from None
    if not isinstance(document, dict):
        raise InputError("must be a mapping of keys to values", where, "see `orchestrator init`")
    return document


def parse(document: Mapping[str, Any], where: str = "job") -> JobSpec:
    """Check a job given as a mapping. Raises InputError."""
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        raise input_error(error, where, JobSpec) from None


def dump(spec: JobSpec) -> str:
    """The job as YAML, every default written out."""
    return yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False)


def schema() -> str:
    """The JSON Schema of the job file."""
    return json.dumps(JobSpec.model_json_schema(), indent=2)
