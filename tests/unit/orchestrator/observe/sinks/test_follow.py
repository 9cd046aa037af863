"""Rows and events for TensorBoard, Weights & Biases and OpenTelemetry, as each of them reads them back."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, dump, parse
from orchestrator.observe.sinks import check as sinks_check
from orchestrator.observe.sinks import follow
from orchestrator.observe.sinks.check import check_sinks
from orchestrator.observe.sinks.follow import Followed, sinks_of
from orchestrator.observe.sinks.sink_process import SinkProcess
from orchestrator.storage.run_directory import RunDir

BORN = 1_700_000_000.0


class Collector(BaseHTTPRequestHandler):
    """Takes spans, and refuses as often as `refusals` says."""

    bodies: list[bytes] = []  # noqa: RUF012
    refusals = 0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        refused = Collector.refusals > 0
        Collector.refusals -= refused
        if not refused:
            Collector.bodies.append(body)
        self.send_response(400 if refused else 200)
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        """Nothing is printed."""


@pytest.fixture
def collector() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Collector)
    Collector.bodies.clear()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    server.shutdown()
    server.server_close()


def job(**sinks: Any) -> JobSpec:
    return parse(
        {
            "name": "demo",
            "workload": {"model": "gpt-tiny"},
            "data": {"sources": [{"uri": "x.txt"}], "tokenizer": "t.json", "sequence_length": 64},
            "train": {"steps": 50, "global_batch": 4},
            "sinks": sinks,
        }
    )


def new_run(folder: Path) -> RunDir:
    run = RunDir(str(folder / "run"))
    run.create()
    return run


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "attempt": 1, "time": BORN + step, "step_seconds": 0.5, "loss": 9.0 - step, **more}


def event(number: int, phase: str, at: float, **more: Any) -> dict[str, Any]:
    return {
        "number": number,
        "time": BORN + at,
        "attempt": 1,
        "step": 0,
        "phase": phase,
        "reason": "r",
        **more,
    }


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(e.step, round(e.value, 4)) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_reads_each_step_once_whoever_was_killed(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.append("events.jsonl", [event(1, "prepare", 0)])
    evaluation = {"step": 2, "attempt": 1, "time": BORN, "sets": {"validation": {"loss": 3.5}}}
    run.append("metrics.jsonl", [row(1), row(2, evaluations=[evaluation]), row(3)])
    [first] = sinks_of((asked := job(tensorboard=True)).name, asked.sinks, asked.model_dump(mode="json"), run)
    first.update(run, False)
    run.append("metrics.jsonl", [row(3, loss=77.0), row(4)])  # after a return to a commit
    first.update(run, False)
    newest = max((tmp_path / "run" / "tensorboard").iterdir())
    newest.write_bytes(newest.read_bytes()[:-3])  # a kill in the middle of step 4
    [second] = sinks_of(
        (asked := job(tensorboard=True)).name, asked.sinks, asked.model_dump(mode="json"), run
    )
    second.update(run, True)
    found = scalars(tmp_path / "run" / "tensorboard")
    assert found["loss"] == [(1, 8.0), (2, 7.0), (3, 6.0), (4, 5.0)]
    assert found["validation/loss"] == [(2, 3.5)]
    assert "attempt" not in found


def test_tensorboard_forgets_steps_that_were_trained_again_on_other_samples(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.append("events.jsonl", [event(1, "prepare", 0)])
    run.append("metrics.jsonl", [row(step, samples=f"first {step}") for step in (1, 2, 3)])
    [sink] = sinks_of((asked := job(tensorboard=True)).name, asked.sinks, asked.model_dump(mode="json"), run)
    sink.update(run, False)
    run.log("metrics.jsonl").cut(1)  # the second retry of an instability leaves out what step 2 had used
    run.append("metrics.jsonl", [row(step, samples=f"other {step}", loss=5.0) for step in (2, 3, 4)])
    sink.update(run, False)
    sink.update(run, True)
    assert scalars(tmp_path / "run" / "tensorboard")["loss"] == [(1, 8.0), (2, 5.0), (3, 5.0), (4, 5.0)]


def test_spans_of_phases_are_sent_once_and_again_when_they_were_refused(
    tmp_path: Path, collector: str
) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    run = new_run(tmp_path)
    told = [event(1, "prepare", 0), event(2, "start", 5), event(3, "train", 6)]
    run.append("events.jsonl", told)
    spec = job(opentelemetry={"endpoint": collector})
    [first] = sinks_of(spec.name, spec.sinks, spec.model_dump(mode="json"), run)
    Collector.refusals = 1
    first.update(run, True)
    assert first.failed
    assert not Collector.bodies
    first.update(run, True)
    fault = {"first_fault": "rank 1 was killed; password=hunter2"}
    run.append("events.jsonl", [event(4, "stop", 9, **fault), event(5, "failed", 12)])
    [second] = sinks_of(spec.name, spec.sinks, spec.model_dump(mode="json"), run)  # another controller
    second.update(run, True)
    spans = [
        span
        for body in Collector.bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    seconds = [(s.name, (s.end_time_unix_nano - s.start_time_unix_nano) / 1e9) for s in spans]
    assert seconds == [("prepare", 5.0), ("start", 1.0), ("train", 3.0), ("stop", 3.0), ("demo", 12.0)]
    assert len({span.trace_id for span in spans}) == 1
    assert {span.parent_span_id for span in spans[:-1]} == {spans[-1].span_id}
    assert [span.status.code for span in spans] == [0, 0, 0, 2, 2]
    assert "hunter2" not in str(spans)


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Of an offline run's file: LevelDB's log format, blocks of 32 KiB, behind a header of 7 bytes."""
    at, block, held = 7, 1 << 15, b""
    while at + 7 <= len(content):
        if block - at % block < 7:  # no room for a header: the rest of the block is empty
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        held += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield held
            held = b""


