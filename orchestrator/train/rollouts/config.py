"""Rollouts: the answers that the model generates for each prompt while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from orchestrator.config.records import REWARDED
from orchestrator.config.resources import ResourceSpec, Workers, one_number
from orchestrator.config.strict import Count, Positive, StrictModel
from orchestrator.config.workload import WorkloadSpec
from orchestrator.rewards.config import RewardSpec
from orchestrator.train.config import Reading, TrainSpec


class RolloutSpec(StrictModel):
    """How answers are generated for an objective that learns from rewards."""

    NO_IDENTITY: ClassVar[tuple[str, ...]] = ("keep_every", "workers")
    ADDED_LATER: ClassVar[tuple[str, ...]] = ("staleness", "engine", "epochs")

    group: int = Field(
        default=8,
        ge=2,
        le=1024,
        description="answers to each prompt; a step has global_batch / group prompts",
    )
    steps: Positive = Field(
        default=1,
        description="optimizer steps in which a rollout is learned from once, each with its own prompts: the weights "
        "before the first of them generate the answers of all. A checkpoint is saved only after a rollout's last step",
    )
    epochs: Positive = Field(
        default=1,
        description="times that each answer is learned from: a rollout has steps x epochs optimizer steps. Each epoch "
        "takes the answers in the same order, and compares with their probabilities before the first",
    )
    staleness: int = Field(
        default=0,
        ge=0,
        le=1,
        description="with 1, the weights before a rollout generate the answers of the next one, while the gang trains "
        "on this one; with 0, the weights before each rollout generate its own answers",
    )
    max_tokens: Positive = Field(default=128, description="maximum tokens of an answer")
    temperature: float = Field(default=1.0, ge=1e-3, description="tokens are drawn at this temperature")
    top_k: Count = Field(default=0, description="draw from the most likely tokens; 0: from all")
    top_p: float = Field(
        default=1.0, gt=0.0, le=1.0, description="draw from the fewest tokens with this probability together"
    )
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, max_length=16, description="texts that end an answer, which keeps them"
    )
    together: Positive = Field(
        default=8,
        description="prompts whose answers are decoded together. More is faster and takes more memory; answers "
        "depend on it in the last bits",
    )
    engine: Literal["own", "vllm"] = Field(
        default="own",
        description="what rollout workers generate with. vllm needs GPUs and the package vllm; its answers depend on "
        "which of them it computes together",
    )
    keep_every: Positive = Field(
        default=50, description="steps between rollouts that are kept as text in the run directory"
    )
    workers: Workers | None = Field(
        default=None,
        description="workers of their own that generate answers, with the resources of resources.per_worker; a single "
        "number is both min and max. They come and go between min and max as there is room beside the training "
        "workers, and their number changes no answer. Without it the training workers generate",
    )

    @property
    def decoded_by_ranks(self) -> int:
        """How many answers a training worker decodes at once; 0 if other workers generate them."""
        return 0 if self.workers else self.group * self.together

    @property
    def updates(self) -> int:
        """The number of optimizer steps that learn from a rollout."""
        return self.steps * self.epochs

    def reading(self, global_batch: int) -> Reading:
        """Return which prompts the steps read. `global_batch` counts answers."""
        return Reading(global_batch // self.group, self.steps, self.epochs)

    def units(self, global_batch: int) -> int:
        """Return how many units of work a step has."""
        return -(-global_batch // self.group // self.together)

    def problem_with(self, global_batch: int) -> str:
        """Return why a step cannot have so many answers; empty if it can."""
        if global_batch % self.group:
            return (
                f"train.global_batch {global_batch} counts answers, and is not a multiple of rollout.group "
                f"{self.group}; change one of them"
            )
        units = self.units(global_batch)
        if self.workers and self.workers.max > units:
            return (
                f"rollout.workers.max {self.workers.max} is more than can work: a step has {units} "
                f"unit{'s' * (units > 1)} of rollout.together {self.together} prompts; lower one of them"
            )
        return ""

    def ratio_problem(self, workload: WorkloadSpec) -> str:
        """Return why the loss cannot compare with the probabilities of other weights; empty if it can, or need not."""
        has_ratio = workload.objective != "reinforce"
        if self.staleness and not has_ratio:
            return (
                "rollout.staleness 1 needs the ratio of probabilities that reinforce lacks; use objective grpo, or set "
                "rollout.staleness to 0"
            )
        if not (workload.draws and has_ratio):
            return ""
        off = "workload.dropout, attention_dropout, layer_drop, embedding_noise and head_penalty to 0"
        if self.staleness:
            return (
                "rollout.staleness 1 compares probabilities in training with those in generation, which has no "
                f"dropout; set {off}, or rollout.staleness to 0"
            )
        if self.epochs > 1:
            return (
                f"rollout.epochs {self.epochs} compares probabilities in training with those before it, without "
                f"dropout; set {off}, or rollout.epochs to 1"
            )
        return ""

    def vllm_problem(self, determinism: str) -> str:
        """Return why vLLM cannot generate such answers; empty if it can."""
        if determinism == "bitwise":
            return (
                "rollout.engine vllm gives answers that depend on its batches, which determinism bitwise excludes; set "
                "rollout.engine to own, or train.determinism to rerun"
            )
        if self.workers is None:
            return "rollout.engine vllm needs rollout workers; give rollout.workers, or set rollout.engine to own"
        if self.top_k or self.top_p < 1.0:
            return (
                "rollout.engine vllm returns log-probabilities after the cuts of top_k and top_p, and the loss needs "
                "those before; leave top_k and top_p out, or set rollout.engine to own"
            )
        return ""

    @field_validator("workers", mode="before", json_schema_input_type=Workers | int | None)
    @classmethod
    def one_number_is_both(cls, value: Any) -> Any:
        return one_number(value)


def trains_as_it_reads(workload: WorkloadSpec, train: TrainSpec, *, has_experts: bool, on_gpu: bool) -> bool:
    """Return whether training computes the log-probabilities of answers to the bit as the pass that reads them does,
    see `training_pass.TrainingPass`.

    It does where both run the same program. With experts, those of an answer depend on the other rows of its
    micro-batch. GPUs have not been tried.

    Args:
        workload: what the job says of its model.
        train: how the job trains.
        has_experts: whether the model routes tokens to experts.
        on_gpu: whether ranks compute on GPUs.
    """
    has_other_program = train.compile or train.dtype == "fp8" or workload.draws or has_experts
    return bool(train.bitwise_shards) and not (has_other_program or on_gpu)


def beside_rollout_workers(resources: ResourceSpec, others: Workers | None) -> ResourceSpec:
    """Return the resources with rollout or teacher workers among the workers, all of which divide the memory of their
    nodes.

    Args:
        resources: of the training workers.
        others: the job's rollout or teacher workers; None without.
    """
    if others is None:
        return resources
    max_workers = resources.workers.max + others.max
    return resources.model_copy(update={"workers": resources.workers.model_copy(update={"max": max_workers})})


def with_rollouts(document: Any) -> Any:
    """Set defaults that follow from the objective: rollouts, and the reference that a divergence needs."""
    if not isinstance(document, dict) or not isinstance(workload := document.get("workload"), dict):
        return document
    if workload.get("objective") not in REWARDED:
        return document
    train = document.get("train")
    options = workload.get("options")
    if isinstance(train, dict) and isinstance(options, dict) and options.get("beta"):
        document = {**document, "train": {"reference": "held", **train}}
    return document if document.get("rollout") is not None else {**document, "rollout": {}}


def rollout_problem(
    workload: WorkloadSpec,
    *,
    sequence_length: int,
    train: TrainSpec,
    checkpoint_every: int,
    rollout: RolloutSpec | None,
    rewards: Sequence[RewardSpec],
) -> str:
    """Return what is wrong with a job's rollouts and rewards; empty if nothing is.

    Args:
        workload: the model and its objective.
        sequence_length: tokens of a row.
        train: steps, batch and reference.
        checkpoint_every: steps between checkpoints.
        rollout: the job's rollouts; None without.
        rewards: the job's rewards.
    """
    objective = workload.objective
    if objective not in REWARDED:
        key = "rollout" if rollout else "rewards" if rewards else ""
        return (
            f"{key} is for {' and '.join(REWARDED)}, and the objective is {objective}; leave it out"
            if key
            else ""
        )
    if rollout is None or not rewards:
        return f"{objective} learns from rewards, and this job has none; list them in rewards"
    if problem := rollout.problem_with(train.global_batch):
        return problem
    if problem := rollout.ratio_problem(workload):
        return problem
    if rollout.engine == "vllm" and (problem := rollout.vllm_problem(train.determinism)):
        return problem
    if rollout.max_tokens >= sequence_length:
        return (
            f"rollout.max_tokens {rollout.max_tokens} leaves no room for a prompt in data.sequence_length "
            f"{sequence_length}; lower it, or raise data.sequence_length"
        )
    whole = f"rollout.steps {rollout.steps}" + (
        f" x rollout.epochs {rollout.epochs}" if rollout.epochs > 1 else ""
    )
    for key, steps in (("train.steps", train.steps), ("checkpoint.every", checkpoint_every)):
        if steps % rollout.updates:
            return f"{key} {steps} is not a multiple of {whole}; change one of them"
    if any(step % rollout.updates for step in train.thaw):
        return f"train.thaw is at steps within a rollout of {rollout.updates}; name multiples of {whole}"
    if train.reference == "precomputed" and workload.options.get("beta"):
        return "train.reference precomputed cannot know generated answers; set it to held, or leave it out"
    return ""
