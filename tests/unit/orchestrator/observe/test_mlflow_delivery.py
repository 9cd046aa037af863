"""Against a real MLflow store on SQLite; tests/dist/track has the same against a server."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sockets import silent, trickling

from orchestrator.config.spec import JobSpec, parse
from orchestrator.observe import mlflow_delivery, mlflow_run
from orchestrator.observe.mlflow_delivery import Tracker, deliver, rows_on_server
from orchestrator.observe.mlflow_run import code_tags
from orchestrator.observe.totals import totals_of
from orchestrator.storage.run_directory import RunDir

BORN = 1_700_000_000.0
MANY = 460
"""Parameters with two norms each: more than one request takes."""


@pytest.fixture(params=["silent", "trickling"])
def mute(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that takes connections and never answers, or begins an answer that never ends."""
    with silent() if request.param == "silent" else trickling() as found:
        address = found if isinstance(found, str) else found[0]
        yield f"http://ann:hunter2@{address}"


def job(uri: str, experiment: str, **more: Any) -> JobSpec:
    return parse(
        {
            "name": "demo",
            "workload": {"model": "gpt-tiny", "changes": {"odd name!": "x" * 7000, "api_key": "hunter2"}},
            "data": {
                "sources": [{"uri": "s3://ann:hunter2@b/x"}],
                "tokenizer": "t.json",
                "sequence_length": 64,
            },
            "train": {"steps": 5, "global_batch": 4},
            "tracking": {"uri": uri, "experiment": experiment},
            **more,
        }
    )


def new_run(path: Path, born: float = BORN) -> RunDir:
    run_dir = RunDir(str(path))
    run_dir.create()
    run_dir.append("events.jsonl", [{"time": born, "phase": "prepare", "attempt": 1}])
    return run_dir


def row(step: int, attempt: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "time": BORN + 10 * attempt + step, "loss": 10 / step, "attempt": attempt, "step_seconds": 0.5,
        "layout": f"dp{attempt} zero0 mb4", "samples": f"hash{step}", **more,
    }  # fmt: skip


def write(run_dir: RunDir, to: Tracker, rows: list[dict[str, Any]]) -> None:
    run_dir.append("metrics.jsonl", rows)
    to.rows(rows)


def runs(client: Any, experiment: str) -> list[Any]:
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


def history(client: Any, run: Any, key: str = "loss") -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)]


@pytest.mark.contract
def test_a_run_arrives_whole(tmp_path: Path, store: str, client: Any) -> None:
    run_dir = new_run(tmp_path / "run")
    run_dir.write_text("job.yaml", "uri: s3://ann:hunter2@b/x\n")
    followed = Tracker(job(store, "whole").tracked, run_dir)
    write(run_dir, followed, [row(1), row(2, loss=math.nan)])
    write(run_dir, followed, [row(3)])
    run_dir.append("events.jsonl", [{"time": BORN + 60, "phase": "done", "attempt": 1}])
    run_dir.write_text("summary.json", "{}\n")
    followed.document("summary.json")
    followed.status("FINISHED")
    assert followed.close(60) == mlflow_delivery.Delivery(0)

    [run] = runs(client, "whole")
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run"), "one job may have many runs"
    assert (run.info.start_time, run.info.end_time) == (BORN * 1000, (BORN + 60) * 1000)
    assert [s for s, _ in history(client, run)] == [1, 2, 3]
    assert math.isnan(history(client, run)[1][1])
    assert client.get_metric_history(run.info.run_id, "loss")[0].timestamp == (BORN + 11) * 1000
    assert (run.data.tags["layout"], run.data.tags["samples"]) == ("dp1 zero0 mb4", "hash3")
    assert code_tags().keys() <= run.data.tags.keys()
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|", run.data.tags.get("mlflow.source.git.commit", ""))
    assert run.data.params["train.optimizer.lr"] == "0.0003"
    assert len(run.data.params["workload.changes.odd name_"]) == 6000
    assert "hunter2" not in str(run.data.params)
    artefacts = {
        a.path: Path(run.info.artifact_uri.removeprefix("file://")) / a.path
        for a in client.list_artifacts(run.info.run_id)
    }
    assert set(artefacts) == {"job.yaml", "summary.json", "events.jsonl", "environment.txt"}
    assert "\nmlflow==" in artefacts["environment.txt"].read_text()
    assert '"phase": "done"' in artefacts["events.jsonl"].read_text()
    assert not {"step", "attempt", "time"} & set(run.data.metrics)
    assert run.data.tags["orchestrator.last_step"] == "3"
    kind = client.get_experiment_by_name("whole").tags["mlflow.experimentKind"]
    assert kind == "custom_model_development"
    assert artefacts["job.yaml"].read_text() == "uri: s3://ann:***@b/x\n"
    assert artefacts["job.yaml"].is_relative_to(Path(store.removeprefix("sqlite:///")).parent)


