"""The teacher of a distilled run: which model it is, whether it fits the student, and what layers both show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.checkpoint.identity import KEPT, job_of_commit
from orchestrator.config.errors import InputError
from orchestrator.config.records import OF_CLASSES
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.resolve.base import Base, named_base, tokens_that_differ
from orchestrator.resolve.named_commit import commit_at, place_and_tag
from orchestrator.resolve.resolved_job import wrong_input
from orchestrator.resolve.training_inputs import load_workload
from orchestrator.storage.retry import Retry
from orchestrator.storage.uri import is_local
from orchestrator.train.config import TrainSpec
from orchestrator.train.distillation.config import DistillSpec, pairs_of
from workloads.errors import WorkloadError
from workloads.hf.hf_config import FOLDER, FolderConfig, root

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from workloads.workload import Vocabulary, Workload

WHERE = "distill.teacher"
PLACES = "give hf:<folder>, an export's folder, or a run directory"


@dataclass(frozen=True)
class TeacherModel:
    """A teacher as a job would train it, and its weights."""

    asked: WorkloadSpec
    base: Base
    kept: FolderConfig | None = None

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return self.base.uri if self.base.step is None else f"{self.base.uri}@{self.base.step}"


def teacher_model(distill: DistillSpec, workload: WorkloadSpec, known: Base | None = None) -> TeacherModel:
    """Return the model that a job names as its teacher, for the student's objective.

    Args:
        distill: names the teacher.
        workload: the student.
        known: the teacher's weights, if their checksum was computed before.

    Raises:
        InputError: if there is no such model, or it has no weights.
    """
    named = distill.teacher
    if not named.startswith(FOLDER):
        uri, tag = place_and_tag(named)
        if is_local(uri) and (Path(root(uri)) / "config.json").exists():
            if tag:
                raise InputError(
                    f"{uri} is an export, which has no step", WHERE, "leave out what follows the @"
                )
            named = f"{FOLDER}{uri}"
        else:
            return _of_run(uri, str(known.step) if known else tag, workload)
    asked = _like(workload, model=named)
    with wrong_input(WHERE):
        base = known or named_base(asked, None)
    if base is None:
        raise InputError(f"{named.removeprefix(FOLDER)} has no weights", WHERE, PLACES)
    return TeacherModel(asked, base)


def _of_run(uri: str, tag: str, workload: WorkloadSpec) -> TeacherModel:
    commit = commit_at(uri, tag, WHERE, "has no commit, and is no export", PLACES)
    job = job_of_commit(commit)
    if job is None:
        raise InputError(
            f"{uri} does not say which model it has trained", WHERE, "export it, and name the export"
        )
    theirs = job.workload
    if theirs.adapter and theirs.adapter.kind != "bitfit":
        raise InputError(f"{uri} was trained with an adapter", WHERE, "export it, and name the export")
    asked = _like(workload, model=theirs.model, changes=theirs.changes, mup=theirs.mup)
    asked = asked.model_copy(
        update={"init_from": f"{uri}@{commit.step}", "implementation": theirs.implementation}
    )
    base = named_base(asked, commit.step)
    assert base is not None
    kept = commit.meta.get(KEPT)
    return TeacherModel(asked, base, FolderConfig(**kept) if kept else None)


def _like(workload: WorkloadSpec, **model: object) -> WorkloadSpec:
    """Return the student's objective with another model, without dropout or an adapter."""
    return WorkloadSpec.model_validate(
        {
            "objective": workload.objective,
            "options": workload.options,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            **model,
        }
    )


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
            asked=teacher.asked,
            data=data,
            train=train.model_copy(update={"freeze": [], "thaw": {}}),
            seed=0,
            vocabulary=vocabulary,
            data_format=data_format,
            base=teacher.base,
            retry=retry,
            kept=teacher.kept,
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
        what = f"{teacher.place} has no weights for {listed(missing)}"
        raise InputError(
            what, WHERE, f"{teacher.asked.objective} needs it; name a model that was trained with it"
        )
    rows = workload.begun_tables
    if any(rows[name][0] != workload.shapes[name][0] for name in rows):
        raise InputError(
            f"{teacher.place} has no rows for tokens that were added", WHERE, "train the teacher with them"
        )


