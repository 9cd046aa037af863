"""Versions in MLflow's registry, against a real store on SQLite; tests/dist/track has the same against a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.observe.registry import ALIAS, Candidate, register


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db")


def test_the_alias_goes_only_to_what_is_better_by_the_same_metric(client: Any, tmp_path: Path) -> None:
    experiment = client.create_experiment("e", artifact_location=tmp_path.as_uri())
    made = 0

    def best_after(
        step: int, metric: str = "", value: float | None = None, larger: bool = False
    ) -> str | None:
        """The step that has the alias once this one is registered, by a run of its own."""
        nonlocal made

        def source() -> str:
            nonlocal made
            made += 1
            return tmp_path.as_uri()

        run = client.create_run(experiment).info.run_id
        for _ in range(2):  # the second time it is there already
            register(client, "model", run, Candidate(step, metric, value, larger), source, trial="7")
        version = client.get_registered_model("model").aliases.get(ALIAS)
        return version and client.get_model_version("model", version).tags["step"]

    assert best_after(10) is None
    assert best_after(15, "validation.loss", float("nan")) is None
    assert best_after(20, "validation.loss", 2.0) == "20"
    assert best_after(30, "validation.loss", 2.0) == "20"
    assert best_after(40, "validation.accuracy", 0.9, larger=True) == "20"
    assert best_after(60) == "20"
    assert best_after(70, "validation.loss", 1.5) == "70"
    versions = {v.tags["step"]: v.tags for v in client.search_model_versions("name = 'model'")}
    assert len(versions) == made == 7
    assert versions["70"] == {"step": "70", "metric": "validation.loss", "value": "1.5", "trial": "7"}
    assert versions["10"] == {"step": "10", "trial": "7"}


def test_one_that_says_no_metric_is_no_rival() -> None:
    assert Candidate(5, "validation.loss", 9.0).is_better_than({"trial": "3"})
    assert not Candidate(5).is_better_than({})
    assert Candidate(5, "validation.accuracy", 0.6, larger=True).is_better_than(
        {"metric": "validation.accuracy", "value": "0.5"}
    )
