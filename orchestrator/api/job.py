"""A job as a Python object, with the same values and the same identity as a job file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from orchestrator.config.document import read_document
from orchestrator.config.overrides import set_key
from orchestrator.config.paths import resolve_paths
from orchestrator.config.spec import JobSpec, dump, parse


class Job:
    """A job, with the keys of a job file as keyword arguments: `Job(name="a", workload={...}, data={...},
    train={...})`.

    Relative paths are relative to the current folder. Raises InputError, with the line of the command, for what is
    wrong.
    """

    def __init__(self, **document: Any) -> None:
        self._document = _plain(document)
        self.spec: JobSpec = resolve_paths(parse(self._document), Path.cwd())

    @classmethod
    def load(cls, path: str | Path, *overrides: str) -> Job:
        """Read a job file and apply overrides such as "a.b=c". Raises InputError."""
        return cls(**read_document(path, overrides))

    def changed(self, **keys: Any) -> Job:
        """Return a copy with other values: `job.changed(train__steps=100)` sets train.steps. Raises InputError."""
        document = json.loads(json.dumps(self._document))
        for key, value in keys.items():
            set_key(document, key.replace("__", "."), _plain(value), key)
        return type(self)(**document)

    @property
    def name(self) -> str:
        """The name of the job."""
        return self.spec.name

    @property
    def identity(self) -> dict[str, Any]:
        """The values that make two runs the same run."""
        return self.spec.identity()

    def to_yaml(self) -> str:
        """The job as plain data, with all defaults."""
        return dump(self.spec)

    def check(self, run_dir: str | None = None) -> None:
        """Run all checks of the job, without starting or writing anything. Raises InputError with every problem."""
        from orchestrator.api.place import run_directory
        from orchestrator.launch.preflight import preflight

        preflight(self.spec, run_directory(self.name, run_dir), None, None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self.spec == other.spec

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Job({self.name!r}, {self.spec.workload.model}, {self.spec.train.steps} steps)"


def _plain(value: Any) -> Any:
    """The value in the form that a job file has."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
