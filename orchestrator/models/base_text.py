"""How answers of a base's weights begin, end and are drawn, compared with the job that starts from them.

A forward pass reads none of this, so a difference would show up only as wrong results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.checkpoint.identity import job_of_commit
from orchestrator.config.errors import InputError
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.prepared import EXCERPT
from orchestrator.models.base import Base, commit_of
from orchestrator.models.kept_config import kept_config
from orchestrator.storage.retry import Retry
from workloads.errors import WorkloadError
from workloads.hf.files.hf_config import FOLDER
from workloads.hf.files.meaning import BY_NAME, folder_meaning, generates, vocabulary_of_folder
from workloads.own.object_reference import is_object_reference

if TYPE_CHECKING:
    from workloads.hf.files.meaning import FolderMeaning
    from workloads.transformer_workload import TransformerWorkload
    from workloads.workload import Vocabulary, Workload

PAIRS = "seq2seq"
"""The objective that trains answers of an encoder-decoder."""


@dataclass(frozen=True)
class BaseText:
    """The tokens around answers of a base.

    Attributes:
        where: the base.
        objective: the objective that trained it; None if unknown.
        start: the first token of its decoder; None if unknown.
        target: the tokens before and after a target; None if they are those of a source, or if unknown.
        settings: the generation settings of its folder.
    """

    where: str
    objective: str | None = None
    start: int | None = None
    target: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


W = TypeVar("W", bound="Workload")


def with_text_of_base(workload: W, spec: WorkloadSpec, base: Base, retry: Retry | None = None) -> W:
    """Return the workload with a note for each difference in generated text from the base; see `text_notes`."""
    config = workload.config
    if getattr(config, "head", None) is None or not generates(config):
        return workload
    notes = text_notes(workload, spec, _text_of_base(workload.vocabulary, spec, base, retry))
    generation = workload.generation
    generation = replace(generation, notes=(*generation.notes, *notes))
    return replace(workload, generation=generation)  # type: ignore[type-var]


def text_of_workload(workload: TransformerWorkload, objective: str, where: str) -> BaseText:
    """Return the text of the run at `where`, which has no commit yet."""
    return BaseText(
        where=where,
        objective=objective,
        start=workload.decoder_start,
        target=workload.vocabulary.target,
        settings=workload.generation.settings,
    )


def text_notes(workload: Workload, spec: WorkloadSpec, theirs: BaseText) -> tuple[str, ...]:
    """Return one line if the base has generation settings that the job does not apply.

    Raises WorkloadError if answers of the job would begin with another token than those of the base, without the job
    naming one, or if they would lack the language of the base's targets.
    """
    from workloads.model.processors import APPLIED, non_neutral

    where = theirs.where
    hint = f"name hf:{where} in workload.model" if not theirs.objective else "give the model of the base"
    if spec.objective == PAIRS and theirs.objective in (PAIRS, None):
        start = getattr(workload, "decoder_start", None)
        if "start" not in spec.options and theirs.start not in (start, None):
            raise WorkloadError(
                f"the decoder of {where} begins with token {theirs.start}, but that of the job with {start}; "
                f"set workload.options.start to {theirs.start}, or {hint}"
            )
        if theirs.target and not workload.vocabulary.target:
            tokens = " and ".join(str(side) for side in map(list, theirs.target) if side)
            raise WorkloadError(
                f"targets of {where} are framed by the tokens {tokens}, which name their language, but targets of "
                f"the job are framed like sources; {hint}"
            )
    ours = workload.generation
    ends = {*ours.ends, workload.vocabulary.eos}
    lost = {
        name: value
        for name, value in non_neutral(theirs.settings, APPLIED).items()
        if ours.settings.get(name) != value and not _is_trained(name, value, workload)
    }
    ids = theirs.settings.get("eos_token_id")
    if unknown := [
        token for token in (ids if isinstance(ids, list) else [ids]) if token not in (*ends, None)
    ]:
        lost["eos_token_id"] = unknown
    if not lost:
        return ()
    names = ", ".join(f"{name} {value}" for name, value in lost.items())
    return (f"generation settings of {where} that the job does not apply: {names}; to apply them, {hint}",)


def _is_trained(name: str, value: Any, workload: Workload) -> bool:
    """Return whether a setting forces the first token that every target of the job begins with."""
    around = getattr(workload.objective, "around_target", ((), ()))
    return name == "forced_bos_token_id" and (value,) == around[0][:1]


def _text_of_base(ours: Vocabulary, spec: WorkloadSpec, base: Base, retry: Retry | None) -> BaseText:
    if base.step is None:
        meaning = folder_meaning(base.uri)
        folder_vocabulary = replace(ours, decoder_start=None, target=None)
        return _text_of_folder(BaseText(base.uri), folder_vocabulary, meaning, spec)
    where = f"{base.uri}@{base.step}"
    _, commit = commit_of(base, retry)
    job = job_of_commit(commit)
    if job is None or is_object_reference(job.workload.model):
        return BaseText(where)
    workload = job.workload
    result = BaseText(where, workload.objective)
    vocabulary = _vocabulary_of_run(base.uri, retry)
    if workload.model.startswith(FOLDER):
        try:
            meaning = folder_meaning(workload.model.removeprefix(FOLDER), kept_config(commit))
        except WorkloadError:
            return result  # a commit of an earlier version whose folder is gone
        return _text_of_folder(result, vocabulary, meaning, workload)
    named = workload.options.get("start", -1)
    return replace(result, start=named if named >= 0 else vocabulary.padding if vocabulary else None)


def _text_of_folder(
    base_text: BaseText, vocabulary: Vocabulary | None, meaning: FolderMeaning, workload: WorkloadSpec
) -> BaseText:
    """Return the text of a model of the folder, as `workload` trains it."""
    base_text = replace(base_text, settings=meaning.settings)
    start = workload.options.get("start", -1)
    if workload.objective != PAIRS or vocabulary is None:
        return base_text
    vocabulary_with_start = vocabulary_of_folder(vocabulary, meaning, PAIRS, start)
    is_named = base_text.objective is not None and start >= 0
    return replace(
        base_text,
        start=start if is_named else vocabulary_with_start.decoder_start,
        target=vocabulary_with_start.target,
    )


def _vocabulary_of_run(uri: str, retry: Retry | None) -> Vocabulary | None:
    """Return the vocabulary of a run's data; None if the run has kept no excerpt, or one of an earlier version, whose
    decoders began otherwise.
    """
    from orchestrator.data.store.tokens import Tokens

    try:
        tokens = Tokens.open(f"{uri}/{EXCERPT}", retry, keep=0)
        return tokens.vocabulary() if tokens.manifest.format >= BY_NAME else None
    except InputError:
        return None