def test_a_name_that_mlflow_does_not_take_holds_back_nothing_else(
    tmp_path: Path, store: str, client: Any
) -> None:
    run_dir = new_run(tmp_path / "run")
    more = {"workload": {"model": "gpt-tiny", "changes": {"a//b": 1, "hidden": 32}}}
    followed = Tracker(job(store, "names", **more).tracked, run_dir)
    write(
        run_dir, followed, [row(1, **{"mine//own": 1.0, "fine": 2.0}), row(2, **{"../up": 3.0, "fine": 4.0})]
    )
    found = followed.close(60)
    assert found == mlflow_delivery.Delivery(0, None, ("../up", "mine//own", "workload.changes.a//b"))
    assert found.line.startswith("MLflow takes no metric or parameter named ../up, mine//own, workload.")
    [run] = runs(client, "names")
    assert history(client, run) == [(1, 10.0), (2, 5.0)]
    assert history(client, run, "fine") == [(1, 2.0), (2, 4.0)]
    assert run.data.params["workload.changes.hidden"] == "32"
    assert deliver(job(store, "names", **more).tracked, run_dir).missing == 0


def test_statistics_of_many_layers_reach_mlflow_in_parts(tmp_path: Path, store: str, client: Any) -> None:
    """A row with more numbers than MLflow takes at once; they are not among the numbers of a row that is put back."""
    run_dir = new_run(tmp_path / "run")
    followed = Tracker(job(store, "layers").tracked, run_dir)
    layers: dict[str, Any] = {
        f"layers.{n}.weight": {"weight_norm": float(n), "gradient_norm": 0.5, "weight_histogram": {"-3": 7}}
        for n in range(MANY)
    }
    write(run_dir, followed, [row(1), row(2, layer_statistics=layers)])
    assert followed.close(120) == mlflow_delivery.Delivery(0)
    [run] = runs(client, "layers")
    for number in (0, MANY - 1):
        key = f"weight_norm/layers.{number}.weight"
        assert history(client, run, key) == [(2, float(number))]
    logged = [key for key in run.data.metrics if key.startswith(("weight_norm/", "gradient_norm/"))]
    assert len(logged) == 2 * MANY
    assert history(client, run) == [(1, 10.0), (2, 5.0)]
    (again,) = rows_on_server("demo", job(store, "layers").tracking, run_dir, [(2, 2)], 60)
    assert not any("norm/" in key for key in again)


@pytest.mark.contract
def test_an_infinity_comes_back_from_mlflow_as_one(tmp_path: Path, store: str, client: Any) -> None:
    """Its store holds the largest float in place of it; a row that was lost and is found again has infinity."""
    run_dir = new_run(tmp_path / "run")
    followed = Tracker(job(store, "infinite").tracked, run_dir)
    row_of = {"grad_norm": math.inf, "least": -math.inf, "loss": math.nan}
    write(run_dir, followed, [row(1, **row_of)])
    assert followed.close(60) == mlflow_delivery.Delivery(0)
    [run] = runs(client, "infinite")
    held = [history(client, run, key)[0][1] for key in row_of]
    assert held == [sys.float_info.max, -sys.float_info.max, pytest.approx(math.nan, nan_ok=True)]
    found = rows_on_server("demo", job(store, "infinite").tracking, run_dir, [(1, 1)], 60)
    assert [found[0][key] for key in row_of] == [math.inf, -math.inf, pytest.approx(math.nan, nan_ok=True)]