@pytest.mark.slow
def test_weights_and_biases_has_each_step_once(tmp_path: Path) -> None:
    """Offline: what `wandb sync` would send."""
    from wandb.proto.wandb_internal_pb2 import Record

    run = new_run(tmp_path)
    run.append("events.jsonl", [event(1, "prepare", 0)])
    run.append("metrics.jsonl", [row(step) for step in range(1, 11)])
    spec = job(wandb={"project": "p", "mode": "offline"})
    for last in (10, 12):  # by one controller after another
        [sink] = sinks_of(spec.name, spec.sinks, spec.model_dump(mode="json"), run)
        run.append("metrics.jsonl", [row(step) for step in range(11, last + 1)])
        sink.update(run, True)
        assert not sink.failed
    kinds: list[str] = []
    end = time.monotonic() + 60
    while (
        kinds.count("exit") < 2 and time.monotonic() < end
    ):  # its process writes behind the call that finishes
        paths = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
        records = [Record.FromString(data) for path in paths for data in wandb_records(path.read_bytes())]
        kinds = [record.WhichOneof("record_type") for record in records]
        time.sleep(0.1)
    steps = [record.history.step.num for record in records if record.WhichOneof("record_type") == "history"]
    assert steps == list(range(1, 13))


def test_a_sink_that_fails_is_told_of_and_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Any:
        raise RuntimeError("refused, password=hunter2")

    sink, run = Followed("wandb", broken), new_run(tmp_path)
    sink.update(run, False)
    sink.update(run, False)
    assert capsys.readouterr().out == "wandb: RuntimeError: refused, password=***\n"


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_sinks(job(tensorboard=True, opentelemetry={"endpoint": "http://c:4318/v1/traces"}).sinks)
    monkeypatch.setattr(sinks_check, "find_spec", lambda library: None)
    with pytest.raises(InputError, match=r"sinks.wandb.*needs the library wandb.*\[sinks\]"):
        check_sinks(job(wandb={"project": "p"}).sinks)
    with pytest.raises(InputError, match="not an http or https URL"):
        job(opentelemetry={"endpoint": "collector:4317"})
    check_sinks(job().sinks)


@pytest.mark.slow
def test_the_process_delivers_what_is_left_when_the_run_ends(
    tmp_path: Path, collector: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, spec = new_run(tmp_path), job(tensorboard=True, opentelemetry={"endpoint": collector})
    run.write_text("job.yaml", dump(spec))
    run.append("events.jsonl", [event(1, "prepare", 0)])
    Collector.refusals = 1
    with caplog.at_level("INFO", "orchestrator"):
        process = SinkProcess(spec.sinks, run)
        run.append("metrics.jsonl", [row(step) for step in range(1, 2501)])
        run.append("events.jsonl", [event(2, "done", 9)])
        process.close()
    assert [step for step, _ in scalars(tmp_path / "run" / "tensorboard")["loss"]] == list(range(1, 2501))
    assert len(Collector.bodies) == 1
    assert "sinks: opentelemetry: OSError: the collector has not taken the spans" in caplog.text


def test_a_run_whose_first_event_is_on_its_way_has_its_sinks_a_moment_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path)
    run.write_text("job.yaml", dump(job(tensorboard=True)))
    assert follow._begun(run) is None
    assert "the run is not read yet" in capsys.readouterr().out
    run.append("events.jsonl", [event(1, "prepare", 0)])
    assert [each._name for each in follow._begun(run) or ()] == ["tensorboard"]


@pytest.mark.slow
def test_an_own_sink_that_is_not_found_costs_the_run_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The process says so; the controller goes on."""
    run = new_run(tmp_path)
    spec = job(own=["there_is_no_such_module:Sink"])
    with pytest.raises(InputError, match=r"sinks\.own: there is no module there_is_no_such_module"):
        check_sinks(spec.sinks)
    run.write_text("job.yaml", dump(spec))
    run.append("events.jsonl", [event(1, "prepare", 0.0)])
    with caplog.at_level("INFO", logger="orchestrator.sinks"):
        process = SinkProcess(spec.sinks, run)
        process.close()
    assert "there is no module there_is_no_such_module" in caplog.text
