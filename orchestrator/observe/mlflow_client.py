"""Clients of MLflow. A missing SQLite database is created completely before it gets its name."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from typing import Any

from orchestrator.storage.atomic import link_file

SQLITE = re.compile(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?")
"""The URI of a database file, with the file's path."""


def client_of(uri: str) -> Any:
    """Return an `mlflow.MlflowClient`. Raises what MLflow raises."""
    from mlflow import MlflowClient

    if (database := SQLITE.fullmatch(uri)) and not os.path.exists(database[1]):
        _make_database(database[1])
    return MlflowClient(tracking_uri=uri)


def _make_database(path: str) -> None:
    """Create a database with MLflow's tables.

    MLflow takes seconds to create the tables one by one. A process killed in between would leave a file that MLflow
    refuses forever, and two at a time disturb each other.
    """
    from mlflow import MlflowClient

    path = os.path.realpath(path)
    draft = f"{path}.{secrets.token_hex(4)}.draft"
    try:
        MlflowClient(tracking_uri=f"sqlite:///{draft}").search_experiments(max_results=1)
        with contextlib.suppress(FileExistsError):  # another run has created it in the meantime
            link_file(draft, path)  # unlike a rename, this never replaces an existing file
    finally:
        for suffix in ("", "-journal", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.remove(draft + suffix)
