"""Evaluation on held-out text: when, on which sets, by which metrics; and early stopping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from orchestrator.config.inputs import Changes, Input
from orchestrator.config.metric_names import (
    Metric,
    OfAnswers,
    OfClasses,
    OfPredictions,
    OfRewards,
    OfWords,
    pass_at,
)
from orchestrator.config.object_reference import users_code
from orchestrator.config.records import COLUMNS, PREFERENCES, REWARDED, SAMPLES, is_known
from orchestrator.config.strict import Count, Positive, StrictModel
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import Source, refuse_weights
from workloads.own.object_reference import PATTERN, is_object_reference

VALIDATION = "validation"
"""The name of the set that `data.validation` defines."""
OwnMetric = Annotated[str, Field(pattern=PATTERN)]
"""A metric in the user's own code. Like a loss, its smallest value is the best."""
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,30}$")]


class EvaluationSet(StrictModel):
    """A named set of text that no training source contains."""

    sources: list[Source] = Field(min_length=1, description="the text of the set")

    @model_validator(mode="after")
    def has_no_weights(self) -> EvaluationSet:
        refuse_weights(self.sources)
        return self


class SamplesSpec(StrictModel):
    """Samples of the model: its continuations of some prompts, at every evaluation."""

    prompts: list[Annotated[str, Field(min_length=1)]] = Field(
        min_length=1,
        max_length=32,
        description="texts that a decoder continues, or that an encoder-decoder reads and answers; for a model "
        "that learns from conversations, messages of a user",
    )
    tokens: int = Field(
        default=40,
        ge=1,
        le=512,
        description="maximum tokens of each sample; every token is a forward pass of all prompts",
    )
    temperature: float = Field(
        default=0.0,
        ge=0.0,
        description="0 takes the most likely token; otherwise tokens are drawn at this temperature",
    )
    seed: Count = Field(default=0, description="of the draws")


