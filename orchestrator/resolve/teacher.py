"""The teacher of a distilled run: which model it is, whether it fits the student, and what layers both show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.config.errors import InputError
from orchestrator.config.records import OF_CLASSES
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.data.store.manifest import FORMAT
from orchestrator.models.named_teacher import WHERE
from orchestrator.models.teacher_weights import TeacherModel, teacher_model
from orchestrator.resolve.training_inputs import load_workload
from orchestrator.storage.retry import Retry
from orchestrator.train.config import TrainSpec
from orchestrator.train.distillation.config import DistillSpec, pairs_of
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from workloads.workload import Vocabulary, Workload


def teacher_workload(
    teacher: TeacherModel,
    data: DataSpec,
    train: TrainSpec,
    vocabulary: Vocabulary,
    data_format: int,
    retry: Retry | None = None,
) -> Workload:
    """Return the teacher over the student's vocabulary; rows of its label head follow the student's labels by name.

    Args:
        teacher: the model.
        data: the student's data.
        train: how the student trains.
        vocabulary: the student's vocabulary.
        data_format: format of the prepared data.
        retry: how to retry reads.

    Raises:
        InputError: if it does not fit, or lacks weights of a part that the objective needs.
    """
    try:
        workload = load_workload(
            spec=teacher.spec,
            data=data,
            train=train.model_copy(update={"freeze": [], "thaw": {}}),
            seed=0,
            vocabulary=vocabulary,
            data_format=data_format,
            base=teacher.base,
            retry=retry,
            folder_config=teacher.kept,
        )
    except InputError as error:
        raise InputError(error.what, WHERE, error.hint) from None
    _check_weights(workload, teacher)
    return workload


def _check_weights(workload: Workload, teacher: TeacherModel) -> None:
    """Raise InputError if a part of the teacher would be random."""
    from workloads.model.stored import listed

    stored = getattr(workload, "pretrained", None)
    missing = list(getattr(workload, "new", ()))
    if stored is not None:
        missing += [name for name in workload.shapes if stored.find(name) is None]
    if missing:
        problem = f"{teacher.location} has no weights for {listed(missing)}"
        raise InputError(
            problem, WHERE, f"{teacher.spec.objective} needs it; name a model that was trained with it"
        )
    rows = workload.begun_tables
    if any(rows[name][0] != workload.shapes[name][0] for name in rows):
        raise InputError(
            f"the embedding of {teacher.location} has no rows for the added tokens",
            WHERE,
            "train the teacher with them",
        )


def check_teacher(
    distill: DistillSpec, workload: WorkloadSpec, data: DataSpec, train: TrainSpec, student: Workload
) -> None:
    """Check that a job's teacher exists, has all weights that it needs, and fits the student.

    Args:
        distill: names the teacher, and what is compared.
        workload: the student as the job names it.
        data: the job's data.
        train: how the job trains.
        student: the student over the vocabulary of the job's tokenizer.

    Raises:
        InputError: if not.
    """
    model = teacher_model(distill.teacher, workload)
    teacher = teacher_workload(model, data, train, vocabulary=student.vocabulary, data_format=FORMAT)
    check_vocabularies(student, teacher, model.location)
    compared(distill, student, teacher)


def check_vocabularies(student: Workload, teacher: Workload, where: str) -> None:
    """Raise InputError if both models do not predict over as many tokens. Classes are matched by their names."""
    if student.objective.name in OF_CLASSES:
        return
    theirs, ours = teacher.config.vocab_size, student.config.vocab_size
    if theirs != ours:
        problem = f"{where} predicts over {theirs} tokens, and the student over {ours}"
        hint = "give both the same tokenizer and vocab_size; a teacher's probabilities are for the teacher's tokens"
        raise InputError(problem, WHERE, hint)


def compared(distill: DistillSpec, student: Workload, teacher: Workload) -> tuple[Workload, Workload]:
    """Return both models with their inner states, if the loss compares these.

    Raises:
        InputError: if a layer does not exist, or the layers cannot be compared.
    """
    if not distill.looks_inside:
        return student, teacher
    from workloads.model.inside import Shows

    ours, theirs = student.config, teacher.config
    pairs: dict[str, tuple[tuple[int, int], ...]] = {"hidden": (), "relations": ()}
    for key, part in (("hidden", distill.hidden), ("relations", distill.relations)):
        if part is None:
            continue
        try:
            pairs[key] = pairs_of(part.layers, ours.layers, theirs.layers)
        except ValueError as error:
            raise InputError(str(error), f"distill.{key}.layers") from None
    if any(0 in pair for pair in pairs["relations"]):
        raise InputError("names layer 0, the embeddings, which have no attention", "distill.relations.layers")
    kinds = distill.relations.of if distill.relations else []
    heads = (distill.relations and distill.relations.heads) or 0
    relations = [(kind, *pair) for kind in kinds for pair in pairs["relations"]]
    maps = {layer: theirs.hidden for layer, _ in pairs["hidden"]} if ours.hidden != theirs.hidden else {}
    try:
        made = (
            student.showing(
                Shows(
                    tuple(layer for layer, _ in pairs["hidden"]),
                    tuple((kind, layer) for kind, layer, _ in relations),
                    heads,
                    maps,
                )
            ),
            teacher.showing(
                Shows(
                    tuple(teacher_layer for _, teacher_layer in pairs["hidden"]),
                    tuple((kind, teacher_layer) for kind, _, teacher_layer in relations),
                    heads,
                )
            ),
        )
    except WorkloadError as error:
        raise InputError(str(error), "distill", "leave out hidden and relations") from None
    if distill.relations:
        _check_heads(kinds, heads, student, teacher)
    return made


def _check_heads(kinds: Sequence[str], heads: int, student: Workload, teacher: Workload) -> None:
    """Raise InputError if relations of the models have other numbers of heads."""
    ours, theirs = student.config, teacher.config
    where = "distill.relations"
    for kind in kinds:
        many = "kv_heads" if kind in ("keys", "values") else "heads"
        is_attention = kind in ("attention", "scores")
        count, teacher_count = getattr(ours, many), getattr(theirs, many)
        if (is_attention or not heads) and count != teacher_count:
            other_way = "leave it out of of" if is_attention else "set heads to the number of relation heads"
            raise InputError(
                f"{kind} has {count} heads in the student and {teacher_count} in the teacher",
                where,
                other_way,
            )
        for whose, config in (("student", ours), ("teacher", theirs)) if heads and not is_attention else ():
            width = getattr(config, many) * config.head_dim
            if width % heads:
                problem = f"heads {heads} does not divide the {width} columns of the {whose}'s {kind}"
                raise InputError(problem, f"{where}.heads", "choose a divisor")