@pytest.mark.contract
def test_evaluations_arrive_with_their_own_step(tmp_path: Path, store: str, client: Any) -> None:
    """That before the first step comes with the first row; what is lost locally is found again without them."""
    run_dir = new_run(tmp_path / "run")
    followed = Tracker(job(store, "evaluated").tracked, run_dir)
    sets = {"validation": {"loss": 7.5, "accuracy": 0.25}, "wiki": {"loss": 8.0}}
    said = [{"prompt": "Once ", "text": "upon a time"}, {"prompt": "if", "text": ""}]
    start = {"step": 0, "attempt": 1, "time": BORN, "seconds": 1.0, "sets": sets, "samples": said}
    later = {**start, "step": 2, "sets": {"validation": {"loss": 6.5}}}
    write(run_dir, followed, [row(1, evaluations=[start]), row(2, evaluations=[later])])
    assert followed.close(60) == mlflow_delivery.Delivery(0)
    [run] = runs(client, "evaluated")
    assert history(client, run, "validation.loss") == [(0, 7.5), (2, 6.5)]
    assert history(client, run, "validation.accuracy") == [(0, 0.25)]
    assert history(client, run, "wiki.loss") == [(0, 8.0)]
    texts = [Path(each.path).name for each in client.list_artifacts(run.info.run_id, "samples")]
    assert texts == ["step-00000000.txt", "step-00000002.txt"]
    told = Path(client.download_artifacts(run.info.run_id, f"samples/{texts[0]}")).read_text()
    assert told == "Once \n=> upon a time\n\nif\n=> \n"
    lost = mlflow_delivery.rows_on_server(
        (asked := job(store, "evaluated")).name, asked.tracking, run_dir, [(1, 2)], 60
    )
    assert [(r["step"], "validation.loss" in r) for r in lost] == [(1, False), (2, False)]


def test_evaluations_beside_a_run_arrive_when_they_are_there(tmp_path: Path, store: str, client: Any) -> None:
    """After the rows of later steps, once each though a second controller tells of all of them again; and the totals
    have them too."""
    run_dir = new_run(tmp_path / "run")
    found = job(store, "beside").model_dump(mode="json")
    found["data"]["validation"], found["evaluate"] = {"share": 0.1}, {"where": "beside"}
    spec = parse(found)
    for controller, steps in enumerate([(0, 2), (4,)]):
        followed = Tracker(spec.tracked, run_dir)
        write(run_dir, followed, [row(3 * controller + n) for n in (1, 2, 3)])
        for step in steps:
            sets = {"validation": {"loss": 7.0 - step}}
            beside = {"step": step, "attempt": 1, "time": BORN + step, "seconds": 1.5, "sets": sets}
            run_dir.append("evals.jsonl", [beside])
            followed.evaluated()
        assert followed.close(60) == mlflow_delivery.Delivery(0)
    [run] = runs(client, "beside")
    assert history(client, run, "validation.loss") == [(0, 7.0), (2, 5.0), (4, 3.0)]
    totals = totals_of(run_dir)
    assert [evaluation["step"] for evaluation in totals.evaluations] == [4, 2, 0]
    assert totals.beside_seconds == 4.5


def test_a_controller_killed_goes_on_after_the_last_step(tmp_path: Path, store: str, client: Any) -> None:
    run_dir = new_run(tmp_path / "run")
    first = Tracker(job(store, "killed").tracked, run_dir)
    write(run_dir, first, [row(1), row(2), row(3)])
    assert first.close(60).missing == 0
    run_dir.append("metrics.jsonl", [row(4)])  # written, and killed before the tracker was told
    longer = job(store, "killed", train={"steps": 9, "global_batch": 4})
    second = Tracker(longer.tracked, run_dir)
    write(run_dir, second, [row(3, 2), row(4, 2), row(5, 2)])  # rolled back to step 2
    second.status("FAILED")
    assert second.close(60) == mlflow_delivery.Delivery(0)
    [run] = runs(client, "killed")
    assert history(client, run) == [(s, 10 / s) for s in (1, 2, 3, 4, 5)]
    assert [attempt for _, attempt in json.loads(run.data.tags["orchestrator.attempts"])] == [1, 2]
    assert run.info.status == "FAILED"
    assert run.data.params["train.steps"] == "5", "MLflow keeps the first value of a parameter"


