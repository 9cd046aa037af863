"""An MLflow database of each module of tests."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tracking URI of a database; making its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def client(store: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=store)
