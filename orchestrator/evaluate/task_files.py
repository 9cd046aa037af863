"""Task files: YAML in lm-eval's format, read and checked without lm-eval, so that a job is refused before it trains.

Of that format a file has one task, whose data are local files or fsspec URIs: nothing is looked for on a hub. Relative
paths in it are relative to its folder.
"""

from __future__ import annotations

import glob
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from orchestrator.config.errors import InputError
from orchestrator.config.extras import install
from orchestrator.resolve.resolved_job import wrong_input
from orchestrator.storage.uri import check_uri, is_local, local_path

if TYPE_CHECKING:
    from workloads.workload import Workload

EXTRA = install("eval")
FORMATS = ("json", "csv", "parquet", "text", "arrow")
"""The `dataset_path` values for local files; json also covers .jsonl."""
ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
METRICS: Mapping[str, frozenset[str]] = {
    "multiple_choice": frozenset(
        ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match", "f1", "mcc", "brier_score")
    ),
    "loglikelihood": frozenset(("acc", "perplexity")),
    "loglikelihood_rolling": frozenset(("word_perplexity", "byte_perplexity", "bits_per_byte")),
    "generate_until": frozenset(
        ("exact_match", "f1", "mcc", "spearman", "bleu", "chrf", "chrf++", "ter", *ROUGE)
    ),
}
"""The metrics of each `output_type`."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Keys of `generation_kwargs` that limit a text's length; the first one present counts."""
DRAWS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "do_sample": ("true or false", lambda value: isinstance(value, bool)),
    "temperature": ("a number of at least 0", lambda value: _is_number(value) and value >= 0),
    "top_k": ("a whole number of at least 0", lambda value: type(value) is int and value >= 0),
    "top_p": ("a share above 0, and 1 at most", lambda value: _is_number(value) and 0 < value <= 1),
}
"""How tokens are drawn: the values that each key accepts."""
GENERATION = frozenset(("until", "do_sample", "temperature", "top_k", "top_p", *LENGTHS))
LONGEST = 256
"""Default maximum of generated tokens, as in lm-eval."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True)
class TaskFile:
    """A task that can be evaluated: its file, name, `output_type`, and maximum number of generated tokens."""

    path: Path
    name: str
    output_type: str
    max_tokens: int = 0


class FunctionName(str):
    """The name in a tag !function, instead of the function."""


class _Loader(yaml.SafeLoader):
    """A YAML loader for plain data and names of functions."""


_Loader.add_constructor("!function", lambda loader, node: FunctionName(node.value))


def read_tasks(paths: Sequence[str], taken: Sequence[str] = (), where: str = "--tasks") -> list[TaskFile]:
    """Return the checked tasks of task files.

    Args:
        paths: the task files.
        taken: names that no task may have.
        where: the option or key that names the files, for messages.

    Raises:
        InputError: a file is missing or not a task, its data is missing or not local, a metric is unknown, or lm-eval
            is not installed.
    """
    tasks: list[TaskFile] = []
    for path in paths:
        task = read_task(path, where)
        if task.name in [*taken, *(other.name for other in tasks)]:
            raise InputError(
                f"another set or task is named {task.name}", f"{where} {path}: task", "rename one"
            )
        tasks.append(task)
    if tasks and importlib.util.find_spec("lm_eval") is None:
        raise InputError("tasks need lm-eval, which is not installed", where, EXTRA)
    return tasks


def read_task(path: str, where: str = "--tasks") -> TaskFile:
    """Return the task of one file. Raises InputError, see `read_tasks`."""
    key = f"{where} {path}"
    if not is_local(path):
        raise InputError(
            "is not on this machine", key, "copy the task file here; its data may stay where it is"
        )
    file = Path(local_path(path))
    if not file.is_file():
        hint = "name a YAML file; tasks of lm-eval by name would need a hub, and are not looked for"
        raise InputError("there is no such task file", key, hint)
    document = _read(file, key)
    kind = document.get("output_type", "generate_until")  # lm-eval's default
    if kind not in METRICS:
        raise InputError(f"{kind!r} is unknown", f"{key}: output_type", f"choose from {', '.join(METRICS)}")
    name = document.get("task")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        problem = "is not a single task with a name of letters, digits, _ . and -"
        raise InputError(problem, f"{key}: task", "give each task its own file")
    if "class" in document:
        raise InputError("a task that is a Python class cannot be checked", f"{key}: class", "leave it out")
    _check_data(document, file.parent, key)
    _check_metrics(document, kind, key)
    return TaskFile(file, name, kind, _generated(document, key) if kind == "generate_until" else 0)


def _read(file: Path, path: str, including_files: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the mapping in a file, merged over those of the files that it includes."""
    if file in including_files:
        raise InputError("includes itself", f"{path}: include", "leave one out")
    try:
        loader = _Loader(file.read_text())
        document = loader.get_single_data()
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(getattr(error, "problem", None) or error).split())[:200]
        raise InputError(
            f"is not a YAML file that can be read ({why})", path, "see docs/guides/evaluation-tasks.md"
        ) from None
    if not isinstance(document, dict):
        raise InputError("must be a mapping of keys to values", path, "see docs/guides/evaluation-tasks.md")
    included = document.pop("include", [])
    result: dict[str, Any] = {}
    for name in [included] if isinstance(included, str) else included:
        other = (file.parent / str(name)).resolve()
        if not other.is_file():
            raise InputError(
                "there is no such file", f"{path}: include {name}", "paths are relative to the file"
            )
        result |= _read(other, path, (*including_files, file))
    return result | document