def test_steps_trained_again_on_other_samples_are_logged_again(
    tmp_path: Path, store: str, client: Any
) -> None:
    """As after the second retry of an instability; the one controller is told of them, and another reads them."""
    run_dir = new_run(tmp_path / "run")
    first = Tracker(job(store, "unstable").tracked, run_dir)
    write(run_dir, first, [row(step, samples=f"first {step}") for step in (1, 2, 3)])
    end = time.monotonic() + 60
    while first._last < 3 and time.monotonic() < end:
        time.sleep(0.05)
    run_dir.log("metrics.jsonl").cut(2)
    write(run_dir, first, [row(3, samples="second 3", loss=30.0, time=BORN + 60)])
    assert first.close(60).missing == 0
    run_dir.log("metrics.jsonl").cut(1)
    again = [
        row(step, samples=f"third {step}", loss=10.0 * step, time=BORN + 90 + step) for step in (2, 3, 4)
    ]
    run_dir.append("metrics.jsonl", again)
    assert deliver(job(store, "unstable").tracked, run_dir).missing == 0
    [run] = runs(client, "unstable")
    logged = client.get_metric_history(run.info.run_id, "loss")
    ordered = [(each.step, each.value) for each in sorted(logged, key=lambda each: each.timestamp)]
    assert ordered == [(1, 10.0), (2, 5.0), (3, 10 / 3), (3, 30.0), (2, 20.0), (3, 30.0), (4, 40.0)]
    tracking = job(store, "unstable").tracking
    found = rows_on_server("demo", tracking, run_dir, [(1, 4)], 60)
    assert [row["loss"] for row in found] == [10.0, 20.0, 30.0, 40.0]


def test_a_directory_used_anew_is_another_run(tmp_path: Path, store: str, client: Any) -> None:
    for born in (BORN, BORN + 1000):
        run_dir = new_run(tmp_path / f"{born}", born)
        run_dir.uri = str(tmp_path / "it's the same")
        run_dir.append("metrics.jsonl", [row(1)])
        assert deliver(job(store, "anew").tracked, run_dir) == mlflow_delivery.Delivery(0)
    assert [len(history(client, run)) for run in runs(client, "anew")] == [1, 1]


def test_an_extended_run_is_another_one_with_all_its_rows(tmp_path: Path, store: str, client: Any) -> None:
    """What was logged of steps that are computed again, and of parameters, cannot be replaced."""
    run_dir = new_run(tmp_path / "run")
    run_dir.append("metrics.jsonl", [row(1), row(2), row(3)])
    assert deliver(job(store, "extended").tracked, run_dir).missing == 0
    extended = {
        "time": BORN + 99,
        "phase": "prepare",
        "attempt": 1,
        "extended": {"before": 5, "after": 9, "settled": 1, "step": 1},
    }
    run_dir.append("events.jsonl", [extended])
    run_dir.log("metrics.jsonl").cut(1)
    run_dir.append("metrics.jsonl", [row(2, attempt=2, loss=7.0)])
    longer = job(store, "extended", train={"steps": 9, "global_batch": 4})
    for _ in range(2):
        assert deliver(longer.tracked, run_dir).missing == 0
    after, before = runs(client, "extended")
    assert [run.data.params["train.steps"] for run in (before, after)] == ["5", "9"]
    assert history(client, before) == [(1, 10.0), (2, 5.0), (3, 10 / 3)]
    assert history(client, after) == [(1, 10.0), (2, 7.0)]


def test_deliver_brings_what_is_missing_and_nothing_twice(tmp_path: Path, store: str, client: Any) -> None:
    run_dir = new_run(tmp_path / "run")
    run_dir.append("metrics.jsonl", [row(s, **{f"m{i}": float(i) for i in range(400)}) for s in range(1, 8)])
    run_dir.append("events.jsonl", [{"time": BORN + 99, "phase": "stopped", "attempt": 1}])
    for _ in range(2):
        assert deliver(job(store, "deliver").tracked, run_dir) == mlflow_delivery.Delivery(0)
    [run] = runs(client, "deliver")
    assert history(client, run, "m399") == [(s, 399.0) for s in range(1, 8)]
    assert run.info.status == "KILLED"


