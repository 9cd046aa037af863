"""The distillation keys of a job file: the teacher, and the parts of the loss that compare with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from orchestrator.config.records import OF_ANSWERS
from orchestrator.config.resources import Workers, one_number
from orchestrator.config.strict import Count, Positive, StrictModel
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.train.config import TrainSpec
from workloads.own.object_reference import is_object_reference

NOT_DISTILLED = {
    "multi_label_classification": "its labels do not share one distribution",
    "sentence_embeddings": "it has no classes",
    "regression": "a number has no distribution over classes",
    "span_extraction": "its logits cover the positions of a text",
    "replaced_token_detection": "ELECTRA trains two networks",
    "next_sentence": "it has a second head, which a teacher of text lacks",
    "sentence_order": "it has a second head, which a teacher of text lacks",
    **dict.fromkeys(OF_ANSWERS, "its loss is about whole answers"),
}
"""Objectives without distillation, each with the reason."""
STORABLE = ("causal_lm", "conversation", "seq2seq", "sequence_classification")
"""Objectives that predict the same tokens of a sample in every epoch, so that logits may be stored."""
PASS_TOKENS = 4096
"""About the tokens that a teacher worker reads in one pass."""
Weight = Annotated[float, Field(gt=0.0)]
Pairs = Annotated[list[tuple[Count, Count]], Field(min_length=1)]
Layers = Literal["uniform", "last"] | Pairs
Relation = Literal["attention", "scores", "queries", "keys", "values"]


class LogitsSpec(StrictModel):
    """The divergence between the predictions of teacher and student (Hinton et al., 2015)."""

    weight: Weight = Field(default=0.5, description="weight of the divergence in the loss")
    temperature: float = Field(
        default=2.0,
        gt=0.0,
        description="both models' logits are divided by it, and the divergence is multiplied by its square",
    )
    divergence: Literal["forward", "reverse", "jensen_shannon"] = Field(
        default="forward",
        description="forward: KL(teacher || student); reverse: KL(student || teacher); jensen_shannon: the mean of "
        "both to their mixture",
    )
    source: Literal["online", "stored", "workers"] = Field(
        default="online",
        description="online: the teacher runs in every step; stored: it runs once over the training samples before "
        "the first step, and its largest logits are stored next to the data; workers: workers of their own run it "
        "while the student trains, and store the same",
    )
    k: Positive = Field(
        default=64,
        description="stored and workers: logits that are kept of each predicted token; all of a classifier's",
    )

    @model_validator(mode="after")
    def k_is_of_stored_logits(self) -> LogitsSpec:
        if self.source == "online" and not self.at_default("k"):
            raise ValueError("k is for source stored and workers, but this is online; leave it out")
        return self


class HiddenSpec(StrictModel):
    """The difference of hidden states (TinyBERT; Jiao et al., 2020, equations 8 and 9; DistilBERT; BERT-PKD)."""

    ADDED_LATER: ClassVar[tuple[str, ...]] = ("loss", "tokens")

    weight: Weight = Field(default=1.0, description="weight of the difference in the loss")
    loss: Literal["squared", "cosine"] = Field(
        default="squared",
        description="squared: the mean squared difference (TinyBERT); cosine: 1 - cos of the angle between two states "
        "(DistilBERT), which is half of the squared difference of normalised ones (BERT-PKD)",
    )
    tokens: Literal["all", "first"] = Field(
        default="all", description="tokens whose states are compared; first: those that BERT-PKD compares"
    )
    layers: Layers = Field(
        default="uniform",
        description="layers to compare: uniform spreads the student's over the teacher's, last compares the last "
        "ones, or a list of [student layer, teacher layer], where 0 is the embeddings",
    )


class RelationsSpec(StrictModel):
    """The relations between the tokens of a text, within attention (TinyBERT, MiniLM)."""

    weight: Weight = Field(default=1.0, description="weight of the relations in the loss")
    of: list[Relation] = Field(
        default=["attention", "values"],
        min_length=1,
        description="attention: distributions of attention (MiniLM); scores: their squared difference before the "
        "softmax (TinyBERT); queries, keys, values: how similar those of two tokens are (MiniLM, MiniLMv2)",
    )
    layers: Layers = Field(default="last", description="layers to compare, as in hidden.layers")
    heads: Positive | None = Field(
        default=None,
        description="relation heads into which queries, keys and values are divided (MiniLMv2); unset: the "
        "attention heads; both models must then have the same number",
    )

    @model_validator(mode="after")
    def each_is_named_once(self) -> RelationsSpec:
        repeated = [name for name in self.of if self.of.count(name) > 1]
        if repeated:
            raise ValueError(f"of names {repeated[0]} twice; leave one out")
        if self.heads and not {"queries", "keys", "values"} & set(self.of):
            raise ValueError(
                "heads divides queries, keys and values, and of names none of them; leave it out"
            )
        return self


class TeacherWorkers(Workers):
    """Minimum and maximum number of teacher workers."""

    min: Count = Field(
        default=0,
        description="the run waits rather than train with fewer; with 0 the training workers run the teacher "
        "themselves, before the first step, if there is no room for a teacher worker",
    )
    max: Positive = Field(default=1, description="maximum; they come and go between min and max")


class DistillSpec(StrictModel):
    """Learn from a teacher: the loss is the weighted sum of its parts."""

    NO_IDENTITY: ClassVar[tuple[str, ...]] = ("workers", "shard")

    teacher: str = Field(
        min_length=1,
        description="hf:<folder>, an export's folder, or a run directory, followed by @<step>, @last or @best",
    )
    labels: float = Field(
        default=0.5, ge=0.0, description="weight of the objective's own loss, on the labels of the data"
    )
    logits: LogitsSpec | None = Field(
        default_factory=LogitsSpec, description="learn the teacher's predictions; null: do not"
    )
    hidden: HiddenSpec | None = Field(default=None, description="learn the teacher's hidden states")
    relations: RelationsSpec | None = Field(default=None, description="learn relations within attention")
    shard: bool = Field(
        default=False,
        description="divide the teacher's weights among the data-parallel ranks, whatever parallel.zero is: each pass "
        "gathers one layer after the other. For a teacher that does not fit beside the student on one rank",
    )
    workers: TeacherWorkers | None = Field(
        default=None,
        description="for logits.source workers: workers of their own that run the teacher, with the resources of "
        "resources.per_worker; a single number is both min and max. They come and go between min and max as there is "
        "room beside the training workers, and their number changes no logit. By default at most one",
    )

    @field_validator("workers", mode="before", json_schema_input_type=TeacherWorkers | int | None)
    @classmethod
    def one_number_is_both(cls, value: Any) -> Any:
        return one_number(value)

    @property
    def stored(self) -> LogitsSpec | None:
        """The logits, if steps read them from storage; None if the teacher runs in every step."""
        return self.logits if self.logits and self.logits.source != "online" else None

    @property
    def teacher_workers(self) -> TeacherWorkers | None:
        """The bounds of the number of teacher workers; None if the job has none."""
        if self.logits is None or self.logits.source != "workers":
            return None
        return self.workers or TeacherWorkers()

    @property
    def looks_inside(self) -> bool:
        """Whether a part of the loss compares hidden states or attention."""
        return bool(self.hidden or self.relations)

    @model_validator(mode="after")
    def something_is_learnt_from_the_teacher(self) -> DistillSpec:
        if not (self.logits or self.looks_inside):
            raise ValueError("learns nothing from the teacher; give logits, hidden or relations")
        if self.stored and self.looks_inside:
            key = "hidden" if self.hidden else "relations"
            raise ValueError(
                f"{key} needs the teacher in every step, but logits.source is {self.stored.source}; set it to online"
            )
        return self

    @model_validator(mode="after")
    def workers_have_work(self) -> DistillSpec:
        if self.workers and not self.teacher_workers:
            raise ValueError("workers are for logits.source workers; set it, or leave workers out")
        return self

    def problem(self, workload: WorkloadSpec, data: DataSpec, train: TrainSpec) -> str:
        """Return why a job cannot be distilled, by its keys alone; empty if nothing is wrong.

        Args:
            workload: the student's model and objective.
            data: the key `data` of the job.
            train: the key `train`.
        """
        objective = workload.objective
        if reason := NOT_DISTILLED.get(objective):
            return f"distill has no loss for {objective}: {reason}; leave it out"
        if data.samples is not None or is_object_reference(workload.model) or is_object_reference(objective):
            return "distill compares models of this project or of transformers, but this one is your own; leave it out"
        if self.looks_inside and train.compile:
            return "distill.hidden and distill.relations look into layers, which train.compile fuses; set it to false"
        return self._problem_of_stored(objective, data, train) if self.stored else ""

    def _problem_of_stored(self, objective: str, data: DataSpec, train: TrainSpec) -> str:
        """Return why logits cannot be stored; empty if they can."""
        online = "set distill.logits.source to online"
        if objective not in STORABLE:
            return (
                f"{objective} predicts other tokens in every epoch, so that logits cannot be stored; {online}"
            )
        if data.shuffle == "sections" or data.packing != "cut":
            key = "data.packing" if data.packing != "cut" else "data.shuffle"
            return f"logits are stored for samples that are known before training, but {key} makes them later; {online}"
        if train.continue_from and self.teacher_workers:
            return (
                "train.continue_from begins within another run's order of samples, and teacher workers compute logits "
                "in the order of their own run; set distill.logits.source to stored, and leave distill.workers out"
            )
        if train.sequence_warmup:
            return f"train.sequence_warmup cuts samples, but logits are stored for whole samples; {online}"
        return ""


def rows_of_pass(global_batch: int, shards: int, sequence_length: int) -> int:
    """Return how many samples a teacher worker reads in one pass. It depends on nothing that a run may change.

    Args:
        global_batch: samples of a step.
        shards: virtual shards of a step under bitwise determinism, 0 without it. A pass then reads the micro-batch of
            every layout, so that logits have the bits of `source: stored`.
        sequence_length: tokens of a sample.
    """
    return global_batch // shards if shards else max(1, min(global_batch, PASS_TOKENS // sequence_length))


def pairs_of(layers: Any, student: int, teacher: int) -> tuple[tuple[int, int], ...]:
    """Return which layers are compared, as (student layer, teacher layer), counted from 1; 0 is the embeddings.

    uniform compares layer i of S with layer ceil(i T / S) of T: TinyBERT's g(m) = 3 m for S = 4 and T = 12, and the
    last layers are a pair.

    Args:
        layers: `HiddenSpec.layers`.
        student: number of the student's layers.
        teacher: number of the teacher's layers.

    Raises:
        ValueError: if a layer does not exist.
    """
    if layers == "last":
        return ((student, teacher),)
    if layers == "uniform":
        return tuple((i, -(-i * teacher // student)) for i in range(1, student + 1))
    result: Sequence[tuple[int, int]] = tuple(
        (int(student_layer), int(teacher_layer)) for student_layer, teacher_layer in layers
    )
    for student_layer, teacher_layer in result:
        if student_layer > student or teacher_layer > teacher:
            model_name, layer, count = (
                ("student", student_layer, student)
                if student_layer > student
                else ("teacher", teacher_layer, teacher)
            )
            raise ValueError(f"names layer {layer} of the {model_name}, which has {count}")
        if (student_layer == 0) != (teacher_layer == 0):
            raise ValueError(
                f"compares layer {student_layer} with layer {teacher_layer}; the embeddings (0) have only each other"
            )
    return tuple(result)
