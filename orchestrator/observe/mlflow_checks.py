"""Checks of a job's MLflow settings.

A server that does not answer is not an error of the job, because telemetry stops no run. A server that answers is
asked about the experiment.
"""

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
from orchestrator.observe.config import TrackingSpec
from orchestrator.observe.mlflow_client import SQLITE

SCHEMES = {"", "file", "http", "https", "databricks", "uc", "sqlite", "postgresql", "mysql", "mssql"}
"""MLflow's own schemes; plugins add others."""
FOLDERS = {"", "file"}
"""Schemes of a folder on this machine."""
DATABASES = {"postgresql", "mysql", "mssql"}
"""Schemes of databases that SQLAlchemy reaches through a driver."""
PACKAGES = {
    "psycopg": "'psycopg[binary]'",
    "psycopg2": "psycopg2-binary",
    "MySQLdb": "mysqlclient",
    "pymysql": "PyMySQL",
}
"""The packages of drivers with another name than their module's."""
TIMEOUTS = {
    "pg8000": "timeout",
    "pyodbc": "timeout",
    "pymssql": "login_timeout",
    "mysqlconnector": "connection_timeout",
}
"""The drivers' arguments for the seconds to wait, if they differ from `connect_timeout`."""
NAMES = SCHEMES - {"file"}
"""Values without a scheme that are not a folder."""
HEADER = b"SQLite format 3\0"
LONGEST_EXPERIMENT = 500
"""Maximum length of an experiment's name, by MLflow's own rule."""
DELETED = "deleted"
"""The stage of a deleted experiment, in which MLflow starts no runs."""
PATIENCE, LONGEST_ANSWER = 3.0, 2**20
"""Seconds to wait for a server, and maximum bytes of its answer."""
FILES_ALLOWED = "MLFLOW_ALLOW_FILE_STORE"
"""Without this variable, MLflow 3 refuses to store runs in a folder."""
DATABASE_HERE = "write sqlite:///mlflow.db, or the address of a server"


def check_tracking_server(tracking: TrackingSpec | None) -> None:
    """Check all that a job says about MLflow, if it tracks there. Raises InputError."""
    if tracking:
        check_tracking(tracking.uri)
        check_experiment(tracking)
        check_registered_name(tracking.register_as, "tracking.register_as")


def check_tracking(uri: str) -> None:
    """Raise InputError for a URI that MLflow does not support, a database without its driver, or a file that is not a
    database.
    """
    where = f"tracking.uri {redact(uri)}"
    try:
        scheme = urlsplit(uri).scheme.split("+")[0]
    except ValueError as error:
        raise InputError(f"is not a URI ({error})", where, "see MLflow's tracking URIs") from None
    plugins = {point.name for point in entry_points(group="mlflow.tracking_store")}
    if scheme not in SCHEMES | plugins and uri not in SCHEMES:
        hint = "use http(s)://, sqlite:/// or another of MLflow's"
        raise InputError(f"MLflow knows no {scheme}://", where, hint)
    if scheme in FOLDERS and uri not in NAMES and not _are_files_allowed():
        problem = "is a folder, and MLflow no longer stores runs in folders"
        raise InputError(problem, where, DATABASE_HERE)
    if scheme in ("http", "https") and not urlsplit(uri).hostname:
        raise InputError("names no server", where, "write for example http://localhost:5000")
    if scheme in DATABASES:
        _check_driver(uri, where)
    if (match := re.match(r"sqlite:///([^?]+)", uri)) and os.path.lexists(match[1]):
        hint = "name another file"
        if os.path.isdir(match[1]):
            raise InputError("is a folder", where, hint)
        if not _is_database(match[1]):
            raise InputError("is not a SQLite database", where, hint)


def _check_driver(uri: str, where: str) -> None:
    """Raise InputError if SQLAlchemy does not understand a database's address, or lacks the driver for it."""
    try:
        from sqlalchemy import make_url
        from sqlalchemy.exc import ArgumentError

        try:
            make_url(uri).get_dialect().import_dbapi()
        except (ArgumentError, ValueError) as error:
            problem = f"is not an address of a database ({redact(str(error))})"
            raise InputError(problem, where, "see SQLAlchemy's database URLs") from None
    except ImportError as error:
        module = (error.name or "").partition(".")[0]
        problem = f"is a database that needs the Python module {module}, which is not installed"
        raise InputError(problem, where, f"pip install {PACKAGES.get(module, module)}") from None


