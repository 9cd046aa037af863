"""The job file: one typed, frozen value that defines a run.

Unknown keys are refused, every rule across keys is a named validator, and whatever is wrong with a file becomes one
`InputError` line. Importable without torch or ray.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from orchestrator.checkpoint.config import CheckpointSpec, RunIdentity
from orchestrator.config.document import read_document
from orchestrator.config.errors import InputError
from orchestrator.config.extensions import with_extensions
from orchestrator.config.inputs import Changes, Input
from orchestrator.config.object_reference import ObjectReference
from orchestrator.config.own import completed, problem_of
from orchestrator.config.records import REFERENCED, REWARDED, is_known
from orchestrator.config.redact import bare_places
from orchestrator.config.resources import ResourceSpec
from orchestrator.config.strict import Count, StrictModel
from orchestrator.config.validation_messages import refused
from orchestrator.config.workload import WorkloadSpec
from orchestrator.controller.config import LimitSpec
from orchestrator.data.config import NEWER as NEWER_OF_SOURCES
from orchestrator.data.config import NEWER_OF_DATA, DataSpec, Source
from orchestrator.evaluate.config import (
    SAMPLES,
    VALIDATION,
    EvaluateSpec,
    StopWhen,
    metric_problem,
    metrics_of,
)
from orchestrator.observe.config import NotifySpec, SummarisedJob, TrackedJob, TrackingSpec
from orchestrator.observe.sinks.config import SinkSpec
from orchestrator.optim.config import NEWER
from orchestrator.optim.kinds import KINDS
from orchestrator.parallel.config import ParallelSpec, cost_of
from orchestrator.prune.config import PruneSpec
from orchestrator.prune.config import problem_of as problem_of_pruning
from orchestrator.quantize.config import QuantizeSpec
from orchestrator.quantize.config import problem_of as problem_of_quantization
from orchestrator.rewards.config import LIMITS as REWARD_LIMITS
from orchestrator.rewards.config import Rewards
from orchestrator.train.config import NEWER as NEWER_OF_TRAIN
from orchestrator.train.config import TrainSpec
from orchestrator.train.distillation.config import DistillSpec
from orchestrator.train.distillation.config import problem_of as problem_of_distillation
from orchestrator.train.engines.config import EngineConfig
from orchestrator.train.rollouts.config import NOT_IDENTITY, RolloutSpec, with_rollouts
from orchestrator.train.rollouts.config import problem_of as problem_of_rollouts
from orchestrator.tune.config import TuneSpec
from workloads.own.object_reference import is_built_in, is_object_reference

STAGES = "stages"
"""The key that makes a job file that of a chain, see `orchestrator.config.chain`."""


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
    def own_samples_have_an_objective(cls, given: Any) -> Any:
        return with_rollouts(completed(given))

    @model_validator(mode="after")
    def own_code_is_used_where_it_can_be(self) -> JobSpec:
        if problem := problem_of(self):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def rewards_are_for_generated_answers(self) -> JobSpec:
        if problem := problem_of_rollouts(
            self.workload,
            sequence_length=self.data.sequence_length,
            train=self.train,
            checkpoint_every=self.checkpoint.every,
            rollout=self.rollout,
            rewards=self.rewards,
        ):
            raise ValueError(problem)
        if self.rollout and self.evaluates_beside:
            raise ValueError(
                f"{self.workload.objective} is evaluated by the ranks that train; set evaluate.where to gang"
            )
        return self

    @model_validator(mode="after")
    def what_is_distilled_has_a_loss(self) -> JobSpec:
        if problem := problem_of_distillation(self.distill, self.workload, self.data, self.train):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def pruning_fits_the_training(self) -> JobSpec:
        if problem := problem_of_pruning(self.prune, self.workload, self.train, self.checkpoint.averaged):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def what_is_quantised_trains_whole_weights(self) -> JobSpec:
        if problem := problem_of_quantization(self.quantize, self.workload, self.train, self.train.precision):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def mup_has_an_optimizer_that_it_is_defined_for(self) -> JobSpec:
        name = self.train.optimizer.name
        defined = [optimizer for optimizer, kind in KINDS.items() if kind.has_mup]
        if self.workload.mup is not None and name not in defined:
            raise ValueError(
                f"workload.mup says how {' and '.join(defined)} learn at another width, and the optimizer is {name}; "
                "set train.optimizer.name to one of them, or workload.mup to null"
            )
        return self

    @model_validator(mode="after")
    def what_is_evaluated_is_held_out(self) -> JobSpec:
        asked = self.evaluate
        if asked is not None and not (self.set_names or asked.tasks or asked.samples):
            raise ValueError(
                "evaluate has no text; hold some out by data.validation.share, or name sets in evaluate.sets"
            )
        if self.evaluates_beside and not self.set_names:
            raise ValueError(
                "evaluate.where beside needs held-out text, and this job has none; leave it out, tasks come "
                "after training"
            )
        given = metrics_of(self.metrics_objective)
        lacking = {
            m for m in (self.evaluate and self.evaluate.metrics) or () if not is_object_reference(m)
        } - set(given)
        if lacking and is_known(self.metrics_objective):
            raise ValueError(
                f"{', '.join(sorted(lacking))} is no metric of {self.workload.objective}, which has "
                f"{', '.join(given)}; leave it out of evaluate.metrics"
            )
        if self.evaluate is not None and self.data.validation and VALIDATION in self.evaluate.sets:
            raise ValueError(
                "the set validation is that of data.validation; give the one in evaluate.sets another name"
            )
        return self

    @model_validator(mode="after")
    def what_is_packed_is_a_language_model(self) -> JobSpec:
        if self.data.packing != "cut" and self.workload.objective != "causal_lm":
            raise ValueError(
                f"data.packing {self.data.packing} is of causal_lm, and the objective is {self.workload.objective}; "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def rows_are_cut_of_a_language_model(self) -> JobSpec:
        asked, whole = self.train.sequence_warmup, self.data.sequence_length
        if asked is None:
            return self
        if self.workload.objective != "causal_lm":
            raise ValueError(
                f"train.sequence_warmup needs causal_lm, and the objective is {self.workload.objective}; leave it out"
            )
        if not asked.fits(whole):
            raise ValueError(
                f"train.sequence_warmup.length {asked.length} is not data.sequence_length {whole} halved some times; "
                "change one of them"
            )
        return self

    @model_validator(mode="after")
    def what_is_decided_in_a_step_is_evaluated_there(self) -> JobSpec:
        early = "stop_when" if self.stop_when else "tune" if self.tune else ""
        if early and self.evaluates_beside:
            raise ValueError(
                f"{early} decides by a value at its step, but with evaluate.where beside the value arrives some "
                "steps later, at no fixed step; set evaluate.where to gang"
            )
        return self

    @model_validator(mode="after")
    def what_is_chosen_by_is_measured(self) -> JobSpec:
        for key, metric in (
            ("checkpoint.keep_best", self.checkpoint.best_metric),
            ("stop_when.metric", self.stop_when.metric if self.stop_when else None),
            ("tune.metric", self.tune.metric if self.tune and "." in self.tune.metric else None),
        ):
            if metric is None:
                continue
            if self.evaluate is None:
                raise ValueError(f"{key} {metric} is not measured; add evaluate, and data.validation")
            if problem := metric_problem(metric, self.set_names, self.evaluate, self.metrics_objective):
                raise ValueError(f"{key} {metric} {problem}")
        return self

    @model_validator(mode="after")
    def a_reference_that_is_held_is_compared_with(self) -> JobSpec:
        if self.train.reference == "held" and self.workload.objective not in (*REFERENCED, *REWARDED):
            raise ValueError(
                f"train.reference is for {', '.join(REFERENCED)}, and this is {self.workload.objective}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def what_goes_on_has_its_weights(self) -> JobSpec:
        asked = self.train.continue_from
        needs_base = self.needs_base or self.workload.objective in REFERENCED
        grows = self.workload.grow or self.workload.shrink
        if asked is not None and (grows or (self.workload.init_from and not needs_base)):
            raise ValueError(
                "train.continue_from brings the weights of another run, and so does workload.init_from; leave one out"
            )
        if asked is not None and self.tune is not None:
            raise ValueError(
                "tune searches over new runs; leave out train.continue_from, or start from weights alone, "
                "by workload.init_from"
            )
        return self

    @model_validator(mode="after")
    def what_is_a_part_of_its_base_is_trained(self) -> JobSpec:
        if self.workload.shrink and self.train.freeze:
            raise ValueError(
                "train.freeze leaves weights out of commits, and workload.shrink chooses them once; leave out one of "
                "them"
            )
        return self

    @model_validator(mode="after")
    def what_thaws_was_frozen(self) -> JobSpec:
        if self.train.thaw and not self.reads_base:
            raise ValueError(
                "train.thaw thaws frozen parameters, and this job freezes none; set train.freeze"
            )
        if self.train.thaw and self.workload.adapter and self.workload.adapter.quantize != "none":
            raise ValueError(
                "train.thaw would train weights that workload.adapter.quantize keeps in 4 bits; leave one of them out"
            )
        if self.train.thaw and self.checkpoint.averaged:
            raise ValueError(
                "checkpoint.average.last is a mean of checkpoints, and those before a thaw lack weights; use ema"
            )
        return self

    @model_validator(mode="after")
    def an_adapter_that_is_exported_is_there(self) -> JobSpec:
        if self.checkpoint.export == "adapter":
            if self.workload.adapter is None:
                raise ValueError(
                    "checkpoint.export adapter needs an adapter; set it to hf, or workload.adapter"
                )
            if self.tracking and self.tracking.register_as:
                raise ValueError(
                    "tracking.register_as is about a model, not about an adapter alone; set checkpoint.export to hf"
                )
        return self

    @model_validator(mode="after")
    def what_is_registered_is_exported(self) -> JobSpec:
        form = self.checkpoint.export
        if self.tracking and self.tracking.register_as and form not in ("hf", "safetensors"):
            exported = "nothing is exported" if form is None else f"MLflow has no model in {form}"
            raise ValueError(
                f"tracking.register_as is about the exported model, and {exported}; set checkpoint.export to hf"
            )
        return self

    def with_parts(self, **parts: Any) -> JobSpec:
        """Return the job with these parts in place of its own. They are not validated again."""
        return self.model_copy(update=parts)

    @property
    def pruned_bytes(self) -> float:
        """Return the bytes of masks and scores for each parameter; 0 without pruning."""
        return self.prune.bytes_per_parameter if self.prune else 0.0

    @property
    def metrics_objective(self) -> str:
        """The objective that names the metrics; an own model's loss counts as its objective."""
        return SAMPLES if is_object_reference(self.workload.model) else self.workload.objective

    @property
    def samples_per_step(self) -> int:
        """The number of samples that a step reads: rows, or prompts with several rows each."""
        return self.train.global_batch // (self.rollout.group if self.rollout else 1)

    def document(self) -> dict[str, Any]:
        """Return the job as a job file with all of its keys, as plain data."""
        return self.model_dump(mode="json")

    @property
    def engine(self) -> EngineConfig:
        """What an engine reads of the job."""
        return EngineConfig(
            train=self.train,
            seed=self.seed,
            sequence_length=self.data.sequence_length,
            ema=self.checkpoint.ema,
            gpus=self.resources.per_worker.gpu,
            prune=self.prune,
            quantize=self.quantize,
            distill=self.distill,
            evaluate=self.evaluate,
        )

    @property
    def run_identity(self) -> RunIdentity:
        """What a run directory of the job is compared with."""
        return RunIdentity(
            keys=self.identity(),
            own_code=self.own_code,
            accepted=self.accept_code,
            set_sources=self.set_sources,
            clean=self.data.clean,
        )

    @property
    def tracked(self) -> TrackedJob:
        """What MLflow shows of the job, and where."""
        return TrackedJob(
            name=self.name,
            tracking=self.tracking,
            parameters=self.model_dump(mode="json"),
            held_out=self.data.validation.share if self.data.validation else None,
            evaluates_beside=self.evaluates_beside,
        )

    @property
    def summarised(self) -> SummarisedJob:
        """What the summary of a run says of the job."""
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
    def reads_base(self) -> bool:
        """Whether commits lack weights, which are read from where the run began."""
        return bool(self.train.freeze or self.workload.adapter)

    @property
    def needs_base(self) -> bool:
        """Whether the run needs the weights that it began with at every start, since its commits lack some, or it
        compares with them."""
        return self.reads_base or self.train.reference == "held"

    @property
    def evaluates_beside(self) -> bool:
        """Whether one more worker evaluates checkpoints beside the run."""
        return self.evaluate is not None and self.evaluate.is_beside

    @property
    def set_names(self) -> list[str]:
        """The names of the sets of held-out text that the job evaluates."""
        if self.evaluate is None:
            return []
        return [*([VALIDATION] if self.data.validation else []), *self.evaluate.sets]

    @property
    def set_sources(self) -> dict[str, tuple[str, list[Source]]]:
        """The evaluation sets with their own text: by name, their key in the job file and their sources."""
        if self.evaluate is None:
            return {}
        validation = self.data.validation.sources if self.data.validation else []
        found = {VALIDATION: ("data.validation.sources", validation)} if validation else {}
        return found | {
            name: (f"evaluate.sets.{name}.sources", each.sources) for name, each in self.evaluate.sets.items()
        }

    @property
    def own_code(self) -> dict[str, str]:
        """Every `module:name` of the user that planning, training and evaluation run, with the first key that names it.

        Cleaning steps are left out, because their code is part of the data instead. So is what this program has itself.
        """
        optimizer = self.train.optimizer
        named = [("workload.model", self.workload.model), ("workload.objective", self.workload.objective)]
        if self.data.samples is not None:
            named.append(("data.samples", self.data.samples.use))
        for key, own in (
            ("train.optimizer.name", optimizer.name),
            ("train.optimizer.schedule", optimizer.schedule),
            ("parallel.cost", cost_of(self.parallel)),
        ):
            named += [(key, own.use)] if isinstance(own, ObjectReference) else []
        named += [("evaluate.metrics", metric) for metric in (self.evaluate and self.evaluate.metrics) or ()]
        named += [(f"rewards.{n}.own", reward.own) for n, reward in enumerate(self.rewards) if reward.own]
        found: dict[str, str] = {}
        for key, name in named:
            if is_object_reference(name) and not is_built_in(name):
                found.setdefault(name, key)
        return found

    @property
    def every_source(self) -> list[tuple[str, Source]]:
        """All sources with their keys in the job file, those of held-out text too."""
        groups = [("data.sources", self.data.sources), *self.set_sources.values()]
        return [
            (f"{where}.{number}", source) for where, group in groups for number, source in enumerate(group)
        ]

    def identity(self) -> dict[str, Any]:
        """What makes two runs the same run: all keys that determine the samples and the weights, and no others.

        `train.stability` is left out: what was done about an instability is recorded, and the rules may change for the
        next one; so are `data.encode_with`, which changes no id, `data.streaming`, which changes no order, and
        `workload.implementation`, which the names of committed weights tell. Of `data.validation` only the share
        counts, since its documents are missing from training. A value that depends on other keys, such as a warm-up
        as a share of the steps, counts by its result. A moving average of the weights cannot begin later, so it
        counts too. The URIs of text are without credentials, which may be renewed, and which others would read.
        """
        found = self.model_dump(
            mode="json",
            include={"seed", "workload", "data", "train"},
            exclude={
                "data": {
                    "cache",
                    "encode_with",
                    "max_rejected",
                    "streaming",
                    "node_cache",
                    *self.data.at_default(*NEWER_OF_DATA),
                },
                "workload": {
                    "implementation",
                    "attention_dropout",
                    *self.workload.at_default("layer_drop", "embedding_noise", "grow", "adapter", "shrink"),
                },
                "train": dict.fromkeys(("stability", *self.train.at_default(*NEWER_OF_TRAIN)), True)
                | {"optimizer": self.train.optimizer.at_default(*NEWER)},
            },
        )
        held_out = self.data.validation and self.data.validation.share
        found["data"]["validation"] = {"share": held_out} if held_out else None
        for source, dumped in zip(self.data.sources, found["data"]["sources"], strict=True):
            for key in source.at_default(*NEWER_OF_SOURCES):
                del dumped[key]
        found["train"]["optimizer"] |= {"warmup": self.train.warmup_steps, "decay": self.train.decay_steps}
        found["workload"]["dropout"], of_attention = self.workload.dropouts
        if of_attention:
            found["workload"]["attention_dropout"] = of_attention
        if self.workload.adapter and self.workload.adapter.quantize == "none":
            del found["workload"]["adapter"]["quantize"]
        if self.checkpoint.ema is not None:
            found["checkpoint"] = {"average": {"ema": self.checkpoint.ema}}
        found["data"] = bare_places(found["data"])
        if self.distill:
            found["distill"] = self.distill.model_dump(mode="json")
        if self.prune:
            found["prune"] = self.prune.model_dump(mode="json")
        if self.quantize:
            found["quantize"] = self.quantize.model_dump(mode="json")
        if self.rollout:
            found["rollout"] = self.rollout.model_dump(mode="json", exclude={*NOT_IDENTITY})
            found["rewards"] = [
                reward.model_dump(mode="json", exclude={*REWARD_LIMITS}) for reward in self.rewards
            ]
        return found


def load(path: str | Path, overrides: Iterable[str] = ()) -> JobSpec:
    """Read and validate the job file at `path`, with `a.b=c` overrides applied. Raises InputError."""
    return parse(read_document(path, overrides), str(path))


def parse(document: Mapping[str, Any], where: str = "job") -> JobSpec:
    """Validate a job given as a mapping; `where` is for messages. Raises InputError."""
    if STAGES in document:
        hint = "name one of its stages: the directory of each has a job.yaml"
        raise InputError("is a chain of stages, and one job is wanted", where, hint)
    document = with_extensions(document)
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        raise refused(document, error, where, JobSpec) from None


def dump(spec: JobSpec) -> str:
    """The job as YAML, with all defaults."""
    return yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False)


def schema() -> str:
    """The JSON Schema of the job file."""
    return json.dumps(JobSpec.model_json_schema(), indent=2)
