"""The jobs of a chain's stages before the first of them runs."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from orchestrator.chain.stage_run import StageRun, export_of
from orchestrator.config.chain import ChainSpec
from orchestrator.config.spec import JobSpec
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.encoding.config import TrainedTokenizer
from orchestrator.export.target import mark_of
from orchestrator.resolve.prepared_data import EXCERPT
from orchestrator.resolve.resolved_job import special_tokens_of
from orchestrator.train.distillation.config import DistillSpec

TOKENIZER_FILE = "tokenizer.json"


@contextlib.contextmanager
def stand_ins(chain: ChainSpec, stages: Mapping[str, StageRun]) -> Iterator[dict[str, JobSpec]]:
    """Yield the jobs of the stages, by name, as far as they are known before the first stage runs.

    A tokenizer that an earlier stage will train is replaced by an untrained one of the same kind, in a folder that
    exists during this context. A model that will lose tokens is replaced by the model with all of them.
    """
    with tempfile.TemporaryDirectory(prefix="chain-") as folder:
        yield {name: _stand_in(chain, stages, stage, Path(folder)) for name, stage in stages.items()}


def _stand_in(chain: ChainSpec, stages: Mapping[str, StageRun], stage: StageRun, folder: Path) -> JobSpec:
    """Return the job of a stage, with what is not there yet replaced; `folder` is for untrained tokenizers."""
    job = stage.job
    teacher = stage.stage.learns_from
    if teacher and chain[teacher.stage].vocabulary and not _is_made(stages[teacher.stage]):
        job = job.with_parts(distill=_distilled_by(job.distill, _source(chain, teacher.stage)))
    if (made_of := stage.stage.made_of) and not _is_made(stages[made_of.stage]):
        job = job.with_parts(workload=_model_to_come(chain, stage))
    elif not _lacks_tokenizer(chain, stages, stage):
        return job
    origin = chain.tokenizer_origin(stage.stage)
    while origin.vocabulary and (named := origin.made_of):
        origin = chain.tokenizer_origin(chain[named.stage])
    wanted = stages[origin.name].job.data.tokenizer
    if not isinstance(wanted, TrainedTokenizer):
        return job.with_parts(data=job.data.model_copy(update={"tokenizer": wanted}))
    if origin.name == stage.name:
        return job
    run = stages[origin.name].run
    place = run.at(EXCERPT)
    if not run.exists(f"{EXCERPT}/{TOKENIZER_FILE}"):
        from orchestrator.data.encoding import training

        special = special_tokens_of(origin.job.data, origin.job.workload)
        path = folder / origin.name
        path.mkdir(exist_ok=True)
        (path / TOKENIZER_FILE).write_text(training.train_bytes((), wanted.recipe.vocabulary, special))
        place = str(path)
    return job.with_parts(data=job.data.model_copy(update={"tokenizer": place}))


def _lacks_tokenizer(chain: ChainSpec, stages: Mapping[str, StageRun], stage: StageRun) -> bool:
    """Return whether another stage has yet to make the tokenizer of this one."""
    origin = chain.tokenizer_origin(stage.stage)
    if origin.name == stage.name:
        return False
    if origin.vocabulary:
        return not _is_made(stages[origin.name])
    return isinstance(origin.job.data.tokenizer, TrainedTokenizer)


def _model_to_come(chain: ChainSpec, stage: StageRun) -> WorkloadSpec:
    """Return the model of a stage that begins with a folder which is not made yet: the same model with all tokens.

    A smaller model of a preset has no base before that stage has run, so what it keeps of the base is checked then.
    """
    workload, base = stage.job.workload, _source(chain, stage.name)
    has_folder = base.model.startswith("hf:") and not base.changes
    return workload.model_copy(
        update={
            "model": base.model,
            "changes": {**base.changes, **workload.changes},
            "shrink": workload.shrink if has_folder else None,
        }
    )


def _source(chain: ChainSpec, name: str) -> WorkloadSpec:
    """Return the model that a stage's folder is made of, before any token was removed."""
    source = chain[name]
    while named := source.made_of:
        source = chain[named.stage]
    return source.job.workload


def _distilled_by(distill: DistillSpec | None, teacher: WorkloadSpec) -> DistillSpec | None:
    """Return how a stage learns from a teacher with all tokens; None if that is in no folder yet."""
    if distill is None or not teacher.model.startswith("hf:"):
        return None
    return distill.model_copy(update={"teacher": teacher.model})


def _is_made(stage: StageRun) -> bool:
    """Return whether the export of a stage is there."""
    return bool(mark_of(export_of(stage)))
