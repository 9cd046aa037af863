"""A database of MLflow that is there is whole."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from orchestrator.observe import mlflow_client
from orchestrator.observe.mlflow_client import client_of


def test_a_database_has_its_name_when_it_is_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    client_of(f"sqlite:///{database}").create_experiment("first")
    assert [path.name for path in tmp_path.iterdir()] == [database.name]
    # The second finds it, and so does whoever does not come through here.
    found = client_of(f"sqlite:///{database}").search_experiments()
    assert {each.name for each in found} == {"Default", "first"}
    assert MlflowClient(f"sqlite:///{database}").get_experiment_by_name("first") is not None


@pytest.mark.slow
def test_who_is_ended_while_it_is_made_leaves_no_database(tmp_path: Path) -> None:
    code = (
        "import os, sys; from sqlalchemy import event; from sqlalchemy.engine import Engine\n"
        "made = []\n"
        "@event.listens_for(Engine, 'before_cursor_execute')\n"
        "def end(connection, cursor, statement, *_):\n"
        "    made.append(statement)\n"
        "    if 'CREATE TABLE _alembic_tmp' in statement: os._exit(7)\n"
        "from orchestrator.observe.mlflow_client import client_of\n"
        "client_of(sys.argv[1])\n"
    )
    database = tmp_path / "mlflow.db"
    ended = subprocess.run([sys.executable, "-c", code, f"sqlite:///{database}"], capture_output=True)
    assert ended.returncode == 7
    assert not database.exists()
    client_of(f"sqlite:///{database}").create_experiment("second")


@pytest.mark.slow
def test_one_that_another_has_made_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = tmp_path / "mlflow.db"
    client_of(f"sqlite:///{database}").create_experiment("theirs")
    monkeypatch.setattr(mlflow_client.os.path, "exists", lambda path: False)
    assert client_of(f"sqlite:///{database}").get_experiment_by_name("theirs") is not None


@pytest.mark.slow
def test_a_file_system_without_hard_links_has_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "there are no hard links")

    monkeypatch.setattr(os, "link", refused)
    database = tmp_path / "mlflow.db"
    client_of(f"sqlite:///{database}").create_experiment("first")
    assert [path.name for path in tmp_path.iterdir()] == [database.name]
