"""Options that several commands share, and how they print."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.config.errors import InputError
from orchestrator.storage.file_names import RUNS

if TYPE_CHECKING:
    from orchestrator.config.chain import ChainSpec
    from orchestrator.config.spec import JobSpec
    from orchestrator.config.validation_messages import WrongKeys
    from orchestrator.storage.run_directory import RunDir

NAME_WIDTH = 14
"""Width in characters up to which the first column of a table is never wrapped."""
PIPE_WIDTH = 200
"""Line width in characters when standard output is not a terminal."""


class ProgressKind(StrEnum):
    """How standard error shows the progress of a run."""

    LINES = "lines"
    LIVE = "live"
    NONE = "none"


def run_names(incomplete: str) -> list[str]:
    """The names of runs in the folder RUNS with this prefix, newest first, for shell completion. The shell completes
    paths itself."""
    folder = Path(RUNS)
    if "/" in incomplete or not folder.is_dir():
        return []
    runs = [
        run for run in folder.iterdir() if run.name.startswith(incomplete) and (run / "job.yaml").exists()
    ]
    return [run.name for run in sorted(runs, key=lambda run: -run.stat().st_mtime)]


Job = Annotated[Path, typer.Argument(help="the job file", show_default=False)]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="a run directory: a path or URI, or its name in runs/",
        show_default=False,
        autocompletion=run_names,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B=C",
        help="override a key of the job file, such as train.steps=50 or data.sources.0.weight=2",
    ),
]
RunDirectory = Annotated[str | None, typer.Option("--run-dir", help="run directory [default: runs/<name>]")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document on standard output")]
Address = Annotated[
    str | None,
    typer.Option(help="address of a Ray cluster, or 'auto' [default: run Ray inside this command]"),
]

Cluster = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="address of Ray or its Jobs API [default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, the local cluster]",
    ),
]
Progress = Annotated[
    ProgressKind | None,
    typer.Option("--progress", help="a screen, lines, or nothing [default: live on a terminal, else lines]"),
]
Priority = Annotated[
    int,
    typer.Option(
        help="the job with the highest priority on a cluster runs first; lower ones are stopped for it"
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        min=2,
        metavar="N",
        help="train the job under N seeds, from its own on: a chain in runs/<name>-seeds, for `compare`",
    ),
]


def job_of(path: Path, overrides: list[str] | None) -> JobSpec:
    """The job of a file with overrides applied, and relative paths made absolute against the current folder."""
    from orchestrator.config.paths import resolve_paths
    from orchestrator.config.spec import load
    from orchestrator.config.validation_messages import WrongKeys

    try:
        return resolve_paths(load(path, overrides or ()), Path.cwd())
    except WrongKeys as problem:
        raise _with_missing_files(problem) from None


def jobs_of(path: Path, overrides: list[str] | None, seeds: int | None = None) -> JobSpec | ChainSpec:
    """Like `job_of`, for a command that also accepts a chain. With `seeds`, a job becomes a chain of that many."""
    from orchestrator.config.chain import ChainSpec, chain_of_seeds, load_job
    from orchestrator.config.paths import resolve_paths
    from orchestrator.config.validation_messages import WrongKeys

    try:
        result = load_job(path, overrides or ())
    except WrongKeys as problem:
        raise _with_missing_files(problem) from None
    if seeds is not None:
        if isinstance(result, ChainSpec):
            hint = "set the key seed of its stages"
            raise InputError("takes one job, but this is a chain of jobs", "--seeds", hint)
        if result.tune is not None:
            note_of_search("--seeds")
        result = chain_of_seeds(result.document(), seeds)
    return (
        result.with_paths(Path.cwd()) if isinstance(result, ChainSpec) else resolve_paths(result, Path.cwd())
    )


def note_of_search(option: str) -> None:
    """Say that an option leaves out the search that the job has under `tune`."""
    print(f"note: {option} searches nothing: the job's key tune is left out", file=sys.stderr)


def _with_missing_files(problem: WrongKeys) -> InputError:
    """The problems of a job file, missing files included, so that a user sees all of them at once."""
    from orchestrator.config.errors import Problems
    from orchestrator.config.paths import resolve_paths
    from orchestrator.launch.job_checks import check_named

    problems = Problems()
    with problems.noted():
        raise InputError(problem.what, problem.where, problem.hint, problem.others)
    with problems.noted():
        check_named(resolve_paths(problem.rest, Path.cwd()))
    return problems.all()


def run_of(name: str, run_dir: str | None) -> RunDir:
    """The run directory of --run-dir, or the job's default. Raises InputError if it cannot be one."""
    from orchestrator.api.place import run_directory

    return run_directory(name, run_dir, "--run-dir")


def existing_run(run_dir: str) -> tuple[RunDir, JobSpec]:
    """An existing run directory and its job; `run_dir` may be the name of one in the folder RUNS. Raises InputError if
    there is no run."""
    from orchestrator.api import place

    return place.existing_run(run_dir)


def existing_folder(folder: str) -> str:
    """The absolute path or URI of a folder of run directories. Raises InputError if the folder does not exist."""
    from orchestrator.storage.uri import check_uri, is_local

    check_uri(folder)
    path = folder if "://" in folder else os.path.normpath(Path.cwd() / folder)
    if is_local(path) and not Path(path).is_dir():
        raise InputError("there is no such folder", folder, "name a folder of run directories")
    return path


def on_this_machine(value: str | Path) -> Path:
    """The value of an option as a local path. Raises InputError for a URI."""
    from orchestrator.storage.uri import check_uri, is_path

    text = str(value)  # a default is a path already
    check_uri(text)
    if not is_path(text):
        raise InputError("is not a path of this machine", text, "give a path")
    return Path(text)


def finite(number: float | None) -> float | None:
    """Return the number. Raises InputError for infinity and NaN."""
    if number is not None and not math.isfinite(number):
        raise InputError("is not a finite number", str(number), "give another")
    return number


def word(text: str | None) -> str | None:
    """Return a name from outside, such as a region. Raises InputError if it has blanks or control characters."""
    if text is not None and (not text or not text.isprintable() or " " in text):
        raise InputError("is not a name", repr(text), "write it without blanks")
    return text


def words(texts: list[str] | None) -> list[str] | None:
    """Return several names, each checked by `word`. Raises InputError."""
    for text in texts or ():
        word(text)
    return texts


@contextlib.contextmanager
def at_its_end() -> Iterator[None]:
    """Print the last output of a command. The reader may close the pipe early, as `head` does."""
    with contextlib.suppress(BrokenPipeError):
        yield
        sys.stdout.flush()


def emit(value: Any) -> None:
    """Print a JSON document on standard output."""
    print(json.dumps(value, indent=2))


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table on standard output, wrapped only if there is a terminal that is too narrow for it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title, title_justify="left", box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    for number, column in enumerate(columns):
        longest = max((len(row[number]) for row in rows), default=0)
        drawn.add_column(column, overflow="fold", min_width=0 if number else min(longest, NAME_WIDTH))
    for row in rows:
        drawn.add_row(*row)
    console = Console(markup=False, highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    console.print(drawn)
