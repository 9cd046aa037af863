"""Checks what a job says of MLflow. Whether the server answers is not checked: telemetry stops no run."""

from __future__ import annotations

import os
import posixpath
import re
from importlib.metadata import entry_points
from urllib.parse import urlsplit

from orchestrator.job.errors import InputError
from orchestrator.job.redact import redact

SCHEMES = {"", "file", "http", "https", "databricks", "uc", "sqlite", "postgresql", "mysql", "mssql"}
"""Of MLflow's own; others come with plugins."""
FOLDERS = {"", "file"}
"""Those that name a folder of this machine."""
NAMES = SCHEMES - {"file"}
"""What is no folder though it has no scheme."""
HEADER = b"SQLite format 3\0"
FILES_ALLOWED = "MLFLOW_ALLOW_FILE_STORE"
"""Without this variable MLflow 3 refuses to keep runs in a folder."""
DATABASE_HERE = "write sqlite:///mlflow.db, or the address of a server"


def check_tracking(uri: str) -> None:
    """Refuse a URI that MLflow cannot know, or a database file that is none. Raises InputError."""
    where = f"tracking.uri {redact(uri)}"
    try:
        scheme = urlsplit(uri).scheme.split("+")[0]
    except ValueError as error:
        raise InputError(f"is no URI ({error})", where, "see MLflow's tracking URIs") from None
    plugins = {point.name for point in entry_points(group="mlflow.tracking_store")}
    if scheme not in SCHEMES | plugins and uri not in SCHEMES:
        hint = "use http(s)://, sqlite:/// or another of MLflow's"
        raise InputError(f"MLflow knows no {scheme}://", where, hint)
    if scheme in FOLDERS and uri not in NAMES and not _are_files_allowed():
        what = "is a folder, in which MLflow keeps no runs any more"
        raise InputError(what, where, DATABASE_HERE)
    if scheme in ("http", "https") and not urlsplit(uri).hostname:
        raise InputError("names no server", where, "write for example http://localhost:5000")
    if (found := re.match(r"sqlite:///([^?]+)", uri)) and os.path.lexists(found[1]):
        hint = "name another file"
        if os.path.isdir(found[1]):
            raise InputError("is a folder", where, hint)
        if not _is_database(found[1]):
            raise InputError("is no SQLite database", where, hint)


def check_registered_name(name: str | None, where: str) -> None:
    """Refuse a name that MLflow's registry gives no model, or by which it finds none. Raises InputError."""
    if name is None:
        return
    wrong = [mark for mark in "/:'\"" if mark in name]
    if wrong or not name.strip() or name in (".", "..") or posixpath.normpath(name) != name:
        what = f"MLflow registers no model under {name!r}"
        raise InputError(
            what, where, f"give a name without {' or '.join(wrong)}" if wrong else "give another"
        )


def _are_files_allowed() -> bool:
    return os.environ.get(FILES_ALLOWED, "").lower() in ("true", "1")


def _is_database(path: str) -> bool:
    """Whether a file is one, or may become one."""
    try:
        with open(path, "rb") as file:
            return file.read(len(HEADER)) in (b"", HEADER)
    except OSError:
        return True  # it may be a link to what is not there yet, and is tried when it is needed
