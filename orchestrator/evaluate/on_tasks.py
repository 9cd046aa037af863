"""Tasks evaluated with lm-eval: of a commit, of an export, or of any model at hand; without a hub."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.evaluate.of_export import spec_of_export, tokenizer_of_export, workload_of_export

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import nn

    from workloads.workload import Workload


import contextlib
import dataclasses
import importlib.util
import io
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

from cluster.workers.clock import wall
from cluster.workers.environment import put_back
from cluster.workers.gang import Bundle
from cluster.workers.run_local_gang import run_to_the_end
from cluster.workers.worker_context import WorkerContext
from orchestrator.config.errors import InputError
from orchestrator.evaluate.task_files import EXTRA, ROUGE, TaskFile, check_fits, read_tasks
from orchestrator.resolve.resolved_job import wrong_input
from orchestrator.storage.row_types import EvaluationRow


@dataclass(frozen=True)
class Subject:
    """What is evaluated: a model with its weights, the tokenizer of transformers that fits it, of which step it is, and
    what `facts_of` says of the weights."""

    workload: Workload
    model: nn.Module
    tokenizer: Any
    step: int
    facts: Mapping[str, Any] = field(default_factory=dict)


def subject_of_commit(
    run_uri: str, step: int, device: torch.device | None = None, best: bool = False, raw: bool = False
) -> Subject:
    """The model of the commit at `step` of a run, with the tokenizer that an export of it would have.

    With `best` it is that of the commit which is best by checkpoint.keep_best, if there is one. The weights are
    averaged, if the job has an average of them, unless `raw`.

    Raises InputError if there is no such run, or its data is gone.
    """
    from tokenizers import Tokenizer

    from orchestrator.checkpoint.averaged import facts_of
    from orchestrator.data.encoding.auto_tokenizer import FILE
    from orchestrator.export.tokenizer import write_tokenizer
    from orchestrator.resolve.commit_model import model_of_run
    from workloads.load import with_weights

    found = model_of_run(run_uri, step, best, raw)
    workload = found.workload
    model = with_weights(workload, found.read, device)
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder:
        write_tokenizer(found.tokens, workload, found.spec, folder)
        tokenizer = Tokenizer.from_file(str(Path(folder, FILE)))
        return Subject(workload, model, _for_lm_eval(tokenizer), found.commit.step, facts_of(found.reader))


def subject_of_export(
    folder: str, overrides: Sequence[str] = (), device: torch.device | None = None
) -> Subject:
    """The model in a folder in the Hugging Face format. Raises InputError if it cannot be read."""
    from workloads.load import with_weights

    spec, step = spec_of_export(folder, {}, overrides)
    workload = workload_of_export(spec)
    model = with_weights(workload, lambda name: workload.initial(name, spec.seed), device)
    return Subject(workload, model, _for_lm_eval(tokenizer_of_export(spec)), step)


def _for_lm_eval(tokenizer: Tokenizer) -> Any:
    """The tokenizer that training reads as one of transformers, whose AutoTokenizer may make another one of the folder
    (see `orchestrator.data.encoding.auto_tokenizer`)."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


ENTRY = "orchestrator.evaluate.on_tasks:main"
"""The entry point of a process that evaluates tasks."""
PATIENCE = 1800.0
"""Seconds that a model may take to be read, or a batch to be computed."""
AGGREGATED = {"f1": "f1", "mcc": "matthews", "spearman": "spearman", **dict(zip(ROUGE, ROUGE, strict=True))}
"""Metrics that `workloads.objectives.metrics` computes, with their names there; lm-eval's own are the others."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""What the libraries read when they are imported."""


def evaluate_commit_on_tasks(
    run_uri: str, step: int, paths: Sequence[str], best: bool = False
) -> EvaluationRow:
    """The row of the commit at `step` of a run, evaluated on task files in this process, on its CPU.

    With `best` it is that of the commit which is best by checkpoint.keep_best, if there is one.

    Raises InputError for wrong task files, data that is gone, or a model that gives no likelihoods.
    """
    tasks = read_tasks(paths, where="evaluate.tasks")
    with _prepared():
        return _evaluated(subject_of_commit(run_uri, step, best=best), tasks, lambda: None)


def run_tasks(tasks: Sequence[TaskFile], place: Mapping[str, Any], bundle: Bundle) -> EvaluationRow:
    """The row of a model evaluated on tasks, in a process of its own, with what a worker of its run has.

    Args:
        tasks: what to evaluate.
        place: {"run", "step", "raw"} of a commit, or {"export", "overrides"} of a folder in the Hugging Face format.
        bundle: CPUs, and whether there is a GPU.

    Raises InputError for what is wrong with the tasks or the model, RuntimeError if the evaluation fails.
    """
    config = {
        **place,
        "tasks": [{**dataclasses.asdict(task), "path": str(task.path)} for task in tasks],
        "threads": max(int(bundle.cpu), 1),
        "gpu": bundle.gpu > 0,
    }
    with tempfile.TemporaryDirectory(
        prefix="tasks-"
    ) as scratch:  # an interrupted process removes nothing itself
        config |= {"scratch": scratch}
        _, result = run_to_the_end(1, bundle, ENTRY, config, PATIENCE, "evaluation of tasks")
    if "wrong" in result:
        raise InputError(*result["wrong"])
    row: EvaluationRow = result["row"]
    return row


