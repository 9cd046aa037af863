"""What a run on this machine begins before Ray is there: the imports of its ranks."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

from cluster.workers.shared_imports import SharedImports, is_supported
from orchestrator.config.spec import JobSpec
from orchestrator.train.task import ENTRY_OF


@contextlib.contextmanager
def imports_begun(spec: JobSpec, embedded: bool) -> Iterator[str]:
    """The name of a process in which the imports of ranks begin now, while the job is checked and Ray starts; it ends
    with this. Empty if the ranks are not to run on this machine."""
    if not (embedded and is_supported()):
        yield ""
        return
    engine = "torch" if spec.parallel == "auto" else spec.parallel.engine or "torch"
    imports = SharedImports(secrets.token_hex(16), ENTRY_OF[engine])
    try:
        yield imports.name
    finally:
        imports.close()
