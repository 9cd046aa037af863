"""What rank 0 writes down inside Ray Train: the run directory of `orchestrator run`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import job, rows, write_text
from prepared import prepare_here

from cluster.workers.machine import Offer
from orchestrator.config.errors import InputError
from orchestrator.config.object_reference import ObjectReference
from orchestrator.config.own_code import code_of
from orchestrator.config.spec import dump, parse
from orchestrator.launch import ray_train, ray_train_attempt, worker
from orchestrator.launch.ray_train_history import history_of
from orchestrator.planner import machines
from orchestrator.planner.choose_precision import in_precision
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.instability import NonFinite


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A job over prepared data, on a machine that nobody asks Ray for."""
    monkeypatch.setattr(ray_train_attempt, "smallest_offer", lambda bundle, most: None)
    monkeypatch.setattr(machines, "probe", lambda cpu: 1e10)
    spec = parse(job(write_text(tmp_path, 20_000)))
    run = RunDir(str(tmp_path / "run"))
    run.create()
    return {
        "job": spec.model_dump(mode="json"),
        "run": run.uri,
        "data": prepare_here(spec, str(tmp_path / "data")),
        "sets": {},
    }


def row(step: int, attempt: int) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "loss": 1.0, "step_seconds": 0.1, "time": 1e9 + step}


def events(config: dict[str, Any]) -> list[dict[str, Any]]:
    return rows(Path(config["run"]), "events.jsonl")


def diverge(config: dict[str, Any]) -> None:
    """An attempt whose second step is not a number."""
    with history_of(config, RunDir(config["run"])) as history:
        history.begin(2)
        history.take(row(1, 1))
        raise NonFinite("loss is nan", 2, 8)


def test_an_attempt_is_told_and_its_rows_are_kept(config: dict[str, Any]) -> None:
    with history_of(config, RunDir(config["run"])) as history:
        told = history.begin(2)
        for step in (1, 2):
            history.take(row(step, told["attempt"]))
        assert history.saved == 2
    assert (told["attempt"], told["restore"], told["layout"]["dp"]) == (1, None, 2)
    assert [event["phase"] for event in events(config)] == ["prepare", "start", "train", "done"]
    assert events(config)[1]["data"] == config["data"]
    assert [found["step"] for found in rows(Path(config["run"]))] == [1, 2]


def test_an_instability_is_left_out_by_the_next_attempt(config: dict[str, Any]) -> None:
    with pytest.raises(NonFinite):
        diverge(config)
    (stop,) = [event for event in events(config) if event["phase"] == "stop"]
    assert stop["skipped"] == {"step": 2, "start": 8, "count": 8, "lr_scale": 1.0}
    assert stop["first_fault"].split(": ", 1)[1].startswith("NonFinite: loss is nan at step 2")
    assert stop["lost_steps"] == 1
    with history_of(config, RunDir(config["run"])) as history:
        assert history.begin(1)["attempt"] == 2
    assert rows(Path(config["run"])) == []


def test_the_users_own_code_is_part_of_the_run(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "halves.py").write_text("def half(step, steps): return 0.5\n")
    spec = parse(config["job"])
    optimizer = spec.train.optimizer.model_copy(update={"schedule": ObjectReference(use="halves:half")})
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"optimizer": optimizer})})
    monkeypatch.setattr(ray_train, "check_job", lambda spec, **_: SimpleNamespace(spec=spec))
    monkeypatch.setattr(ray_train, "prepared", lambda *_, **__: PreparedData(config["data"], {}))
    told = ray_train.loop_config(spec, config["run"])
    assert told["code"] == code_of(spec.own_code)
    assert told["code_roots"] == [str(tmp_path)]
    (tmp_path / "halves.py").write_text("def half(step, steps): return 0.4\n")
    with pytest.raises(InputError, match="the user's own code on this node differs from the run's"):
        ray_train.train_func(told)


def test_workers_are_told_the_precision_that_was_chosen(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what Ray offers; the same loop begun again keeps it, whatever would be chosen now."""
    monkeypatch.setattr(worker, "_offer", lambda *_, **__: Offer(8e9))
    monkeypatch.setattr(ray_train, "prepared", lambda *_, **__: PreparedData(config["data"], {}))
    spec = parse({**config["job"], "train": {**config["job"]["train"], "precision": "auto"}})
    told = ray_train.loop_config(spec, config["run"])
    assert told["job"]["train"]["precision"] in ("fp32", "bf16")
    run = RunDir(config["run"])
    run.append("events.jsonl", [{"phase": "prepare"}])
    run.write_text("job.yaml", dump(spec.with_parts(train=in_precision(spec.train, "fp16"))))
    assert ray_train.loop_config(spec, run.uri)["job"]["train"]["precision"] == "fp16"


def test_workers_that_no_layout_uses_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="no legal layout uses 7 workers"):
        with history_of(config, RunDir(config["run"])) as history:
            history.begin(7)


def test_evaluations_beside_the_run_are_refused() -> None:
    document = job("a.txt") | {"evaluate": {"where": "beside"}}
    document["data"]["validation"] = {"share": 0.1}
    with pytest.raises(InputError, match=r"evaluate\.where.* set it to gang"):
        ray_train.loop_config(parse(document))
