"""Evaluate tasks with lm-eval, for a commit, an export, or any given model, without access to a hub."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cluster.workers.clock import wall
from cluster.workers.environment import put_back
from cluster.workers.gang import Bundle
from cluster.workers.worker_context import WorkerContext
from orchestrator.config.errors import InputError
from orchestrator.evaluate.of_commit import run_shown
from orchestrator.evaluate.of_export import spec_of_export, tokenizer_of_export, workload_of_export
from orchestrator.evaluate.task_files import EXTRA, ROUGE, TaskFile, check_fits, read_tasks
from orchestrator.resolve.resolved_job import wrong_input
from orchestrator.storage.row_types import EvaluationRow

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import nn

    from workloads.workload import Workload


@dataclass(frozen=True)
class Subject:
    """The model to evaluate: its weights, its transformers tokenizer, its step, and the facts of `average_fields` about
    the weights.
    """

    workload: Workload
    model: nn.Module
    tokenizer: Any
    step: int
    facts: Mapping[str, Any] = field(default_factory=dict)


def subject_of_commit(
    run_uri: str, step: int, device: torch.device | None = None, best: bool = False, raw: bool = False
) -> Subject:
    """Return the model of a run's commit, with the tokenizer that an export of it would have.

    Args:
        run_uri: the run directory.
        step: the step of the commit.
        device: where to put the model; None for the CPU.
        best: whether to take the best commit by checkpoint.keep_best instead, if there is one.
        raw: whether to take the weights of training instead of their average, if the job has one.

    Raises:
        InputError: the run or its data is missing.
    """
    from tokenizers import Tokenizer

    from orchestrator.data.encoding.auto_tokenizer import FILE
    from orchestrator.data.encoding.framing import unframed
    from orchestrator.export.tokenizer import write_tokenizer
    from orchestrator.models.averaged import average_fields
    from orchestrator.resolve.commit_model import model_of_run
    from orchestrator.resolve.prepared_data import EARLIER
    from orchestrator.resolve.resolved_job import is_framed
    from workloads.inference import with_weights

    loaded = model_of_run(run_uri, step, best, raw)
    workload = loaded.workload
    model = with_weights(workload, loaded.read, device, loaded.scheme)
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder:
        write_tokenizer(loaded.tokens, workload, loaded.spec.data, folder)
        tokenizer = Tokenizer.from_file(str(Path(folder, FILE)))
        if loaded.tokens.manifest.format <= EARLIER and is_framed(loaded.spec.data, loaded.spec.workload):
            tokenizer = unframed(tokenizer)
        return Subject(
            workload, model, _for_lm_eval(tokenizer), loaded.commit.step, average_fields(loaded.reader)
        )


def subject_of_export(
    folder: str, overrides: Sequence[str] = (), device: torch.device | None = None
) -> Subject:
    """Return the model in a folder in the Hugging Face format.

    Args:
        folder: the local folder.
        overrides: changes of the job that evaluates it, of the form a.b=c.
        device: where to put the model; None for the CPU.

    Raises:
        InputError: the model cannot be read.
    """
    from workloads.inference import with_weights

    spec, step = spec_of_export(folder, {}, overrides)
    workload = workload_of_export(spec)
    scheme = spec.quantize.scheme if spec.quantize else None
    model = with_weights(workload, lambda name: workload.initial(name, spec.seed), device, scheme)
    return Subject(workload, model, _for_lm_eval(tokenizer_of_export(spec.data, spec.workload)), step)


def _for_lm_eval(tokenizer: Tokenizer) -> Any:
    """Return training's tokenizer as a transformers tokenizer.

    transformers' AutoTokenizer may make another one from the folder (see
    `orchestrator.data.encoding.auto_tokenizer`).
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


ENTRY = "orchestrator.evaluate.on_tasks:main"
"""The entry point of the process that evaluates tasks."""
PATIENCE = 1800.0
"""Seconds allowed for reading a model, or for computing a batch."""
AGGREGATED = {"f1": "f1", "mcc": "matthews", "spearman": "spearman", **dict(zip(ROUGE, ROUGE, strict=True))}
"""Metrics computed by `workloads.objectives.metrics`, with their names there. The others are lm-eval's own."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Environment variables that the libraries read when they are imported."""


def evaluate_commit_on_tasks(
    run_uri: str, step: int, paths: Sequence[str], best: bool = False
) -> EvaluationRow:
    """Evaluate a commit on task files, in this process and on its CPU. Return the row.

    Args:
        run_uri: the run directory.
        step: the step of the commit.
        paths: the task files.
        best: whether to take the best commit by checkpoint.keep_best instead, if there is one.

    Raises:
        InputError: a task file is wrong, data is missing, or the model gives no likelihoods.
    """
    tasks = read_tasks(paths, where="evaluate.tasks")
    with _prepared():
        return _evaluated(subject_of_commit(run_uri, step, best=best), tasks, lambda: None)


