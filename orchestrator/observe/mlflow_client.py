"""Clients of MLflow. A SQLite database that is not there yet is made whole before it has its name."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from typing import Any

from orchestrator.storage.atomic import link_file

SQLITE = re.compile(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?")
"""The URI of a database in a file, with the file's path."""


def client_of(uri: str) -> Any:
    """An `mlflow.MlflowClient`. Raises what MLflow raises."""
    from mlflow import MlflowClient

    if (database := SQLITE.fullmatch(uri)) and not os.path.exists(database[1]):
        _make_database(database[1])
    return MlflowClient(tracking_uri=uri)


def _make_database(path: str) -> None:
    """Make a database with MLflow's tables. They take it seconds, a table after the other, and who is ended meanwhile
    leaves a file that MLflow refuses for ever; two at a time disturb each other."""
    from mlflow import MlflowClient

    path = os.path.realpath(path)
    draft = f"{path}.{secrets.token_hex(4)}.draft"
    try:
        MlflowClient(tracking_uri=f"sqlite:///{draft}").search_experiments(max_results=1)
        with contextlib.suppress(FileExistsError):  # another run has made it meanwhile
            link_file(draft, path)  # unlike a renaming it replaces nothing
    finally:
        for suffix in ("", "-journal", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.remove(draft + suffix)
