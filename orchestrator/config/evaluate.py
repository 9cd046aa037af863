"""Evaluation on held-out text: when, on which sets, by which metrics; and the end of a run that no longer gains."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from orchestrator.config.data import Source, refuse_weights
from orchestrator.config.metric_names import Metric, OfAnswers, OfClasses, OfPredictions, OfWords
from orchestrator.config.records import COLUMNS, PREFERENCES
from orchestrator.config.strict import Count, Positive, StrictModel
from workloads.own.object_reference import PATTERN, is_object_reference

SAMPLES = "samples"
"""The objective of own samples, whose loss is the model's."""
VALIDATION = "validation"
"""The name of the set that `data.validation` gives."""
OwnMetric = Annotated[str, Field(pattern=PATTERN)]
"""An own metric; its least value is the best, like that of a loss."""
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,30}$")]


class EvaluationSet(StrictModel):
    """A named set of text, which no source of training holds."""

    sources: list[Source] = Field(min_length=1, description="the text of the set")

    @model_validator(mode="after")
    def has_no_weights(self) -> EvaluationSet:
        refuse_weights(self.sources)
        return self


class SamplesSpec(StrictModel):
    """What the model says after some prompts, at every evaluation."""

    prompts: list[Annotated[str, Field(min_length=1)]] = Field(
        min_length=1,
        max_length=32,
        description="texts that a decoder continues, or an encoder-decoder reads and answers; a user's turns for one "
        "that learns from conversations",
    )
    tokens: int = Field(
        default=40,
        ge=1,
        le=512,
        description="most tokens of each; every one is a forward pass of all prompts",
    )
    temperature: float = Field(
        default=0.0, ge=0.0, description="0 takes the likeliest token, else they are drawn"
    )
    seed: Count = Field(default=0, description="of what is drawn")


class EvaluateSpec(StrictModel):
    """Evaluations during training. Each is over all tokens of a set, and has the same result under any layout."""

    every: Positive = Field(default=200, description="steps between evaluations")
    at: list[Positive] = Field(
        default_factory=list,
        description="further steps after which to evaluate; stop_when does not count these",
    )
    where: Literal["gang", "beside"] = Field(
        default="gang",
        description="gang: by the ranks, between two steps; beside: of the commit of that step, by one more worker if "
        "there is room for it, while training goes on",
    )
    at_start: bool = Field(default=False, description="evaluate before the first step too")
    at_end: bool = Field(default=True, description="evaluate after the last step too")
    sets: dict[SetName, EvaluationSet] = Field(
        default_factory=dict, description="sets by name, besides that of data.validation"
    )
    batches: Positive | None = Field(
        default=None, description="most global batches of a set that are evaluated; the whole set if unset"
    )
    samples: SamplesSpec | None = Field(default=None, description="texts to read, from the first to the last")
    metrics: list[Metric | OwnMetric] | None = Field(
        default=None,
        description="loss (nats a token; of classes a record, of preferences a pair), perplexity, bits_per_byte "
        "(comparable across tokenizers), accuracy (share of the tokens that are predicted right, or of "
        "pairs whose chosen answer has the larger reward), reward_margin and more of pairs, see the guide; "
        "own functions module:name; precision, recall, f1 and matthews of classes, spearman of numbers, where they are "
        "asked for; "
        "those that the objective gives if unset",
    )
    tasks: list[str] = Field(
        default_factory=list,
        description="task files in lm-eval's format, evaluated once after training, of the commit that is exported",
    )

    def metrics_for(self, objective: str) -> tuple[str, ...]:
        """The metrics of an evaluation: those that were asked for, or all that the objective gives."""
        return tuple(self.metrics or [m for m in metrics_of(objective) if m not in get_args(OfPredictions)])

    @property
    def own_metrics(self) -> tuple[str, ...]:
        """Those of the metrics that are the user's own."""
        return tuple(metric for metric in self.metrics or () if is_object_reference(metric))

    @property
    def of_predictions(self) -> tuple[str, ...]:
        """Those of the metrics that need all predictions together."""
        return tuple(metric for metric in self.metrics or () if metric in get_args(OfPredictions))

    def is_due(self, step: int, last: int) -> bool:
        """Whether to evaluate after `step` of a run of `last` steps."""
        return step in self.at or self.is_regular(step, last)

    def is_regular(self, step: int, last: int) -> bool:
        """Whether to evaluate there but for `at`."""
        if step in (0, last):
            return self.at_start if step == 0 else self.at_end
        return step % self.every == 0


class StopWhen(StrictModel):
    """Early stopping: the run ends as done when a metric has not become better for some evaluations."""

    metric: str = Field(default="validation.loss", description="the set's name, a dot and the metric")
    patience: Positive = Field(default=3, description="evaluations in a row without a better value")
    min_delta: float = Field(default=0.0, ge=0.0, description="the least change that counts as better")

    def __str__(self) -> str:
        return f"{self.metric} has not become better in {self.patience} evaluations"


def without_tasks(evaluate: EvaluateSpec | None, sets: list[str]) -> EvaluateSpec | None:
    """Evaluations of these sets alone, for a run whose model nobody takes further; None without a set."""
    return evaluate.model_copy(update={"tasks": []}) if evaluate and sets else None


def metrics_of(objective: str) -> tuple[str, ...]:
    """The metrics that an objective gives. A loss by byte of text needs that every token is predicted, and once; what
    is no text has no perplexity, and a number is not right or wrong."""
    if objective == SAMPLES:
        return ("loss", "accuracy", "zero_shot")
    left_out = set() if objective == "causal_lm" else {"bits_per_byte"}
    if objective in COLUMNS and objective not in ("seq2seq", "conversation"):
        left_out |= {"perplexity"}
    if objective == "regression":
        left_out |= {"accuracy"}
    if objective not in PREFERENCES:
        left_out |= {*get_args(OfAnswers), *get_args(OfWords)}
    if objective != "sequence_classification":
        left_out |= {*get_args(OfClasses)}
    if objective != "regression":
        left_out |= {"spearman"}
    if objective == "reward":
        left_out |= {*get_args(OfWords)}
    return tuple(m for m in get_args(Metric) if m not in left_out)


def metric_problem(metric: str, names: list[str], evaluate: EvaluateSpec, objective: str) -> str:
    """Why a job with sets of these names does not measure `metric`, as in validation.loss; empty if it does."""
    name, _, kind = metric.partition(".")
    given = evaluate.metrics_for(objective)
    if name in names and kind in given:
        return ""
    possible = ", ".join(f"{name}.{kind}" for name in names for kind in given)
    return (
        f"is not measured; name one of {possible}"
        if possible
        else "is not measured: there is no held-out text"
    )
