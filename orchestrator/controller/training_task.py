"""What the ranks of an attempt are given."""

from __future__ import annotations

import secrets
from typing import Any

from orchestrator.checkpoint.identity import CODE
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.config.own_code import check_same_code, code_of, roots_of
from orchestrator.config.spec import JobSpec
from orchestrator.controller.state import State
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.task import Task


def training_task(
    spec: JobSpec, run: RunDir, data: PreparedData, state: State, commit: CommitManifest | None, **more: Any
) -> Task:
    """The task of the attempt that `state` is at, from that commit; `more` are other fields of it. Raises InputError if
    the user's own code has changed."""
    assert state.layout is not None
    if commit is not None:  # the files may have been edited since the last attempt
        check_same_code(spec, commit.meta.get(CODE) or {}, run.uri)
    return Task(
        job=spec.model_dump(mode="json"),
        layout=state.layout.to_json(),
        run=run.uri,
        data=data.uri,
        attempt=state.attempt,
        restore=commit.step if commit else None,
        token=secrets.token_hex(6),
        skips=tuple(skip.to_json() for skip in state.skips),
        sets=data.sets,
        code=code_of(spec),
        code_roots=tuple(roots_of(spec)),
        **more,
    )
