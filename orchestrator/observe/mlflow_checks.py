"""Checks what a job says of MLflow. A server that does not answer is no mistake of a job: telemetry stops no run. One
that answers is asked what it makes of the experiment."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import posixpath
import re
import sqlite3
import urllib.request
from importlib.metadata import entry_points
from urllib.parse import quote, unquote, urlencode, urlsplit, urlunsplit

from orchestrator.config.errors import InputError
from orchestrator.config.redact import redact
from orchestrator.config.tracking import TrackingSpec
from orchestrator.observe.mlflow_client import SQLITE

SCHEMES = {"", "file", "http", "https", "databricks", "uc", "sqlite", "postgresql", "mysql", "mssql"}
"""Of MLflow's own; others come with plugins."""
FOLDERS = {"", "file"}
"""Those that name a folder of this machine."""
NAMES = SCHEMES - {"file"}
"""What is no folder though it has no scheme."""
HEADER = b"SQLite format 3\0"
LONGEST_EXPERIMENT = 500
"""Characters of an experiment's name, by MLflow's own rule."""
DELETED = "deleted"
"""The stage of an experiment that MLflow has as a deleted one, in which it begins no run."""
PATIENCE, LONGEST_ANSWER = 3.0, 2**20
"""Seconds for a server to answer, and bytes of what it says."""
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


def check_experiment(tracking: TrackingSpec) -> None:
    """Refuse an experiment in which MLflow can never begin a run. Raises InputError."""
    name = tracking.experiment
    where = "tracking.experiment"
    if not name or len(name) > LONGEST_EXPERIMENT:
        what = f"has {len(name)} characters, and MLflow takes 1 to {LONGEST_EXPERIMENT}"
        raise InputError(what, where, "name it otherwise")
    if _is_deleted(tracking.uri, name):
        hint = "restore it there, as by `mlflow experiments restore`, or name another"
        raise InputError(f"{name!r} is deleted on the server", where, hint)


def _is_deleted(uri: str, experiment: str) -> bool:
    """Whether a server, or a database file, has an experiment of that name as a deleted one alone; not if it does not
    tell. MLflow's own client takes seconds to be imported, and every run begins with this."""
    try:
        if database := SQLITE.fullmatch(uri):
            return os.path.exists(database[1]) and _is_deleted_in(database[1], experiment)
        if urlsplit(uri).scheme not in ("http", "https"):
            return False
        with urllib.request.urlopen(_request(uri, experiment), timeout=PATIENCE) as answer:
            found = json.loads(answer.read(LONGEST_ANSWER))
        return bool(found["experiment"]["lifecycle_stage"] == DELETED)
    except (OSError, ValueError, LookupError, TypeError, sqlite3.Error, http.client.HTTPException):
        return False


def _is_deleted_in(path: str, experiment: str) -> bool:
    place = f"file:{quote(os.path.abspath(path))}?mode=ro"
    with contextlib.closing(sqlite3.connect(place, timeout=PATIENCE, uri=True)) as database:
        rows = database.execute("SELECT lifecycle_stage FROM experiments WHERE name = ?", (experiment,))
        stages = {stage for (stage,) in rows}
    return stages == {DELETED}


def _request(uri: str, experiment: str) -> urllib.request.Request:
    """What asks a server for an experiment, by the credentials that MLflow's own client would use."""
    place = urlsplit(uri)
    query = urlencode({"experiment_name": experiment})
    path = f"{place.path.rstrip('/')}/api/2.0/mlflow/experiments/get-by-name"
    asked = urllib.request.Request(
        urlunsplit((place.scheme, place.netloc.rpartition("@")[2], path, query, ""))
    )
    user = place.username
    password = place.password
    if not user:
        user, password = (os.environ.get(f"MLFLOW_TRACKING_{part}") for part in ("USERNAME", "PASSWORD"))
    if user:
        pair = f"{unquote(user)}:{unquote(password or '')}" if place.username else f"{user}:{password or ''}"
        asked.add_header("Authorization", f"Basic {base64.b64encode(pair.encode()).decode()}")
    elif token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        asked.add_header("Authorization", f"Bearer {token}")
    return asked


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
