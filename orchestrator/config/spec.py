"""The job file: one typed, frozen value that defines a run.

Unknown keys are refused, every rule across keys is a named validator, and whatever is wrong with a file becomes one
`InputError` line. Importable without torch or ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from orchestrator.checkpoint.config import CheckpointSpec, RunIdentity
from orchestrator.config.document import read_document, validated, write_yaml
from orchestrator.config.inputs import Changes, Input
from orchestrator.config.resources import ResourceSpec, Workers
from orchestrator.config.strict import Count, StrictModel
from orchestrator.config.workload import WorkloadSpec
from orchestrator.controller.config import LimitSpec
from orchestrator.data.config import DataSpec, Source, with_objective
from orchestrator.evaluate.config import VALIDATION, EvaluateSpec, StopWhen, decision_problem
from orchestrator.observe.config import NotifySpec, SummarisedJob, TrackedJob, TrackingSpec
from orchestrator.observe.sinks.config import SinkSpec
from orchestrator.parallel.config import ParallelSpec
from orchestrator.prune.config import PruneSpec
from orchestrator.quantize.config import QuantizeSpec
from orchestrator.rewards.config import Rewards, own_rewards
from orchestrator.train.config import Reading, TrainSpec
from orchestrator.train.distillation.config import DistillSpec
from orchestrator.train.engines.config import EngineConfig
from orchestrator.train.rollouts.config import (
    RolloutSpec,
    beside_rollout_workers,
    rollout_problem,
    with_rollouts,
)
from orchestrator.tune.config import TuneSpec


class JobSpec(StrictModel):
    """A job file: everything that defines a run."""

    CHANGES: ClassVar[Changes] = {Input.SAMPLES: ("seed",)}

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="also the run directory's name"
    )
    seed: Count = Field(
        default=0, description="seed of the initial weights, the order of samples, and dropout"
    )
    workload: WorkloadSpec
    data: DataSpec
    train: TrainSpec
    rollout: RolloutSpec | None = Field(
        default=None, description="how answers are generated, for grpo and reinforce"
    )
    rewards: Rewards = Field(default_factory=list, description="rewards for generated answers; they add up")
    distill: DistillSpec | None = Field(default=None, description="learn from a teacher, a trained model")
    prune: PruneSpec | None = Field(default=None, description="sets weights to zero while the run trains")
    quantize: QuantizeSpec | None = Field(
        default=None,
        description="train linear layers with weights that are rounded to few bits, as in the export",
    )
    parallel: Literal["auto"] | ParallelSpec = Field(
        default="auto", description="the layout: chosen by the planner, or given whole or in part"
    )
    resources: ResourceSpec = Field(default_factory=ResourceSpec)
    evaluate: EvaluateSpec | None = Field(default=None, description="evaluations on held-out text")
    stop_when: StopWhen | None = Field(default=None, description="end the run early, as done")
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    tracking: TrackingSpec | None = None
    sinks: SinkSpec | None = Field(
        default=None, description="further places that get rows and events, besides MLflow"
    )
    notify: NotifySpec | None = Field(default=None, description="where messages about the run are sent")
    limits: LimitSpec = Field(default_factory=LimitSpec)
    tune: TuneSpec | None = Field(
        default=None, description="a search over keys of this job, for `orchestrator tune`"
    )
    accept_code: list[str] = Field(
        default_factory=list,
        description="hashes of changed own code that the run may continue with",
    )

    @model_validator(mode="before")
    @classmethod
    def defaults_follow_from_other_keys(cls, values: Any) -> Any:
        return with_rollouts(with_objective(values))

    @model_validator(mode="after")
    def parts_fit_together(self) -> JobSpec:
        """Refuse parts that do not fit together. Each part knows what it needs of the others."""
        for problem in self._problems():
            if problem:
                raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        yield self.data.problem(self.workload)
        yield rollout_problem(
            self.workload,
            sequence_length=self.data.sequence_length,
            train=self.train,
            checkpoint_every=self.checkpoint.every,
            rollout=self.rollout,
            rewards=self.rewards,
        )
        yield self.train.problem(
            self.workload,
            sequence_length=self.data.sequence_length,
            averaged=self.checkpoint.averaged,
            is_search=self.tune is not None,
        )
        if self.distill:
            yield self.distill.problem(self.workload, self.data, self.train)
        if self.prune:
            yield self.prune.problem(self.workload, self.train, self.checkpoint.averaged)
        if self.quantize:
            yield self.quantize.problem(self.workload, self.train, self.train.precision)
        if self.parallel != "auto":
            yield self.parallel.problem(self.workload)
        if self.evaluate:
            yield self.evaluate.problem(self.workload, self.data.validation is not None)
        early = "stop_when" if self.stop_when else "tune" if self.tune else ""
        if early and self.evaluates_beside:
            yield (
                f"{early} decides by a value at its step, but with evaluate.where beside the value arrives some "
                "steps later, at no fixed step; set evaluate.where to gang"
            )
        decided = {
            "checkpoint.keep_best": self.checkpoint.best_metric,
            "stop_when.metric": self.stop_when.metric if self.stop_when else None,
        }
        for metric in self.tune.metrics if self.tune else ():
            measured = {"tune.metric": metric if "." in metric else None}
            yield decision_problem(measured, self.evaluate, self.set_names, self.metrics_objective)
        yield decision_problem(decided, self.evaluate, self.set_names, self.metrics_objective)
        yield self.checkpoint.problem(self.workload.adapter, self.tracking)

    def with_parts(self, **parts: Any) -> JobSpec:
        """Return the job with these parts in place of its own. They are not validated again."""
        return self.model_copy(update=parts)

    def over_folder(self, folder: str) -> JobSpec:
        """Return the job with the model and the tokenizer of a pretrained folder in place of its own."""
        return self.with_parts(
            workload=self.workload.model_copy(update={"model": f"hf:{folder}"}),
            data=self.data.model_copy(update={"tokenizer": folder}),
        )

    @property
    def pruned_bytes(self) -> float:
        """Return the bytes of masks and scores for each parameter; 0 without pruning."""
        return self.prune.bytes_per_parameter if self.prune else 0.0

    @property
    def metrics_objective(self) -> str:
        """The objective that names the metrics; an own model's loss counts as its objective."""
        return self.workload.metrics_objective

    @property
    def reading(self) -> Reading:
        """Which samples the steps of the run read."""
        samples = self.train.global_batch
        return self.rollout.reading(samples) if self.rollout else Reading(samples)

    def document(self) -> dict[str, Any]:
        """Return the job as a job file with all of its keys, as plain data."""
        return self.model_dump(mode="json")

    @property
    def engine(self) -> EngineConfig:
        """The parts of the job that an engine reads."""
        return EngineConfig(
            train=self.train,
            seed=self.seed,
            sequence_length=self.data.sequence_length,
            ema=self.checkpoint.ema,
            gpus=self.resources.per_worker.gpu,
            prune=self.prune,
            head_penalty=self.workload.head_penalty,
            quantize=self.quantize,
            distill=self.distill,
            evaluate=self.evaluate,
        )

    @property
    def run_identity(self) -> RunIdentity:
        """The identity of the run, with which a run directory is compared."""
        return RunIdentity(
            keys=self.identity(),
            own_code=self.own_code,
            accepted=self.accept_code,
            set_sources=self.set_sources,
            clean=self.data.clean,
        )

    @property
    def tracked(self) -> TrackedJob:
        """The parts of the job that MLflow shows, and the server."""
        return TrackedJob(
            name=self.name,
            tracking=self.tracking,
            parameters=self.model_dump(mode="json"),
            held_out=self.data.validation.share if self.data.validation else None,
            evaluates_beside=self.evaluates_beside,
        )

    @property
    def summarised(self) -> SummarisedJob:
        """The parts of the job that the summary of a run contains."""
        return SummarisedJob(
            name=self.name,
            objective=self.workload.objective,
            metrics=self.evaluate.metrics if self.evaluate else None,
            steps=self.train.steps,
            precision=self.train.dtype,
            limits=self.limits,
            resources=self.resources,
            evaluates_beside=self.evaluates_beside,
        )

    @property
    def searches_layout(self) -> bool:
        """Whether the layout, or what of it is not pinned, is chosen by the planner."""
        return self.parallel == "auto" or self.parallel.is_partial

    @property
    def has_varied_rows(self) -> bool:
        """Whether rows may be shorter than `data.sequence_length`, as far as the job file says: each is a record."""
        return self.workload.reads_records and self.rollout is None and not self.train.keeps_row_length

    @property
    def reads_base(self) -> bool:
        """Whether commits lack weights, which are read from where the run began."""
        return self.train.reads_base(self.workload)

    @property
    def needs_base(self) -> bool:
        """Whether the run needs the weights that it began with at every start, since its commits lack some, or it
        compares with them."""
        return self.train.needs_base(self.workload)

    @property
    def evaluates_beside(self) -> bool:
        """Whether one more worker evaluates checkpoints beside the run."""
        return self.evaluate is not None and self.evaluate.is_beside

    @property
    def shared_resources(self) -> ResourceSpec:
        """The resources with rollout or teacher workers among the workers, from which follows what a worker has of its
        node."""
        return beside_rollout_workers(self.resources, self.extra_workers)

    @property
    def extra_workers(self) -> Workers | None:
        """The bounds of the number of rollout workers or teacher workers; None without any."""
        if self.rollout is not None:
            return self.rollout.workers
        return self.distill.teacher_workers if self.distill is not None else None

    @property
    def all_workers(self) -> Workers:
        """The minimum and maximum number of workers of the run: those that train, evaluate in the background, generate
        answers, or run a teacher.
        """
        trains, others = self.resources.workers, self.extra_workers
        max_workers = trains.max + self.evaluates_beside
        if others is None:
            return Workers(min=trains.min, max=max_workers)
        return Workers(min=trains.min + others.min, max=max_workers + others.max)

    @property
    def set_names(self) -> list[str]:
        """The names of the sets of held-out text that the job evaluates."""
        return self.evaluate.set_names(self.data.validation is not None) if self.evaluate else []

    @property
    def set_sources(self) -> dict[str, tuple[str, list[Source]]]:
        """The evaluation sets with their own text: by name, their key in the job file and their sources."""
        if self.evaluate is None:
            return {}
        validation = self.data.validation.sources if self.data.validation else []
        result = {VALIDATION: ("data.validation.sources", validation)} if validation else {}
        return result | {
            name: (f"evaluate.sets.{name}.sources", each.sources) for name, each in self.evaluate.sets.items()
        }

    @property
    def own_code(self) -> dict[str, str]:
        """Every `module:name` of the user that planning, training and evaluation run, with the first key that names it.

        Cleaning steps are left out, because their code is part of the data instead. So is what this program has itself.
        """
        parallel = {} if self.parallel == "auto" else self.parallel.own_code
        evaluate = self.evaluate.own_code if self.evaluate else {}
        result: dict[str, str] = {}
        for part in (
            self.workload.own_code,
            self.data.own_code,
            self.train.own_code,
            parallel,
            evaluate,
            own_rewards(self.rewards),
        ):
            for name, key in part.items():
                result.setdefault(name, key)
        return result

    @property
    def every_source(self) -> list[tuple[str, Source]]:
        """All sources with their keys in the job file, those of held-out text too."""
        groups = [("data.sources", self.data.sources), *self.set_sources.values()]
        return [
            (f"{where}.{number}", source) for where, group in groups for number, source in enumerate(group)
        ]

    def identity(self) -> dict[str, Any]:
        """What makes two runs the same run: all keys that determine the samples and the weights, and no others.

        Each part says which of its keys do. Resources, the layout and everything that is only shown do not.
        """
        result: dict[str, Any] = {"seed": self.seed}
        for name in ("workload", "data", "train", "checkpoint", "distill", "prune", "quantize", "rollout"):
            part: StrictModel | None = getattr(self, name)
            if part is not None and (keys := part.identity()):
                result[name] = keys
        if self.rewards:
            result["rewards"] = [reward.identity() for reward in self.rewards]
        return result


def load(path: str | Path, overrides: Iterable[str] = ()) -> JobSpec:
    """Read and validate the job file at `path`, with `a.b=c` overrides applied. Raises InputError."""
    return parse(read_document(path, overrides), str(path))


def parse(document: Mapping[str, Any], where: str = "job") -> JobSpec:
    """Validate a job given as a mapping; `where` is for messages. Raises InputError."""
    return validated(document, JobSpec, where)


def dump(spec: JobSpec) -> str:
    """The job as YAML, with all defaults."""
    return write_yaml(spec.document())