def test_more_rows_than_memory_holds_come_from_the_run_directory(
    tmp_path: Path, store: str, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_delivery, "PENDING_ROWS", 10)
    run_dir = new_run(tmp_path / "run")
    followed = Tracker(job(store, "many").tracked, run_dir)
    for step in range(1, 101):
        write(run_dir, followed, [row(step)])
        assert len(followed._rows) <= 10
        if step == 50:
            time.sleep(2.5)  # delivered so far, and so no longer behind
    assert followed.close(60) == mlflow_delivery.Delivery(0)
    [run] = runs(client, "many")
    assert [s for s, _ in history(client, run)] == list(range(1, 101))


def test_a_dead_server_neither_blocks_nor_raises(tmp_path: Path, mute: str) -> None:
    run_dir = new_run(tmp_path / "run")
    began = time.monotonic()
    followed = Tracker(job(mute, "dead").tracked, run_dir)
    for step in range(1, 51):
        write(run_dir, followed, [row(step)])
    followed.document("plan.json")
    followed.status("FINISHED")
    assert time.monotonic() - began < 30
    found = followed.close(1)
    assert time.monotonic() - began < 45
    assert found.missing == 50
    assert found.problem
    assert "hunter2" not in found.problem
    assert (
        mlflow_delivery.rows_on_server(
            (asked := job(mute, "dead")).name, asked.tracking, run_dir, [(1, 50)], 1.0
        )
        == []
    )
    assert time.monotonic() - began < 60


def test_a_refused_connection_is_told(tmp_path: Path, client: Any) -> None:
    run_dir = new_run(tmp_path / "run")
    run_dir.append("metrics.jsonl", [row(s) for s in (1, 2, 3)])
    found = deliver(job("http://127.0.0.1:9", "refused").tracked, run_dir, timeout=2)
    assert found.missing == 3, "of rows written by an earlier controller too"
    assert found.problem == "no connection: Connection refused"


def test_without_tracking_nothing_happens(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path / "run")
    followed = Tracker(job("x", "none", tracking=None).tracked, run_dir)
    write(run_dir, followed, [row(1)])
    assert followed.close(10) == mlflow_delivery.Delivery(0)


def test_flatten_names_every_leaf() -> None:
    nested = {"a": {"b": 1, "c": [2, {"d": None}]}, "e": {}, "f": []}
    assert dict(mlflow_run.flatten(nested)) == {"a.b": 1, "a.c.0": 2, "a.c.1.d": None, "e": {}, "f": []}


def test_readings_of_nodes_are_system_metrics_of_each_and_arrive_once(
    tmp_path: Path, store: str, client: Any
) -> None:
    """By the names that MLflow's own page groups; those that another controller has sent are not sent again."""
    run_dir, spec = new_run(tmp_path / "run"), job(store, "nodes")

    def reading(number: int) -> dict[str, Any]:
        values = {"cpu_utilization_percentage": float(number), "interval_seconds": 5.0}
        of = {"attempt": 1, "step": number // 2, "node": f"10.0.0.{number % 2}", "values": values}
        return {"number": number, "time": BORN + number, **of}

    run_dir.append("nodes.jsonl", [reading(number) for number in range(1, 1801)])
    first = Tracker(spec.tracked, run_dir)
    assert first.close(60) == mlflow_delivery.Delivery(0)
    run_dir.append("nodes.jsonl", [reading(1801), reading(1802)])
    second = Tracker(spec.tracked, run_dir)
    run_dir.append("nodes.jsonl", [reading(1803)])
    second.nodes()
    assert second.close(60) == mlflow_delivery.Delivery(0)
    [run] = runs(client, "nodes")
    assert run.data.tags["orchestrator.last_node_row"] == "1803"
    for node in (0, 1):
        key = f"system/10.0.0.{node}/cpu_utilization_percentage"
        found = [m.value for m in client.get_metric_history(run.info.run_id, key)]
        assert found == [float(number) for number in range(1, 1804) if number % 2 == node]
    assert len(run.data.metrics) == 2