class EvaluateSpec(StrictModel):
    """Evaluations during training. Each covers all tokens of a set, and has the same result under any layout."""

    CHANGES: ClassVar[Changes] = {Input.TEXT: ("sets",)}

    every: Positive = Field(default=200, description="steps between evaluations")
    at: list[Positive] = Field(
        default_factory=list,
        description="further steps to evaluate after; stop_when ignores these",
    )
    where: Literal["gang", "beside"] = Field(
        default="gang",
        description="where to evaluate: gang, by the training ranks between two steps; beside, by an extra worker "
        "if there is room for it, from that step's commit, while training continues",
    )
    at_start: bool = Field(default=False, description="also evaluate before the first step")
    at_end: bool = Field(default=True, description="also evaluate after the last step")
    sets: dict[SetName, EvaluationSet] = Field(
        default_factory=dict, description="named sets besides that of data.validation"
    )
    batches: Positive | None = Field(
        default=None,
        description="maximum number of global batches of a set to evaluate; unset: the whole set",
    )
    samples: SamplesSpec | None = Field(default=None, description="texts to generate at every evaluation")
    metrics: list[Metric | OwnMetric] | None = Field(
        default=None,
        description="metrics to compute: loss (nats per token; per record for classes, per pair for preferences), "
        "perplexity, bits_per_byte (comparable across tokenizers), accuracy (share of tokens "
        "predicted correctly, or of pairs whose chosen answer has the larger reward), reward_margin "
        "and other metrics of pairs (see the guide), and your own functions as module:name. On "
        "request only: precision, recall, f1 and matthews for classes, spearman for numbers. Unset: "
        "the objective's default metrics",
    )
    answers: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="answers to draw to each held-out prompt, as a rollout draws them, for the metrics pass_at_1, "
        "pass_at_2, pass_at_4 and so on up to this number: the probability that at least one of so many answers is "
        "right. An answer is right if the first of rewards gives it 1.0 or more. For objectives that learn from "
        "rewards",
    )
    tasks: list[str] = Field(
        default_factory=list,
        description="task files in lm-eval's format, evaluated once after training, on the commit that is "
        "exported",
    )

    def set_names(self, has_validation: bool) -> list[str]:
        """Return the names of the sets, with that of `data.validation` if there is one."""
        return [*([VALIDATION] if has_validation else []), *self.sets]

    @property
    def own_code(self) -> dict[str, str]:
        """The user's metrics, each with its key."""
        return users_code(*(("evaluate.metrics", metric) for metric in self.metrics or ()))

    def problem(self, workload: WorkloadSpec, has_validation: bool) -> str:
        """Return what of a job does not go with its evaluations; empty if everything does.

        Args:
            workload: its model and objective.
            has_validation: whether data.validation holds text out.
        """
        objective = workload.metrics_objective
        has_sets = bool(self.set_names(has_validation))
        if workload.objective == SAMPLES and (self.samples or self.tasks):
            return "evaluate.samples and tasks continue texts, but data.samples are not text; leave them out"
        if not (has_sets or self.tasks or self.samples):
            return (
                "evaluate has no text; hold some out by data.validation.share, or name sets in evaluate.sets"
            )
        if self.is_beside and not has_sets:
            return (
                "evaluate.where beside needs held-out text, but this job has none; leave it out, tasks come after "
                "training"
            )
        if self.answers and workload.objective not in REWARDED:
            return f"evaluate.answers is for {' and '.join(REWARDED)}, and the objective is {objective}; leave it out"
        available = metrics_of(objective)
        lacking = {m for m in self.metrics or () if not is_object_reference(m)} - set(available)
        if lacking and is_known(objective):
            return (
                f"{', '.join(sorted(lacking))} is not a metric of {workload.objective}, which has "
                f"{', '.join(available)}; leave it out of evaluate.metrics"
            )
        if has_validation and VALIDATION in self.sets:
            return "the set validation is that of data.validation; give the one in evaluate.sets another name"
        if self.is_beside and workload.objective in REWARDED:
            return f"{workload.objective} is evaluated by the ranks that train; set evaluate.where to gang"
        return ""

    def metrics_for(self, objective: str) -> tuple[str, ...]:
        """Return the metrics of an evaluation: the requested ones, or the objective's defaults."""
        metrics = self.metrics or [m for m in metrics_of(objective) if m not in get_args(OfPredictions)]
        return (*metrics, *map(pass_at, self.sizes))

    @property
    def sizes(self) -> list[int]:
        """Return the numbers of answers of which one is to be right: powers of 2 up to `answers`, and that itself."""
        if self.answers is None:
            return []
        return sorted({*(2**n for n in range(self.answers.bit_length())), self.answers})

    @property
    def own_metrics(self) -> tuple[str, ...]:
        """Return the requested metrics that are the user's own."""
        return tuple(metric for metric in self.metrics or () if is_object_reference(metric))

    @property
    def of_predictions(self) -> tuple[str, ...]:
        """Return the requested metrics that need all predictions together."""
        return tuple(metric for metric in self.metrics or () if metric in get_args(OfPredictions))

    @property
    def is_beside(self) -> bool:
        """Return whether commits are evaluated beside the run, by one worker more."""
        return self.where == "beside"

    def is_due_beside(self, step: int, last: int) -> bool:
        """Return whether another worker is to evaluate the commit after a step.

        Args:
            step: the step.
            last: the last step of the run.
        """
        return self.is_beside and self.is_due(step, last)

    def is_due(self, step: int, last: int) -> bool:
        """Return whether to evaluate after a step.

        Args:
            step: the step; 0 before the first one.
            last: the last step of the run.
        """
        return step in self.at or self.is_regular(step, last)

    def due_between(self, after: int, until: int, last: int) -> int:
        """Return how many evaluations follow until a step.

        Args:
            after: the last step that does not count.
            until: the last step that counts.
            last: the last step of the run.
        """
        further = [step for step in set(self.at) if after < step <= until and not self.is_regular(step, last)]
        regular = until // self.every - after // self.every
        if after < last <= until:
            regular += self.at_end - (last % self.every == 0)
        return len(further) + regular

    def is_regular(self, step: int, last: int) -> bool:
        """Return whether to evaluate after a step, regardless of `at`.

        Args:
            step: the step; 0 before the first one.
            last: the last step of the run.
        """
        if step in (0, last):
            return self.at_start if step == 0 else self.at_end
        return step % self.every == 0


