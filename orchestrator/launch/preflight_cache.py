"""Remember jobs that have run to their end, to skip the check that loads the model.

This saves more than a second, because the check imports torch. A job is identified by everything that the check reads:
the job itself, its tokenizer, and the code and the versions of the checkers. A job that depends on the user's own code,
a Hugging Face folder, tasks or other packages is checked each time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from cluster.workers.program import ROOT
from orchestrator.config.packages import PACKAGES
from orchestrator.config.spec import JobSpec
from orchestrator.resolve.prepared_data import data_cache
from orchestrator.storage.run_directory import RunDir
from orchestrator.storage.uri import is_local
from workloads.own.object_reference import is_object_reference

FOLDER = "checked"
"""The folder of the marks, next to the prepared data."""
VERSIONS = ("training-orchestrator", "torch", "transformers", "tokenizers")


def is_known(mark: Path | None) -> bool:
    """Return whether the job of this mark has run to its end."""
    return mark is not None and mark.exists()


def note(mark: Path | None) -> None:
    """Record that the job has run to its end. Raises nothing: a job without a record is checked again."""
    if mark is None or not mark.parents[1].is_dir():
        return
    try:
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
    except OSError:
        return


def mark_of(spec: JobSpec, run: RunDir) -> Path | None:
    """Return the mark's file for this job and the present code; None for a job that is checked each time."""
    model, tokenizer = spec.workload.model, spec.data.tokenizer
    folder = data_cache(spec.data, run)
    has_tasks = spec.evaluate is not None and spec.evaluate.tasks
    if (
        spec.own_code
        or is_object_reference(model)
        or model.startswith("hf:")
        or has_tasks
        or not is_local(folder)
    ):
        return None
    if spec.checkpoint.export not in ("hf", None) or spec.workload.init_from or spec.train.continue_from:
        return None
    if spec.distill:  # the teacher may have changed
        return None
    path = Path(tokenizer) if isinstance(tokenizer, str) else None
    files = [] if path is None else sorted(path.iterdir()) if path.is_dir() else [path]
    try:
        read = [spec.model_dump_json(), *(metadata.version(name) for name in VERSIONS)]
        read += [_state(path) for path in (*files, *_code())]
    except (OSError, metadata.PackageNotFoundError):  # the check reports what is missing
        return None
    name = hashlib.blake2b(json.dumps(read).encode(), digest_size=16).hexdigest()
    return Path(folder) / FOLDER / name


def _code() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def _state(path: Path) -> str:
    result = path.stat()
    return f"{path} {result.st_size} {result.st_mtime_ns}"