def check_vocabularies(student: Workload, teacher: Workload, where: str) -> None:
    """Raise InputError if both models do not predict over as many tokens. Classes are matched by their names."""
    if student.objective.name in OF_CLASSES:
        return
    theirs, ours = teacher.config.vocab_size, student.config.vocab_size
    if theirs != ours:
        what = f"{where} predicts over {theirs} tokens, and the student over {ours}"
        hint = "give both the same tokenizer and vocab_size; a teacher's probabilities are of its own tokens"
        raise InputError(what, WHERE, hint)


def check_tokens(base: Base, tokenizer: Tokenizer) -> None:
    """Raise InputError if the teacher's tokenizer, where known, is not the student's: both read the same ids."""
    found = tokens_that_differ(base, tokenizer)
    if not found:
        return
    what = f"{len(found)} tokens of {base.uri} have other ids than in the student's tokenizer, such as {found[0]!r}"
    raise InputError(what, WHERE, "set data.tokenizer to the teacher's, or train another teacher")


def compared(distill: DistillSpec, student: Workload, teacher: Workload) -> tuple[Workload, Workload]:
    """Return both models with what their layers show, if the loss compares it.

    Raises:
        InputError: if a layer does not exist, or the layers cannot be compared.
    """
    if not distill.looks_inside:
        return student, teacher
    from workloads.model.shown import Shows

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
    maps = {one: theirs.hidden for one, _ in pairs["hidden"]} if ours.hidden != theirs.hidden else {}
    try:
        made = (
            student.showing(
                Shows(
                    tuple(one for one, _ in pairs["hidden"]),
                    tuple((kind, one) for kind, one, _ in relations),
                    heads,
                    maps,
                )
            ),
            teacher.showing(
                Shows(
                    tuple(other for _, other in pairs["hidden"]),
                    tuple((kind, other) for kind, _, other in relations),
                    heads,
                )
            ),
        )
    except WorkloadError as error:
        raise InputError(str(error), "distill", "leave out hidden and relations") from None
    if distill.relations:
        _check_heads(kinds, heads, student, teacher)
    return made


def _check_heads(kinds: list[str], heads: int, student: Workload, teacher: Workload) -> None:
    """Raise InputError if relations of the models have other numbers of heads."""
    ours, theirs = student.config, teacher.config
    where = "distill.relations"
    for kind in kinds:
        many = "kv_heads" if kind in ("keys", "values") else "heads"
        of_attention = kind in ("attention", "scores")
        one, other = getattr(ours, many), getattr(theirs, many)
        if (of_attention or not heads) and one != other:
            other_way = "leave it out of of" if of_attention else "set heads to the number of relation heads"
            raise InputError(
                f"{kind} has {one} heads in the student and {other} in the teacher", where, other_way
            )
        for whose, config in (("student", ours), ("teacher", theirs)) if heads and not of_attention else ():
            width = getattr(config, many) * config.head_dim
            if width % heads:
                what = f"heads {heads} does not divide the {width} columns of the {whose}'s {kind}"
                raise InputError(what, f"{where}.heads", "choose a divisor")


def check_same_teacher(known: str | None, now: str, distill: DistillSpec | None) -> None:
    """Raise InputError if a run has learnt from another teacher so far.

    Args:
        known: checksum of the teacher's weights in the run's commit; None if it has none.
        now: their checksum now; empty in a task that reads no teacher.
        distill: names the teacher.
    """
    if known and now and known != now and distill is not None:
        what = f"the weights of {distill.teacher} are not those that the run has learnt from so far"
        raise InputError(what, WHERE, "restore them, or start a new run")
