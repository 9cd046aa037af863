"""A job with everything that follows from its file alone. Made once and passed to all code that needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.config.errors import InputError
from orchestrator.config.records import COLUMNS, COMPARED, FRAMED, WITHOUT_SENTINELS
from orchestrator.config.spec import JobSpec
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.data.encoding.config import TrainedTokenizer
from orchestrator.models.kept_config import config_to_keep
from orchestrator.models.named_teacher import WHERE, named_teacher
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.choose_precision import Choice
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.prune.config import gates_notes
from orchestrator.train.distillation.config import DistillSpec
from workloads.errors import WorkloadError
from workloads.hf.files.hf_config import FolderConfig
from workloads.own.object_reference import is_object_reference
from workloads.predicted import predicted

if TYPE_CHECKING:
    from workloads.adapters.adapter import Adapter
    from workloads.describe import Description


@dataclass(frozen=True)
class ResolvedJob:
    """The job as written, and what follows from it.

    Attributes:
        model: the model, for the size of the tokenizer's vocabulary.
        shape: its sizes, for planning.
        special_tokens: those that the objective needs in a tokenizer.
        precision: how the precision was chosen; None if the job, or the run that it resumes, names it.
        folder_config: the configuration of the pretrained folder, see `orchestrator.models.kept_config`; None without
            one.
    """

    spec: JobSpec
    model: Description
    special_tokens: tuple[str, ...]
    vocabulary_size: int
    shape: ModelShape
    precision: Choice | None = None
    folder_config: FolderConfig | None = None

    def with_rows(self, row_tokens: tuple[tuple[int, float], ...]) -> ResolvedJob:
        """Return the job with these mean lengths of rows, see `ModelShape`."""
        return replace(self, shape=replace(self.shape, row_tokens=row_tokens))

    @property
    def notes(self) -> list[str]:
        """Return one line for each difference between this training and the model's configuration, and for gates of
        heads that cannot close.
        """
        workload = self.spec.workload
        # Each of two compared answers starts at position 0.
        length = self.spec.data.sequence_length // (2 if workload.objective in COMPARED else 1)
        notes = self.model.training_notes(workload.model, length, workload.dropouts[0])
        return [*notes, *gates_notes(workload, self.spec.train)]


def adapter_of(workload: WorkloadSpec) -> Adapter | None:
    """Return the adapter of the job; None without one."""
    from workloads.adapters.adapter import Adapter

    adapter = workload.adapter
    if adapter is None:
        return None
    return Adapter(
        adapter.kind, adapter.rank, adapter.alpha, tuple(adapter.targets), adapter.quantize == "nf4"
    )


def resolve(
    spec: JobSpec, vocabulary_size: int | None = None, folder_config: FolderConfig | None = None
) -> ResolvedJob:
    """Resolve a job.

    Args:
        spec: the job.
        vocabulary_size: size of the vocabulary; None to take it from the job's tokenizer.
        folder_config: the pretrained folder's configuration that the run has kept; None to read the folder.

    Raises InputError if the model or the tokenizer is missing or cannot be read.
    """
    from workloads.describe import describe

    special = special_tokens_of(spec.data, spec.workload)
    size = _vocabulary_size(spec.data, special) if vocabulary_size is None else vocabulary_size
    with wrong_input("workload"):
        # The heads of other objectives can be checked only when the workload is loaded.
        workload = spec.workload
        objective = workload.objective if workload.objective in COLUMNS else None
        labels = len(spec.data.labels) or None
        folder_config = config_to_keep(spec.workload, folder_config)
        model = describe(
            workload.model,
            workload.changes,
            vocab_size=size,
            objective=objective,
            classes=labels,
            implementation=workload.implementation,
            kept=folder_config,
        )
        if folder_config and model.tied is not None:
            folder_config = replace(folder_config, tied=model.tied)
        divides = spec.parallel != "auto" and spec.parallel.divides_model
        read = predicted(workload.objective, workload.options, spec.data.sequence_length)
        shape = model_shape(model, spec.data.sequence_length, divides, read)
        if spec.evaluate and spec.evaluate.own_metrics:
            shape = replace(shape, no_model_split="an own metric reads whole outputs")
    if spec.distill:
        shape = _with_teacher(shape, model, spec.distill, spec.workload, divides)
    if spec.rollout:
        shape = replace(shape, even_shares="the ranks divide the answers of each prompt evenly")
    if workload.objective == "sentence_embeddings":
        shape = replace(
            shape,
            even_shares="its loss compares the texts of all ranks",
            no_sequence_split="its loss reads whole texts",
        )
    if spec.quantize:
        shape = replace(shape, quantised_group=spec.quantize.scheme.group)
    if spec.reads_base:
        from workloads.hf.tables.our_names import in_our_names
        from workloads.parameter_shares import quantised_share, trained_share

        train = spec.train
        with wrong_input("workload.adapter.targets"), in_our_names(model):
            share = trained_share(model, train.freeze, adapter_of(spec.workload), train.thawed(train.steps))
        with wrong_input("workload.adapter.quantize"):
            small = quantised_share(model, adapter_of(spec.workload))
        shape = replace(shape, trained_share=share, quantised_share=small)
        kind = spec.workload.adapter.kind if spec.workload.adapter else ""
        if kind in ("prefix", "prompt", "p_tuning"):
            named = "prefix" if kind == "prefix" else "prompt"
            shape = replace(
                shape, no_context_split=f"every rank's tokens attend to a {named} that none of them holds"
            )
        if kind in ("prompt", "p_tuning"):
            shape = replace(shape, no_sequence_split="a prompt precedes the sequence")
    return ResolvedJob(spec, model, special, size, shape, folder_config=folder_config)


def _with_teacher(
    shape: ModelShape, model: Description, distill: DistillSpec, workload: WorkloadSpec, divides: bool
) -> ModelShape:
    """Return the student's shape with its teacher and with the axes that cannot be divided because both are compared.

    Args:
        shape: the student's sizes.
        model: the student.
        distill: names the teacher, and what is compared.
        workload: the student as the job names it.
        divides: whether a class of transformers may be divided.

    Raises:
        InputError: if there is no such teacher.
    """
    from workloads.describe import describe

    named = named_teacher(distill.teacher, workload)
    with wrong_input(WHERE):
        theirs = describe(
            named.spec.model,
            named.spec.changes,
            vocab_size=model.vocab_size,
            objective=workload.objective if workload.objective in COLUMNS else None,
            classes=getattr(model, "classes", None),
            implementation=named.spec.implementation,
            kept=named.kept,
        )
    # What is predicted follows from the objective alone, and so is the student's.
    teacher = replace(model_shape(theirs, shape.sequence_length, divides), head_share=shape.head_share)
    shape = replace(
        shape,
        teacher=teacher,
        teacher_runs=distill.stored is None,
        teacher_sharded=distill.shard,
        relation_heads=(distill.relations and distill.relations.heads) or 0,
    )
    if theirs.divided_by != model.divided_by and not shape.no_model_split:
        shape = replace(
            shape, no_tensor_split=shape.no_tensor_split or "its teacher is divided in another way"
        )
    if distill.looks_inside:
        reason = "distill.hidden and distill.relations compare whole layers of whole texts"
        even = "a part of its loss is a mean over micro-batches"
        shape = replace(
            shape,
            no_pipeline_split=reason,
            no_context_split=reason,
            no_sequence_split=reason,
            even_shares=even,
        )
    return shape


@contextlib.contextmanager
def wrong_input(where: str) -> Iterator[None]:
    """Turn a workload's error into an InputError at the key `where` of the job file."""
    try:
        yield
    except WorkloadError as error:
        raise InputError(str(error), where) from None


def special_tokens_of(data: DataSpec, workload: WorkloadSpec) -> tuple[str, ...]:
    """Return the special tokens that the job's objective needs. Raises InputError for an unknown objective."""
    if data.samples is not None or workload.objective in WITHOUT_SENTINELS:
        return ()
    from workloads.objectives import special_tokens

    with wrong_input("workload.objective"):
        return special_tokens(workload.objective)


def is_framed(data: DataSpec, workload: WorkloadSpec) -> bool:
    """Return whether the tokenizer's special tokens surround each text of the prepared data, see
    `SampledObjective.framed`.
    """
    objective = workload.objective
    if data.samples is not None or not is_object_reference(objective):
        return objective in FRAMED
    from workloads.objectives import is_framed

    with wrong_input("workload.objective"):
        return is_framed(objective)


def _vocabulary_size(data: DataSpec, special: tuple[str, ...]) -> int:
    if data.samples is not None:
        return 1
    if isinstance(data.tokenizer, TrainedTokenizer):
        return data.tokenizer.recipe.vocabulary
    from orchestrator.data.encoding import tokenizer

    text, _ = tokenizer.load(data.tokenizer, special, data.add_tokens)
    return tokenizer.size_in(text)