def check_experiment(tracking: TrackingSpec) -> None:
    """Raise InputError for an experiment in which MLflow can never start a run."""
    name = tracking.experiment
    key = "tracking.experiment"
    if not name or len(name) > LONGEST_EXPERIMENT:
        problem = f"has {len(name)} characters, and MLflow takes 1 to {LONGEST_EXPERIMENT}"
        raise InputError(problem, key, "name it otherwise")
    if _is_deleted(tracking.uri, name):
        hint = "restore it there, as by `mlflow experiments restore`, or name another"
        raise InputError(f"{name!r} is deleted on the server", key, hint)


def _is_deleted(uri: str, experiment: str) -> bool:
    """Return whether a server or database has the experiment only as a deleted one; False if unknown.

    MLflow's own client takes seconds to import, and every run starts with this check.
    """
    try:
        if database := SQLITE.fullmatch(uri):
            return os.path.exists(database[1]) and _is_deleted_in(database[1], experiment)
        if urlsplit(uri).scheme.split("+")[0] in DATABASES:
            return _is_deleted_at(uri, experiment)
        if urlsplit(uri).scheme not in ("http", "https"):
            return False
        with urllib.request.urlopen(_request(uri, experiment), timeout=PATIENCE) as answer:
            document = json.loads(answer.read(LONGEST_ANSWER))
        return bool(document["experiment"]["lifecycle_stage"] == DELETED)
    except (OSError, ValueError, LookupError, TypeError, sqlite3.Error, http.client.HTTPException):
        return False


def _is_deleted_in(path: str, experiment: str) -> bool:
    address = f"file:{quote(os.path.abspath(path))}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, timeout=PATIENCE, uri=True)) as database:
        rows = database.execute("SELECT lifecycle_stage FROM experiments WHERE name = ?", (experiment,))
        stages = {stage for (stage,) in rows}
    return stages == {DELETED}


def _is_deleted_at(uri: str, experiment: str) -> bool:
    """Like `_is_deleted_in`, for a database that a server has; False if it does not answer."""
    import sqlalchemy  # takes half a second, which a database file does not need

    url = sqlalchemy.make_url(uri)
    wait = {TIMEOUTS.get(url.get_driver_name(), "connect_timeout"): int(PATIENCE)}
    query = sqlalchemy.text("SELECT lifecycle_stage FROM experiments WHERE name = :name")
    try:
        engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool, connect_args=wait)
        with engine.connect() as database:
            stages = {*database.execute(query, {"name": experiment}).scalars()}
    except sqlalchemy.exc.SQLAlchemyError:
        return False
    return stages == {DELETED}


def _request(uri: str, experiment: str) -> urllib.request.Request:
    """Return a request to a server for an experiment, with the credentials that MLflow's own client would use."""
    url = urlsplit(uri)
    query = urlencode({"experiment_name": experiment})
    path = f"{url.path.rstrip('/')}/api/2.0/mlflow/experiments/get-by-name"
    request = urllib.request.Request(urlunsplit((url.scheme, url.netloc.rpartition("@")[2], path, query, "")))
    user = url.username
    password = url.password
    if not user:
        user, password = (os.environ.get(f"MLFLOW_TRACKING_{part}") for part in ("USERNAME", "PASSWORD"))
    if user:
        pair = f"{unquote(user)}:{unquote(password or '')}" if url.username else f"{user}:{password or ''}"
        request.add_header("Authorization", f"Basic {base64.b64encode(pair.encode()).decode()}")
    elif token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    return request


def check_registered_name(name: str | None, where: str) -> None:
    """Raise InputError for a name that MLflow's registry does not accept, or by which it finds nothing."""
    if name is None:
        return
    wrong = [mark for mark in "/:'\"" if mark in name]
    if wrong or not name.strip() or name in (".", "..") or posixpath.normpath(name) != name:
        problem = f"MLflow registers no model under {name!r}"
        raise InputError(
            problem, where, f"give a name without {' or '.join(wrong)}" if wrong else "give another"
        )


def _are_files_allowed() -> bool:
    return os.environ.get(FILES_ALLOWED, "").lower() in ("true", "1")


def _is_database(path: str) -> bool:
    """Return whether a file is a database, or can become one."""
    try:
        with open(path, "rb") as file:
            return file.read(len(HEADER)) in (b"", HEADER)
    except OSError:
        return True  # possibly a broken link, which is tried when needed
