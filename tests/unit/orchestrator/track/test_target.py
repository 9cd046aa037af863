"""What a job says of MLflow, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.job.errors import InputError
from orchestrator.track.target import check_registered_name, check_tracking


@pytest.mark.parametrize("uri", ["./mlruns", "mlruns", "file:mlruns", "file:///a/mlruns"])
def test_a_folder_is_refused_as_mlflow_refuses_it(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(InputError, match=r"keeps no runs any more; write sqlite:///mlflow\.db"):
        check_tracking(uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    check_tracking(uri)


@pytest.mark.parametrize(
    "uri", ["databricks", "databricks://profile", "uc", "http://127.0.0.1:5000", "sqlite:///x.db"]
)
def test_what_is_no_folder_is_left_to_mlflow(uri: str) -> None:
    check_tracking(uri)


@pytest.mark.parametrize("name", ["a/b", "a:b", ".", "..", "../a", " ", "", "a'b", 'a"b'])
def test_a_name_that_the_registry_does_not_take_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tracking\.register_as: MLflow registers no model under"):
        check_registered_name(name, "tracking.register_as")


@pytest.mark.parametrize("name", ["demo", "my model", "größe", "a..b", "catalog.schema.model", None])
def test_other_names_are_taken(name: str | None) -> None:
    check_registered_name(name, "tracking.register_as")