def _check_data(document: Mapping[str, Any], folder: Path, where: str) -> None:
    """Check that the data consists of files, that local ones exist, and that one split is evaluated."""
    if isinstance(document.get("custom_dataset"), FunctionName):
        return
    source = document.get("dataset_path")
    options = document.get("dataset_kwargs") or {}
    files = options.get("data_files") if isinstance(options, dict) else None
    if source not in FORMATS or not files:
        problem = f"{source} would be looked for on a hub" if source not in FORMATS else "names no files"
        hint = f"give one of {', '.join(FORMATS)}, and the files in dataset_kwargs.data_files"
        raise InputError(problem, f"{where}: dataset_path", hint)
    splits = files if isinstance(files, dict) else {"train": files}
    for split, uri in _files(splits):
        _check_file(uri, folder, f"{where}: dataset_kwargs.data_files.{split}")
    split_names = {key: document.get(f"{key}_split") for key in ("test", "validation", "training", "fewshot")}
    if split_names["test"] is None and split_names["validation"] is None:
        raise InputError(
            "names no split to evaluate", f"{where}: test_split", f"name one of {', '.join(splits)}"
        )
    for key, name in split_names.items():
        if name is not None and str(name).partition("[")[0] not in splits:
            hint = f"name one of {', '.join(map(str, splits))}"
            raise InputError(f"there is no split {name}", f"{where}: {key}_split", hint)


def _files(splits: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    for split, uris in splits.items():
        for uri in [uris] if isinstance(uris, str) else uris:
            yield str(split), str(uri)


def _check_file(uri: str, folder: Path, where: str) -> None:
    check_uri(uri, where)
    if not is_local(uri):
        return
    path = local_path(uri) if "://" in uri else str(folder / Path(uri).expanduser())
    if not glob.glob(path, recursive=True):
        raise InputError(f"{uri}: there is no such file", where, f"paths are relative to {folder}")


def _check_metrics(document: Mapping[str, Any], kind: str, where: str) -> None:
    """Check that this kind of task supports every metric."""
    listed = document.get("metric_list") or []
    for number, entry in enumerate(listed if isinstance(listed, list) else [listed]):
        key = f"{where}: metric_list.{number}.metric"
        name = entry.get("metric") if isinstance(entry, dict) else None
        if isinstance(name, FunctionName) or "process_results" in document:
            continue  # the user's own
        if not isinstance(name, str):
            raise InputError("names no metric", key, "write it as in {metric: acc}")
        if entry.get("hf_evaluate"):
            raise InputError(f"{name} would be looked for on a hub", key, "leave hf_evaluate out")
        if name not in METRICS[kind]:
            near = get_close_matches(name, METRICS[kind], n=2) or sorted(METRICS[kind])
            others = [other for other in METRICS if name in METRICS[other]]
            problem = f"a task of output_type {kind} has no metric {name}"
            problem += f", one of {' or '.join(others)} has" if others else ""
            raise InputError(problem, key, f"did you mean {' or '.join(near)}?")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _generated(document: Mapping[str, Any], where: str) -> int:
    """Return the maximum number of generated tokens."""
    settings = document.get("generation_kwargs") or {}
    if unknown := sorted(set(settings) - GENERATION):
        hint = f"known keys: {', '.join(sorted(GENERATION))}"
        raise InputError(f"{unknown[0]} is not supported", f"{where}: generation_kwargs", hint)
    for key, (requirement, fits) in DRAWS.items():
        if key in settings and not fits(settings[key]):
            raise InputError(
                f"{settings[key]!r} is not {requirement}", f"{where}: generation_kwargs.{key}", "change it"
            )
    if settings.get("do_sample") and settings.get("temperature") == 0:
        hint = "leave one of them out"
        raise InputError(
            "do_sample draws, and 0 takes the likeliest", f"{where}: generation_kwargs.temperature", hint
        )
    return max_tokens(settings, where)


def max_tokens(settings: Mapping[str, Any], where: str = "generation_kwargs") -> int:
    """Return the maximum number of tokens that generation settings allow.

    Args:
        settings: the `generation_kwargs` of a task.
        where: the place of the task, for messages.

    Raises:
        InputError: it is not a positive number.
    """
    limit = next((settings[key] for key in LENGTHS if key in settings), LONGEST)
    if type(limit) is not int or limit < 1:
        raise InputError(
            f"{limit!r} is not a number of tokens", f"{where}: {LENGTHS[0]}", "give one of at least 1"
        )
    return limit


def check_fits(workload: Workload, tasks: Sequence[TaskFile], where: str) -> None:
    """Check that a model can be evaluated on tasks.

    Args:
        workload: the model.
        tasks: the tasks.
        where: the option or key that names the tasks, for messages.

    Raises:
        InputError: the model gives no likelihoods, or a task leaves no room for its prompts.
    """
    from workloads.model.score import check_scores, longest

    with wrong_input(where):
        check_scores(workload)
    room = longest(workload) if workload.config.architecture == "decoder" else None
    for task in tasks:
        if room is not None and task.max_tokens >= room:
            problem = f"{task.max_tokens} generated tokens leave no room for a prompt in the model's {room} positions"
            raise InputError(problem, f"{where} {task.path}: generation_kwargs.max_gen_toks", "lower it")
