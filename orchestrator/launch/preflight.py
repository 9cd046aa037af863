"""All checks of a job before anything is started or written: `preflight` is the whole list.

Every check raises InputError with the key of the job file, or the option, that is wrong. Independent checks all run, so
that a user sees all problems at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cluster.workers.machine import host_memory
from orchestrator.checkpoint.identity import check_same_run
from orchestrator.config.commit_steps import check_best
from orchestrator.config.errors import InputError, Problems
from orchestrator.config.records import (
    COLUMNS,
    LABELLED,
    OF_CLASSES,
    PREFERENCES,
    REFERENCED,
    is_known,
    problem_of,
)
from orchestrator.config.spec import JobSpec
from orchestrator.data.encoding.config import TrainedTokenizer
from orchestrator.evaluate.config import SAMPLES
from orchestrator.export.converted import Conversion, check_conversion, form_of
from orchestrator.export.peft_adapter import check_adapter_export
from orchestrator.export.target import check_target
from orchestrator.launch.init_checks import check_begins
from orchestrator.launch.machine_checks import check_machine, check_room
from orchestrator.launch.own_code import check_own_code
from orchestrator.launch.path_checks import check_places, check_written, sources_of
from orchestrator.launch.worker import worker_at, worker_here
from orchestrator.planner import prices
from orchestrator.planner.choose_layout import plan
from orchestrator.planner.device import BOUNDLESS
from orchestrator.planner.host_memory import check_host_memory
from orchestrator.planner.no_layout import too_narrow
from orchestrator.planner.precision import MachineOf
from orchestrator.resolve.commit_model import as_begun, check_implementation
from orchestrator.resolve.continued import begun_from
from orchestrator.resolve.kept_config import check_same_config, kept_config
from orchestrator.resolve.precision import as_its_run, in_chosen_precision
from orchestrator.resolve.prepared_data import EARLIER, format_at, kind_of, prepared_before
from orchestrator.resolve.prompts import check_generates
from orchestrator.resolve.resolved_job import ResolvedJob, resolve, wrong_input
from orchestrator.resolve.training_inputs import load_workload, vocabulary_before_data
from orchestrator.storage.row_line import TRIALS
from orchestrator.storage.run_directory import RunDir
from workloads.hf.hf_config import FolderConfig
from workloads.own.object_reference import is_object_reference

if TYPE_CHECKING:
    from orchestrator.data.clean.config import CleanStep
    from orchestrator.data.sources import SourceFile


def check_hugging_face_class(spec: JobSpec, workload: Any) -> None:
    """Check that an unchanged transformers class computes what the job says."""
    from workloads.hf.behaviour import check_behaviour

    with wrong_input("workload"):
        check_behaviour(workload, partial(_check_divided, spec))
    if spec.train.compile and not workload.config.has_blocks:
        raise InputError(
            f"{spec.workload.model} has no layers that could be compiled alone",
            "train.compile",
            "set it to false",
        )


def _check_divided(spec: JobSpec, trial: Any, model: Any, batch: Any) -> None:
    """Check that a small copy of a transformers class computes the same when it is sharded, if the job shards it."""
    from orchestrator.parallel.own_check import check_layers, check_sharding
    from workloads.errors import WorkloadError

    if spec.parallel == "auto":
        return
    try:
        halves = all(n % 2 == 0 for n in (*trial.config.head_counts, trial.config.cut))
        if spec.parallel.tp > 1 and trial.sharding():
            if not halves:
                raise WorkloadError(f"{trial.name}: no small copy of it can be cut over 2 ranks, to try that")
            check_sharding(trial, model, batch, 2, "the plan of transformers")
        if spec.parallel.pp > 1 and trial.stages():
            check_layers(trial, model, batch)
    except WorkloadError as error:
        raise WorkloadError(f"{error}; set parallel to auto") from None


def preflight(
    spec: JobSpec,
    run_dir: RunDir,
    until: int | None,
    address: str | None,
    begin: Callable[[], None] = lambda: None,
    is_known: bool = False,
) -> ResolvedJob:
    """Check a run completely without starting anything. Return the resolved job.

    A run that has begun keeps its own settings, see `as_begun`. `begin` and `is_known` are as in `check_job`.
    """
    check_places(spec, run_dir)
    check_written(spec.checkpoint, spec.data, run_dir, address)
    problems = Problems()
    prepared = ""
    kept: FolderConfig | None = None
    begins = False
    with problems.noted():
        if run_dir.rows(TRIALS):
            raise InputError("is the folder of a search", run_dir.uri, "give another --run-dir, or use tune")
        spec = as_its_run(spec, run_dir)
        commit = check_same_run(spec, run_dir)
        begins = commit is None
        check_implementation(spec.workload, commit, run_dir.uri)
        prepared = prepared_before(spec.data, run_dir, commit)
        begun = begun_from(spec, run_dir, commit)[1]
        check_same_config(spec, begun, run_dir.uri)
        spec, kept = as_begun(spec, begun), kept_config(begun)
        if commit is None:
            kind_of(spec)
    with problems.noted():
        job = check_here(spec, address, prepared, begin, is_known, kept=kept, begins=begins)
    if until is not None and until > spec.train.steps:
        with problems.noted():
            raise InputError(f"step {until} is beyond train.steps {spec.train.steps}", "--until", "lower it")
    problems.raise_noted()
    check_begins(job, run_dir, commit)
    check_room(job, run_dir, address)
    return job


def check_here(
    spec: JobSpec,
    address: str | None,
    prepared: str = "",
    begin: Callable[[], None] = lambda: None,
    is_known: bool = False,
    *,
    kept: FolderConfig | None = None,
    begins: bool = False,
) -> ResolvedJob:
    """Check a job, and this machine for it; see `check_job`. Return the resolved job."""
    problems = Problems()
    with problems.noted():
        machine_of = worker_at(address)
        job = check_job(spec, prepared, begin, is_known, machine_of, kept=kept, begins=begins)
    with problems.noted():
        check_machine(spec, address)
    problems.raise_noted()
    if address is None:
        check_host_memory(spec, job.shape, host_memory())
    return job


def check_job(
    spec: JobSpec,
    prepared: str = "",
    begin: Callable[[], None] = lambda: None,
    is_known: bool = False,
    machine_of: MachineOf = worker_here,
    *,
    kept: FolderConfig | None = None,
    begins: bool = False,
) -> ResolvedJob:
    """Check a job independently of where it runs. Return the resolved job, with a precision for its workers if it names
    none.

    Args:
        spec: the job.
        prepared: the folder of the run's data, if the run has begun.
        begin: called before the model is loaded, unless a problem was found.
        is_known: whether the job was checked before; its model is then not loaded, see `checked_before`.
        machine_of: returns a worker of the job.
        kept: the run's copy of the configuration of its pretrained folder.
        begins: see `check_text`.
    """
    problems = Problems()
    if job := _check_before_loading(spec, problems, machine_of, kept, begins):
        if not problems:
            begin()
        if not is_known:
            with problems.noted():
                check_objective(job)
                if not problems:
                    check_workload(job, prepared)
                    check_generates(job)
    problems.raise_noted()
    assert job is not None
    return job


def check_preparable(spec: JobSpec) -> None:
    """Check a job for data preparation: everything in `check_job` except loading its model.

    For little text, loading the model would take longer than the preparation.
    """
    problems = Problems()
    _check_before_loading(spec, problems, lambda spec: BOUNDLESS, begins=True)
    problems.raise_noted()


def _check_before_loading(
    spec: JobSpec,
    problems: Problems,
    machine_of: MachineOf,
    kept: FolderConfig | None = None,
    begins: bool = False,
) -> ResolvedJob | None:
    """Return the resolved job, None if it cannot be resolved. Adds to `problems`. Imports no torch."""
    with problems.noted():
        check_text(spec, begins)
    for check in (check_records, check_preferences, check_cleaning, check_best, prices.check):
        with problems.noted():
            check(spec)
    if spec.checkpoint.export_to:
        with problems.noted():
            check_target(spec.checkpoint.export_to)
    with problems.noted():
        job = in_chosen_precision(resolve(spec, kept=kept), machine_of)
        with problems.noted():
            check_layouts(job)
        return job
    return None


def check_named(spec: JobSpec) -> None:
    """Check that the text and the model that a job names exist. Also works for a job with other wrong keys."""
    from workloads.describe import describe

    problems = Problems()
    with problems.noted():
        check_text(spec)
    if not is_object_reference(spec.workload.model):
        with problems.noted(), wrong_input("workload.model"):
            describe(spec.workload.model)
    problems.raise_noted()


def check_text(spec: JobSpec, begins: bool = False) -> None:
    """Check that the sources exist, and that those of training hold at least one sequence.

    If the data of a run `begins`, also check the columns that the sources name, see `check_columns`. A run that began
    without a column continues.
    """
    from orchestrator.data import sources

    if spec.data.samples is not None:
        return
    policy, objective = spec.data.on_error, spec.workload.objective
    files = sources.resolve(spec.data.sources, on_error=policy)
    size = sum(file.plain_size for file in files)
    if objective in COLUMNS and not size:
        raise InputError("all files are empty", "data.sources", "give files with rows")
    if objective not in COLUMNS and size < spec.data.sequence_length:  # a record is a sample, however short
        what = f"the corpus has {size} bytes, fewer than one sequence of {spec.data.sequence_length} tokens"
        raise InputError(what, "data.sources", "give more text or lower data.sequence_length")
    found = [
        (where, sources.resolve(held_out, where, policy)) for where, held_out in spec.set_sources.values()
    ]
    for where, held_out_files in found:
        if not any(file.size for file in held_out_files):
            raise InputError("all files are empty", where, "give files with text")
    if is_known(objective) and not any(problem_of(objective, source.field) for _, source in sources_of(spec)):
        for where, listed in (*found, ("data.sources", files)):
            _check_rows(listed, where, objective, begins)
    if begins and spec.data.clean:
        _check_columns_of_steps(spec.data.clean, files)


def _check_columns_of_steps(steps: Sequence[CleanStep], files: Sequence[SourceFile]) -> None:
    from orchestrator.data.clean.config import columns_of_steps
    from orchestrator.data.sources import part_size
    from orchestrator.data.sources.named_columns import check_columns_of_steps, first_parts

    if all(file.kind != ".arrow" for file in files):  # finding its rows reads the whole file
        check_columns_of_steps(first_parts(files, part_size(files)), columns_of_steps(steps))


def _check_rows(files: Sequence[SourceFile], where: str, objective: str, begins: bool) -> None:
    """Check that the first row of the sources at the key `where` can be read and, if data `begins`, has the columns."""
    from orchestrator.data.sources import part_size
    from orchestrator.data.sources.documents import check_beginning
    from orchestrator.data.sources.named_columns import check_columns, first_parts

    check_beginning(files)
    if begins:
        looked_at = [file for file in files if file.kind != ".arrow"]  # finding its rows reads the whole file
        check_columns(first_parts(looked_at, part_size(files)), where, objective)


def check_objective(job: ResolvedJob) -> None:
    """Check that the objective exists, that the model's architecture supports it, and that the
    sources have its inputs.
    """
    from workloads import objectives

    spec, architecture = job.spec, job.model.architecture
    name = spec.workload.objective
    if name == SAMPLES:
        return
    if architecture != "own" and architecture not in objectives.architectures(name):
        known = [n for n in objectives.NAMES if architecture in objectives.architectures(n)]
        what = f"{name} does not train {spec.workload.model}, which is a {architecture}"
        raise InputError(what, "workload.objective", f"choose from {', '.join(known)}")
    for where, source in sources_of(spec):
        if objectives.reads_pairs(name) and isinstance(source.field, str):
            hint = "give two keys, those of the text and of its translation"
            raise InputError(f"{name} reads pairs", f"{where}.field", hint)


def check_records(spec: JobSpec) -> None:
    """Check that every source names the columns of the objective, that labels have names, and that a needed chat
    template exists.
    """
    name = spec.workload.objective
    if not is_known(name):
        return  # an objective that does not exist is refused with the nearest one
    for where, source in sources_of(spec):
        if problem := problem_of(name, source.field):
            raise InputError(problem, f"{where}.field")
    labels = spec.data.labels
    if name in LABELLED and (len(labels) < 2 or len(set(labels)) < len(labels)):
        raise InputError(
            f"{name} predicts one of two labels at least", "data.labels", "name each of them once"
        )
    if labels and name not in LABELLED:
        raise InputError(f"{name} predicts no labels", "data.labels", "leave it out")
    if name in COLUMNS and isinstance(spec.data.tokenizer, TrainedTokenizer):
        hint = "name that of the model, or train one on text first"
        raise InputError(f"{name} reads records, on which no tokenizer is trained", "data.tokenizer", hint)
    kind = kind_of(spec, EARLIER)  # the run may have begun under a version with fewer checks of templates
    if spec.data.chat_date is not None and not (kind and kind.template):
        raise InputError("there is no chat template that could ask for it", "data.chat_date", "leave it out")


def check_cleaning(spec: JobSpec) -> None:
    """Check that the objective reads text that can be cleaned, that each step has its inputs, and that added tokens are
    trained.
    """
    from orchestrator.data.clean.plan import check_steps

    if spec.data.clean and spec.workload.objective in COLUMNS:
        what = f"cleans text, and {spec.workload.objective} reads records"
        raise InputError(what, "data.clean", "leave it out, and clean the records before")
    check_steps(spec.data)
    if spec.data.add_tokens and spec.workload.adapter is not None:
        hint = "leave them out, or train a base that has them first, without an adapter"
        raise InputError("an adapter does not train the rows of added tokens", "data.add_tokens", hint)


def check_preferences(spec: JobSpec) -> None:
    """Check that an objective with a reference model begins with weights, and that no option is undefined for its loss.

    The reference is the model that the run begins with. The loss is defined over whole answers.
    """
    asked = spec.workload
    for key, what in (("z_loss", "z-loss"), ("label_smoothing", "smoothing over a vocabulary")):
        if asked.objective in (*PREFERENCES, *OF_CLASSES) and getattr(spec.train, key):
            raise InputError(f"{asked.objective} has no {what}", f"train.{key}", "set it to 0")
    if asked.objective not in REFERENCED:
        return
    if spec.data.shuffle == "sections" and spec.train.reference != "held":
        what = f"{asked.objective} asks its reference about all records before it trains"
        hint = "set train.reference to held, or leave out data.shuffle and data.streaming"
        raise InputError(what, "data.shuffle", hint)
    if asked.init_from:
        return
    from workloads.hf.weight_files import weights_of_model

    with wrong_input("workload.model"):
        folder = weights_of_model(asked.model)
    if folder is None:
        what = f"{asked.objective} compares with the model that the run begins with, and this one begins anew"
        raise InputError(what, "workload.init_from", "name a run or an export, or a model with weights")


def check_workload(job: ResolvedJob, prepared: str = "") -> None:
    """Check that model, objective, options, sequence length and tokenizer fit each other.

    Also check that parameter groups match parameters, and that the model can be exported if the job exports it. Word
    starts and sentence ends are not checked, because they depend on the text.
    """
    from workloads.adapters.frozen import check_groups
    from workloads.hf.hf_class import HuggingFaceModel
    from workloads.hf.our_names import told_by_our_names
    from workloads.own.model import OwnModel

    known = vocabulary_before_data(job)
    workload: Any = load_workload(job.spec, known, format_at(prepared), job.model, kept=job.kept)
    with wrong_input("train.optimizer.groups"), told_by_our_names(workload.config):
        check_groups([group.match for group in job.spec.train.optimizer.groups], workload)
    if job.spec.checkpoint.export == "safetensors":
        if not isinstance(workload.config, OwnModel):
            what = "safetensors is for own models, and transformers reads this one"
            raise InputError(what, "checkpoint.export", "set it to hf")
    elif job.spec.checkpoint.export:
        if isinstance(workload.config, OwnModel) and job.spec.checkpoint.export != "hf":
            what = f"{job.spec.checkpoint.export} is not for own models, which are exported whole"
            raise InputError(what, "checkpoint.export", "set it to safetensors")
        with wrong_input("checkpoint.export"):
            if job.spec.checkpoint.export == "adapter":
                replace(workload, adapter=None).check_hf()
                check_adapter_export(workload)
            else:
                workload.check_hf()
            if isinstance(form := form_of(job.spec.checkpoint), Conversion):
                check_conversion(form, workload)
    if isinstance(workload.config, HuggingFaceModel):
        check_hugging_face_class(job.spec, workload)
    check_tasks(job.spec, workload)
    check_own_code(job, workload, prepared)


def check_tasks(spec: JobSpec, workload: Any) -> None:
    """Check that the task files and their data exist, that lm-eval is installed, and that it can evaluate the model."""
    from orchestrator.evaluate.task_files import check_fits, read_tasks

    if spec.evaluate and spec.evaluate.tasks:
        tasks = read_tasks(spec.evaluate.tasks, spec.set_names, "evaluate.tasks")
        check_fits(workload, tasks, "evaluate.tasks")


def check_layouts(job: ResolvedJob) -> None:
    """Check that a legal layout exists for the job's workers, on any machine."""
    workers = job.spec.resources.workers
    best = plan(job.spec, job.shape, workers.max, BOUNDLESS).chosen.layout
    if best.world < workers.min:
        raise too_narrow(job.spec.resources, best)
