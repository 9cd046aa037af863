"""Which code a run is made by, as tags that MLflow's page shows."""

from __future__ import annotations

import subprocess
from importlib import metadata

from cluster.workers.program import ROOT

VERSION_TAG = "orchestrator.version"
COMMIT_TAG, NAME_TAG, TYPE_TAG = "mlflow.source.git.commit", "mlflow.source.name", "mlflow.source.type"
TIMEOUT = 5.0


def code_tags() -> dict[str, str]:
    """The version of this program and, where it runs from a checkout, the commit; `-dirty` behind it where files have
    changed since. The user's own code has a hash in every commit of the run."""
    tags = {
        VERSION_TAG: metadata.version("training-orchestrator"),
        NAME_TAG: "orchestrator",
        TYPE_TAG: "PROJECT",
    }
    if (ROOT / ".git").exists():
        try:
            commit = _git("rev-parse", "HEAD")
            tags[COMMIT_TAG] = f"{commit}-dirty" if _git("status", "--porcelain", "-uno") else commit
        except (OSError, subprocess.SubprocessError):
            pass  # there is no git, or it refuses
    return tags


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    return done.stdout.strip()