def main(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Evaluate tasks as the one rank of a gang. Returns {"row"}, or {"wrong": [what, where, hint]} for wrong input."""
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
    """No hub; neither progress bars nor remarks of lm-eval's, but errors."""
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("tasks need lm-eval, which is not installed", "", f"{EXTRA} installs it")
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
    found = {task.name: evaluate_task(subject, task, progressed, scratch) for task in tasks}
    seconds = time.perf_counter() - began
    row: EvaluationRow = {
        "step": subject.step,
        "attempt": 0,
        "time": wall(),
        "seconds": seconds,
        "sets": found,
    }
    return cast(EvaluationRow, {**row, **subject.facts})


def evaluate_task(
    subject: Subject,
    task: TaskFile,
    progressed: Callable[[], object] = lambda: None,
    scratch: str | None = None,
) -> dict[str, float]:
    """The metrics of one task, with the number of its `examples` and, if there were any, of those `truncated`.

    `scratch` is a folder for temporary files. Raises InputError for data that do not fit the task, and for a model that
    gives no likelihoods.
    """
    from lm_eval.evaluator import evaluate

    from orchestrator.evaluate.lm_eval_model import WorkloadLM

    where = str(task.path)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="tasks-") as cache:
        loaded = _loaded(task, cache)
        try:
            with wrong_input(""):
                model = WorkloadLM(subject.workload, subject.model, subject.tokenizer, progressed)
                found = evaluate(model, {"tasks": {task.name: loaded}}, bootstrap_iters=0)
        except InputError as error:
            place = f"{where}: {error.where}" if error.where else where
            raise InputError(error.what, place, error.hint) from None
    truncated = {"truncated": float(model.truncated)} if model.truncated else {}
    return {**_metrics(found, task.name, where), **truncated}


def _metrics(found: Mapping[str, Any], name: str, where: str) -> dict[str, float]:
    """Of lm-eval's results, whose keys are a metric and a filter of the answers, "none" for none."""
    metrics = {}
    for key, value in found["results"][name].items():
        metric, comma, by = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        metrics[metric if by == "none" else f"{metric}_{by}"] = float(value)
        if not math.isfinite(value):
            raise InputError(f"{metric} is not defined for these examples", where, "look at the task's data")
    return {**metrics, "examples": float(found["n-samples"][name]["effective"])}


def _loaded(task: TaskFile, cache: str) -> Any:
    """lm-eval's task, with its data read anew. Raises InputError if they do not fit it."""
    import datasets
    from lm_eval.tasks import TaskManager

    _add_metrics()
    where = str(task.path)
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = Path(cache)
    try:
        with contextlib.chdir(task.path.parent):  # where its relative paths begin
            manager = TaskManager(include_defaults=False)
            loaded = _told(lambda: manager.load([where])["tasks"][task.name], where)
    finally:
        datasets.config.HF_DATASETS_CACHE = before
    if loaded.get_config("num_fewshot") is None:
        loaded.set_config(key="num_fewshot", value=0)
    loaded.set_fewshot_seed(seed=0)
    aggregation = loaded.aggregation()
    aggregation.update(
        {name: _aggregate(AGGREGATED[name]) for name in aggregation.keys() & AGGREGATED.keys()}
    )
    _told(lambda: _check_examples(loaded, where), where)
    return loaded


def _add_metrics() -> None:
    """Make the metrics that lm-eval lacks known to it."""
    import lm_eval.api.metrics  # noqa: F401  (its own come first)
    from lm_eval.api.registry import metric_registry, register_aggregation, register_metric

    for name in sorted(AGGREGATED.keys() - set(metric_registry)):
        register_aggregation(name)(_aggregate(AGGREGATED[name]))
        register_metric(metric=name, higher_is_better=True, output_type="generate_until", aggregation=name)(
            _pair
        )


def _pair(items: Any) -> Any:
    """What is aggregated: reference and prediction."""
    return items


def _aggregate(name: str) -> Callable[[Sequence[tuple[Any, Any]]], float]:
    return partial(_measure, name)


def _measure(name: str, pairs: Sequence[tuple[Any, Any]]) -> float:
    from workloads.objectives.metrics import measure

    references, predictions = zip(*pairs, strict=True)
    return measure(name, predictions, references)


def _check_examples(loaded: Any, where: str) -> None:
    """Go through all examples once, and refuse what lm-eval would count as a wrong answer without a word: labels that
    name no choice, metrics of several references."""
    several = loaded.OUTPUT_TYPE == "generate_until" and loaded.multiple_target
    if several and (others := sorted(loaded.aggregation().keys() - {"exact_match"})):
        what = f"{others[0]} of several targets is not what its name says"
        raise InputError(what, f"{where}: doc_to_target", "give one target, or exact_match alone")
    for number, example in enumerate(loaded.eval_docs):
        label = loaded.doc_to_target(example)
        if loaded.OUTPUT_TYPE != "loglikelihood_rolling":
            loaded.doc_to_text(example)
        if loaded.OUTPUT_TYPE != "multiple_choice" or loaded.multiple_input:
            continue
        choices = loaded.doc_to_choice(example)
        for one in label if isinstance(label, list) else [label]:
            known = one in choices if isinstance(one, str) else one in range(len(choices))
            if not known:
                what = f"the label {one!r} of example {number} is none of its {len(choices)} choices"
                raise InputError(what, f"{where}: doc_to_target", "choices are counted from 0")


def _told(call: Callable[[], Any], where: str) -> Any:
    """The result of a call to lm-eval; whatever it raises of a task file or its data is wrong input."""
    try:
        return call()
    except InputError:
        raise
    except Exception as error:
        what = f"lm-eval cannot take it ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        raise InputError(what, where, "see its task guide, or docs/guides/evaluation.md") from error