def run_tasks(tasks: Sequence[TaskFile], model: Mapping[str, Any], bundle: Bundle) -> EvaluationRow:
    """Return the row of a model evaluated on tasks, in a separate process with the resources of a worker of its run.

    Args:
        tasks: what to evaluate.
        model: {"run", "step", "raw"} of a commit, or {"export", "overrides"} of a folder in the Hugging Face format.
        bundle: CPUs, and whether there is a GPU.

    Raises InputError for errors in the tasks or the model, RuntimeError if the evaluation fails.
    """
    config = {
        **model,
        "tasks": [{**dataclasses.asdict(task), "path": str(task.path)} for task in tasks],
        "threads": max(int(bundle.cpu), 1),
        "gpu": bundle.gpu > 0,
    }
    # An interrupted process cannot clean up itself.
    with tempfile.TemporaryDirectory(prefix="tasks-") as scratch:
        config |= {"scratch": scratch}
        result = run_shown(bundle, ENTRY, config, PATIENCE, work="evaluation of tasks")
    if "wrong" in result:
        raise InputError(*result["wrong"])
    row: EvaluationRow = result["row"]
    return row


def main(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Evaluate tasks as the only rank of a gang. Return {"row"}, or {"wrong": [what, where, hint]} for wrong input."""
    import torch

    torch.set_num_threads(config["threads"])
    device = torch.device("cuda") if config["gpu"] and torch.cuda.is_available() else None
    tasks = [TaskFile(**{**task, "path": Path(task["path"])}) for task in config["tasks"]]
    try:
        with _prepared():
            if "export" in config:
                subject = subject_of_export(config["export"], config["overrides"], device)
            else:
                subject = subject_of_commit(config["run"], config["step"], device, raw=config["raw"])
            return {"row": _evaluated(subject, tasks, context.progressed, config["scratch"])}
    except InputError as error:
        return {"wrong": [error.what, error.where, error.hint]}


@contextlib.contextmanager
def _prepared() -> Iterator[None]:
    """Disable hubs and progress bars, and show only errors of lm-eval."""
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("tasks need lm-eval, which is not installed", "", EXTRA)
    loud = {name: logging.getLogger(name).level for name in ("lm_eval", "datasets", "transformers")}
    for name in loud:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with put_back(OFFLINE), contextlib.redirect_stderr(io.StringIO()):
            os.environ.update(OFFLINE)
            yield
    finally:
        for name, level in loud.items():
            logging.getLogger(name).setLevel(level)


def _evaluated(
    subject: Subject,
    tasks: Sequence[TaskFile],
    progressed: Callable[[], object],
    scratch: str | None = None,
) -> EvaluationRow:
    began = time.perf_counter()
    check_fits(subject.workload, tasks, "tasks")
    results = {task.name: evaluate_task(subject, task, progressed, scratch) for task in tasks}
    seconds = time.perf_counter() - began
    row: EvaluationRow = {
        "step": subject.step,
        "attempt": 0,
        "time": wall(),
        "seconds": seconds,
        "sets": results,
    }
    return cast(EvaluationRow, {**row, **subject.facts})


def evaluate_task(
    subject: Subject,
    task: TaskFile,
    progressed: Callable[[], object] = lambda: None,
    scratch: str | None = None,
) -> dict[str, float]:
    """Return the metrics of one task, with the number of its `examples` and, if any, of those `truncated`.

    Args:
        subject: the model and its tokenizer.
        task: the task.
        progressed: called after each batch.
        scratch: a folder for temporary files; None for the system's.

    Raises:
        InputError: the data does not fit the task, or the model gives no likelihoods.
    """
    from lm_eval.evaluator import evaluate

    from orchestrator.evaluate.lm_eval_model import WorkloadLM

    where = str(task.path)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="tasks-") as cache:
        loaded = _loaded(task, cache)
        try:
            with wrong_input(""):
                model = WorkloadLM(subject.workload, subject.model, subject.tokenizer, progressed)
                result = evaluate(model, {"tasks": {task.name: loaded}}, bootstrap_iters=0)
        except InputError as error:
            key = f"{where}: {error.where}" if error.where else where
            raise InputError(error.what, key, error.hint) from None
    truncated = {"truncated": float(model.truncated)} if model.truncated else {}
    return {**_metrics(result, task.name, where), **truncated}


def _metrics(results: Mapping[str, Any], name: str, where: str) -> dict[str, float]:
    """Return the metrics from lm-eval's results, whose keys are a metric and an answer filter ("none" for none)."""
    metrics = {}
    for key, value in results["results"][name].items():
        metric, comma, by = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        metrics[metric if by == "none" else f"{metric}_{by}"] = float(value)
        if not math.isfinite(value):
            raise InputError(f"{metric} is not defined for these examples", where, "look at the task's data")
    return {**metrics, "examples": float(results["n-samples"][name]["effective"])}


def _loaded(task: TaskFile, cache: str) -> Any:
    """Return lm-eval's task, with its data read again. Raises InputError if the data does not fit."""
    import datasets
    from lm_eval.tasks import TaskManager

    _add_metrics()
    where = str(task.path)
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = Path(cache)
    try:
        with contextlib.chdir(task.path.parent):  # its relative paths refer to this folder
            manager = TaskManager(include_defaults=False)
            loaded = _checked_call(lambda: manager.load([where])["tasks"][task.name], where)
    finally:
        datasets.config.HF_DATASETS_CACHE = before
    if loaded.get_config("num_fewshot") is None:
        loaded.set_config(key="num_fewshot", value=0)
    loaded.set_fewshot_seed(seed=0)
    aggregation = loaded.aggregation()
    aggregation.update({name: _aggregate(AGGREGATED[name]) for name in _of_pairs(loaded)})
    _checked_call(lambda: _check_examples(loaded, where), where)
    return loaded


def _of_pairs(loaded: Any) -> set[str]:
    """Return the metrics of a task that are computed from references and predictions here.

    A task with process_results, or with a function as a metric, computes its own numbers, whatever their names.
    """
    config = loaded.config
    listed = (
        [] if config.process_results is not None else [entry["metric"] for entry in config.metric_list or ()]
    )
    return {metric for metric in listed if isinstance(metric, str)} & AGGREGATED.keys()


def _add_metrics() -> None:
    """Register the metrics that lm-eval lacks."""
    import lm_eval.api.metrics  # noqa: F401  (its own metrics are registered first)
    from lm_eval.api.registry import metric_registry, register_aggregation, register_metric

    for name in sorted(AGGREGATED.keys() - set(metric_registry)):
        register_aggregation(name)(_aggregate(AGGREGATED[name]))
        register_metric(metric=name, higher_is_better=True, output_type="generate_until", aggregation=name)(
            _pair
        )


def _pair(items: Any) -> Any:
    """Return the item to aggregate: reference and prediction."""
    return items


def _aggregate(name: str) -> Callable[[Sequence[tuple[Any, Any]]], float]:
    return partial(_measure, name)


def _measure(name: str, pairs: Sequence[tuple[Any, Any]]) -> float:
    from workloads.objectives.metrics import measure

    references, predictions = zip(*pairs, strict=True)
    return measure(name, predictions, references)


def _check_examples(loaded: Any, where: str) -> None:
    """Check all examples, and refuse what lm-eval would silently count as a wrong answer: labels that name no choice,
    and metrics with several references.
    """
    several = loaded.OUTPUT_TYPE == "generate_until" and loaded.multiple_target
    if several and (others := sorted(loaded.aggregation().keys() - {"exact_match"})):
        problem = f"{others[0]} is not defined for several targets"
        raise InputError(problem, f"{where}: doc_to_target", "give one target, or exact_match alone")
    for number, example in enumerate(loaded.eval_docs):
        label = loaded.doc_to_target(example)
        if loaded.OUTPUT_TYPE != "loglikelihood_rolling":
            loaded.doc_to_text(example)
        if loaded.OUTPUT_TYPE != "multiple_choice" or loaded.multiple_input:
            continue
        choices = loaded.doc_to_choice(example)
        for each_label in label if isinstance(label, list) else [label]:
            known = (
                each_label in choices if isinstance(each_label, str) else each_label in range(len(choices))
            )
            if not known:
                problem = (
                    f"the label {each_label!r} of example {number} is not one of its {len(choices)} choices"
                )
                raise InputError(problem, f"{where}: doc_to_target", "choices are counted from 0")


def _checked_call(call: Callable[[], Any], where: str) -> Any:
    """Return the result of a call to lm-eval. Any error about a task file or its data becomes an InputError."""
    try:
        return call()
    except InputError:
        raise
    except Exception as error:
        problem = f"lm-eval cannot take it ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        raise InputError(problem, where, "see its task guide, or docs/guides/evaluation-tasks.md") from error
