"""Start the imports of ranks early: while the job is checked and Ray starts on this machine."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

from cluster.workers.shared_imports import SharedImports, is_supported
from orchestrator.parallel.config import ParallelChoice
from orchestrator.train.task import entry_of


@contextlib.contextmanager
def imports_begun(parallel: ParallelChoice, model: str, embedded: bool) -> Iterator[str]:
    """Start a process that does the imports of ranks, and yield its name. The process ends with the block.

    Yields an empty name if the ranks will not run on this machine. `embedded` says that they will. `model` is the model
    as the job names it.
    """
    if not (embedded and is_supported()):
        yield ""
        return
    engine = "torch" if parallel == "auto" else parallel.engine or "torch"
    imports = SharedImports(secrets.token_hex(16), entry_of(engine, model))
    try:
        yield imports.name
    finally:
        imports.close()