class StopWhen(StrictModel):
    """Early stopping: the run ends successfully when a metric has not improved for some evaluations."""

    metric: str = Field(default="validation.loss", description="the name of a set, a dot and a metric")
    patience: Positive = Field(default=3, description="evaluations in a row without improvement")
    min_delta: float = Field(
        default=0.0, ge=0.0, description="the smallest change that counts as an improvement"
    )

    def __str__(self) -> str:
        return f"{self.metric} has not improved in {self.patience} evaluations"


def without_tasks(evaluate: EvaluateSpec | None, sets: list[str]) -> EvaluateSpec | None:
    """Return evaluations of these sets alone, for a run whose model is only an intermediate result; None without a
    set.
    """
    return evaluate.model_copy(update={"tasks": []}) if evaluate and sets else None


def metrics_of(objective: str) -> tuple[str, ...]:
    """Return the default metrics of an objective.

    A loss per byte requires that every token of the text is predicted exactly once. Perplexity is only for text. A
    number is neither right nor wrong, so it has no accuracy.
    """
    if objective == SAMPLES:
        return ("loss", "accuracy", "zero_shot")
    if objective in REWARDED:
        return get_args(OfRewards)
    left_out = set() if objective == "causal_lm" else {"bits_per_byte"}
    if objective in COLUMNS and objective not in ("seq2seq", "conversation"):
        left_out |= {"perplexity"}
    if objective in ("regression", "sentence_embeddings"):
        left_out |= {"accuracy"}
    left_out |= {*get_args(OfRewards)}
    if objective not in PREFERENCES:
        left_out |= {*get_args(OfAnswers), *get_args(OfWords)}
    if objective == "multi_label_classification":
        left_out |= {"matthews"}
    elif objective != "sequence_classification":
        left_out |= {*get_args(OfClasses)}
    if objective != "regression":
        left_out |= {"spearman"}
    if objective == "reward":
        left_out |= {*get_args(OfWords)}
    return tuple(m for m in get_args(Metric) if m not in left_out)


def decision_problem(
    decided: Mapping[str, str | None], evaluate: EvaluateSpec | None, sets: list[str], objective: str
) -> str:
    """Return which metric that a job decides by is not measured; empty if all are.

    Args:
        decided: the metric of each key that decides by one; None without a metric.
        evaluate: the evaluations.
        sets: the names of the sets of held-out text.
        objective: `WorkloadSpec.metrics_objective`.
    """
    for key, metric in decided.items():
        if metric is not None and evaluate is None:
            return f"{key} {metric} is not measured; add evaluate, and data.validation"
        if metric is not None and evaluate is not None:
            problem = metric_problem(metric, sets, evaluate, objective)
            if problem:
                return f"{key} {metric} {problem}"
    return ""


def metric_problem(metric: str, names: list[str], evaluate: EvaluateSpec, objective: str) -> str:
    """Return why a job does not measure a metric; empty if it does.

    Args:
        metric: the metric by its name, such as validation.loss.
        names: the names of the job's held-out sets.
        evaluate: the key `evaluate` of the job.
        objective: the name of the objective.
    """
    name, _, kind = metric.partition(".")
    available = evaluate.metrics_for(objective)
    if name in names and kind in available:
        return ""
    if name in names and kind in metrics_of(objective):
        return f"is not measured; add it to evaluate.metrics, as in [loss, {kind}]"
    possible = ", ".join(f"{name}.{kind}" for name in names for kind in available)
    return (
        f"is not measured; name one of {possible}"
        if possible
        else "is not measured: there is no held-out text"
    )
