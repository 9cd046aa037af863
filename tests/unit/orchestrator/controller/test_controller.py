"""The life of a run, with a gang that follows a script in place of one that trains."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_gang import Attempt, FakeGang
from jobs import curve, job, rows, wait_for, write_text
from prepared import prepare_here
from scripted import ControllerKilled, RemoteTask, SnapshotServers, Training, fake_cluster

from cluster.jobs.admission import Admission
from cluster.workers.gang import GangStatus
from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, load, parse
from orchestrator.controller import background_export as exports
from orchestrator.controller import controller as controllers
from orchestrator.controller import decide, run_history
from orchestrator.controller import events as history
from orchestrator.controller.controller import Controller
from orchestrator.evaluate.config import EvaluateSpec
from orchestrator.evaluate.on_tasks import evaluate_commit_on_tasks
from orchestrator.export import hugging_face as export
from orchestrator.planner import machines
from orchestrator.storage.row_files import SingleRowFile
from orchestrator.storage.run_directory import RunDir

QUIET = ["prepare", "wait", "start", "train", "stop", "done"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A text and the cache that holds it prepared for the job of `jobs.job`."""
    folder = tmp_path_factory.mktemp("shards")
    text = write_text(folder, 20_000)
    prepare_here(parse(job(text)), str(folder / "cache"))
    return text, str(folder / "cache")


@dataclass
class Runs:
    """Starts controllers of one run directory; a place that has room for `capacity` workers."""

    text: str
    cache: str
    run: RunDir
    training: Training = field(default_factory=Training)
    capacity: Callable[[], int] = lambda: 2
    refusals: list[str] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    tasks: list[RemoteTask] = field(default_factory=list)
    services: list[SnapshotServers] = field(default_factory=list)
    wants: list[int] = field(default_factory=list)
    machine: str = ""
    looks: int = 1
    export: Callable[[int, str], dict[str, Any]] = lambda step, target: {
        "uri": target, "step": step, "logits_difference": 0.0, "sample": "once upon",
    }  # fmt: skip
    evaluate: Callable[[int, list[str]], dict[str, Any]] = lambda step, paths: {
        "step": step, "attempt": 0, "time": 1e9, "seconds": 2.0, "sets": {"quiz": {"acc": 0.25, "examples": 8.0}},
    }  # fmt: skip

    def job(self, **changes: Any) -> JobSpec:
        document = job(self.text)
        document["data"]["cache"] = self.cache
        return parse(document | changes)

    def controller(
        self,
        spec: JobSpec | None = None,
        until: int | None = None,
        faults: tuple[str, ...] = (),
        queue: Any = None,
        died: bool = False,
    ) -> Controller:
        def gang() -> FakeGang:
            return FakeGang(lambda attempt: self.training(attempt), self.refusals, lambda: self.capacity())

        def run_task(*call: Any, **_: Any) -> RemoteTask:
            self.calls.append(call)
            answer = self.export if call[0] in (export.export, exports.export_commit) else self.evaluate
            self.tasks.append(RemoteTask(lambda: answer(call[2], call[3]), self.looks))
            return self.tasks[-1]

        def services(target: str, token: str) -> SnapshotServers:
            self.services.append(SnapshotServers(target, token))
            return self.services[-1]

        def machines(nodes: Sequence[str]) -> list[dict[str, str]]:
            return [{"node": node, "machine": self.machine, "market": "spot", "zone": "a"} for node in nodes]

        cluster = dataclasses.replace(
            fake_cluster(gang, run_task, services),
            request_workers=lambda bundle, workers: self.wants.append(workers),
            machines=machines,
        )
        return Controller(spec or self.job(), self.run, until, cluster, faults, queue, died)

    @property
    def path(self) -> Path:
        return Path(self.run.path)

    def events(self, phase: str | None = None) -> list[dict[str, Any]]:
        return [event for event in rows(self.path, "events.jsonl") if phase in (None, event["phase"])]

    def phases(self) -> list[str]:
        return [event["phase"] for event in self.events()]

    def commits(self) -> list[int]:
        return Store(self.run.at("checkpoints")).steps()


@pytest.fixture
def runs(tmp_path: Path, shards: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """No waiting between looks, no measuring of this machine; at the end no gang is left."""
    monkeypatch.setattr(machines, "probe", lambda cpu: 1e10)
    monkeypatch.setattr(controllers, "POLL", 0.0)
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    run = RunDir(str(tmp_path / "runs" / "small"))
    run.create()
    found = Runs(*shards, run)
    yield found
    assert [gang for gang in found.training.gangs if gang.running] == []
    assert [holders for holders in found.services if holders.running] == []


@pytest.fixture(scope="module")
def quiet_curve(shards: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Step, loss, gradient norm and receipt of a run that nothing disturbs."""
    run = RunDir(str(tmp_path_factory.mktemp("quiet")))
    Runs(*shards, run).controller().drive()
    return curve(Path(run.path))


# -- to the end


def test_a_run_from_data_to_summary(runs: Runs) -> None:
    summary = runs.controller().drive()
    assert runs.phases() == QUIET
    assert [row["step"] for row in rows(runs.path)] == list(range(1, 13))
    assert runs.commits() == [4, 8, 12]
    assert (summary["state"], summary["step"], summary["attempts"]) == ("done", 12, 1)
    assert summary["reason"] == "12 steps are done"
    assert summary["receipt"] == rows(runs.path)[-1]["samples"]
    assert summary["commit"] == 12
    assert runs.run.read_json("summary.json") == summary
    assert load(runs.path / "job.yaml") == runs.job()
    names = {path.name for path in runs.path.iterdir()}
    assert names == {
        "job.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "status.json", "summary.json", "report.html",
        "checkpoints", "excerpt", "logs",
    }  # fmt: skip


def test_a_gang_is_told_all_that_it_needs(runs: Runs) -> None:
    runs.controller(faults=("kill@1:99",)).drive()
    (gang,) = runs.training.gangs
    assert gang.world == 2
    assert gang.config["job"] == runs.job().model_dump(mode="json")
    assert gang.config["layout"]["dp"] == 2
    assert gang.config["run"] == runs.run.uri
    assert (gang.config["attempt"], gang.config["restore"], gang.config["until"]) == (1, None, 12)
    assert gang.config["faults"] == ("kill@1:99",)
    assert gang.config["commit"] is True
    assert Path(gang.config["data"]).parent == Path(runs.cache)


def test_sets_of_held_out_text_are_handed_to_every_gang(runs: Runs) -> None:
    """By the events, by the newest commit where events are lost, and from the cache where it is now."""
    (runs.path / "wiki.txt").write_text("Some words.\n<|endoftext|>\n" * 40)
    spec = runs.job(evaluate={"sets": {"wiki": {"sources": [{"uri": str(runs.path / "wiki.txt")}]}}})
    prepare_here(spec, runs.cache)
    runs.controller(spec, until=4, faults=("kill@1:3",)).drive()
    (runs.path / "wiki.txt").unlink()  # what is prepared is enough
    runs.controller(spec, until=8).drive()
    (waited, *_) = runs.events("wait")
    assert list(waited["sets"]) == ["wiki"]
    assert Path(waited["sets"]["wiki"]).parent == Path(runs.cache)
    assert [gang.config["sets"] for gang in runs.training.gangs] == [waited["sets"]] * 3
    (runs.path / "events.jsonl").unlink()
    store = Store(runs.run.at("checkpoints"))
    assert store.manifest(8).meta["sets"] == waited["sets"]
    runs.controller(spec).drive()
    assert runs.training.gangs[-1].config["sets"] == waited["sets"]


def test_text_that_is_both_trained_on_and_held_out_is_told(runs: Runs) -> None:
    spec = runs.job(evaluate={"sets": {"same": {"sources": [{"uri": runs.text}]}}})
    prepare_here(spec, runs.cache)
    runs.controller(spec).drive()
    told = [event["reason"] for event in runs.events("prepare")]
    assert re.fullmatch(r"(\d+) of the \1 documents of the set same are also in the training text", told[-1])


def test_a_share_that_holds_out_nothing_starts_no_gang(runs: Runs) -> None:
    spec = runs.job()
    data = {**spec.data.model_dump(mode="json"), "validation": {"share": 1e-9}}
    with pytest.raises(InputError, match=r"data\.validation\.share: 1e-09 holds out none of \d+ document"):
        runs.controller(runs.job(data=data)).drive()
    assert runs.training.gangs == []
    assert not (runs.path / "events.jsonl").exists()


def test_the_plan_stands_in_the_run_directory(runs: Runs) -> None:
    runs.controller().drive()
    plan = runs.run.read_json("plan.json")
    assert (plan["attempt"], plan["chosen"]["dp"]) == (1, 2)
    assert plan["chosen"]["text"] == rows(runs.path)[0]["layout"]


def test_an_export_is_made_in_another_process(runs: Runs) -> None:
    document = runs.job().model_dump(mode="json")
    document["checkpoint"]["export"] = "hf"
    summary = runs.controller(parse(document)).drive()
    assert runs.calls == [(export.export, runs.run.uri, 12, runs.run.at("export"), False)]
    assert runs.phases() == [*QUIET[:-1], "export", "done"]
    assert summary["sample"] == "once upon"
    assert summary["export"]["step"] == 12


def exporting(runs: Runs, **checkpoint: Any) -> JobSpec:
    """The job with an export, and what else is asked of checkpoints."""
    return runs.job(checkpoint={"every": 4, "export": "hf", **checkpoint})


def test_an_export_may_go_elsewhere(runs: Runs) -> None:
    runs.controller(exporting(runs, export_to="s3://models/small")).drive()
    assert [call[3] for call in runs.calls] == ["s3://models/small"]


@pytest.mark.parametrize(("looks", "exported"), [(0, [4, 8, 12]), (1, [4, 12]), (9, [4, 12])])
def test_commits_may_be_exported_beside_training(runs: Runs, looks: int, exported: list[int]) -> None:
    """One at a time: what is committed while an export is under way is left out, but for the last."""
    runs.looks = looks
    summary = runs.controller(exporting(runs, export_at="commit")).drive()
    assert [call[2] for call in runs.calls] == exported
    assert summary["export"]["step"] == 12
    assert runs.phases() == [*QUIET[:-1], "export", "done"]


def test_a_stop_is_heard_during_an_export_and_the_same_command_exports_later(runs: Runs) -> None:
    runs.looks = 10**9
    controller = runs.controller(exporting(runs))
    with ThreadPoolExecutor(1) as pool:
        driven = pool.submit(controller.drive)
        wait_for(lambda: runs.calls, "the export")
        controller.request_stop("stopped by the user")
        summary = driven.result(timeout=60)
    assert (summary["state"], summary["commit"], summary["export"]) == ("stopped", 12, None)
    assert summary["reason"] == "stopped by the user; the model is not exported: the same command exports it"
    assert [run_task.cancelled for run_task in runs.tasks] == [True]
    runs.looks = 1
    summary = runs.controller(exporting(runs)).drive()
    assert (summary["state"], summary["step"], summary["export"]["step"]) == ("done", 12, 12)


def test_an_export_that_does_not_end_is_ended(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "LONGEST", 0.05)
    runs.looks = 10**9
    summary = runs.controller(exporting(runs)).drive()
    assert (summary["state"], summary["commit"], summary["problem"]) == ("failed", 12, summary["reason"])
    assert "the export failed: TimeoutError: it was not done after 0 s" in summary["reason"]
    assert [run_task.cancelled for run_task in runs.tasks] == [True]


def test_tasks_are_evaluated_once_after_the_export(runs: Runs) -> None:
    """Of the model that is exported; their row is in an event, the summary and the report."""
    spec = exporting(runs).model_copy(update={"evaluate": EvaluateSpec(tasks=["quiz.yaml"])})
    summary = runs.controller(spec).drive()
    wanted = (evaluate_commit_on_tasks, runs.run.uri, 12, ["quiz.yaml"], False)
    assert [call[0] for call in runs.calls] == [export.export, evaluate_commit_on_tasks]
    assert runs.calls[1] == wanted
    assert runs.phases() == [*QUIET[:-1], "export", "export", "done"]
    assert runs.events("export")[-1]["reason"] == "tasks at step 12: quiz acc 0.25"
    row = runs.events("export")[-1]["tasks"]
    assert (row["step"], row["attempt"], row["sets"]) == (12, 1, {"quiz": {"acc": 0.25, "examples": 8.0}})
    assert summary["tasks"]["sets"] == row["sets"]
    assert (summary["state"], summary["evaluation"]) == ("done", None)
    page = (runs.path / "report.html").read_text()
    assert "<h2>Tasks" in page
    assert "<td>quiz</td><td>acc</td>" in page


def test_tasks_that_cannot_be_evaluated_take_nothing_from_the_run(runs: Runs) -> None:
    def evaluate(step: int, paths: list[str]) -> dict[str, Any]:
        raise InputError("there is no such task file", paths[0])

    runs.evaluate = evaluate
    document = runs.job(checkpoint={"every": 4, "export": None})
    spec = document.model_copy(update={"evaluate": EvaluateSpec(tasks=["quiz.yaml"])})
    summary = runs.controller(spec).drive()
    assert (summary["state"], summary["tasks"]) == ("done", None)
    assert (
        runs.events("export")[-1]["reason"]
        == "the tasks were not evaluated: InputError: quiz.yaml: there is no such task file"
    )


def test_no_export_is_made_that_nobody_asked_for(runs: Runs) -> None:
    runs.controller(runs.job(checkpoint={"every": 4, "export": None})).drive()
    assert runs.calls == []


def failing_at(*steps: int) -> Callable[[int, str], dict[str, Any]]:
    def export(step: int, target: str) -> dict[str, Any]:
        if step in steps:
            raise RuntimeError(f"the logits of step {step}\ndiffer")
        return {"uri": target, "step": step}

    return export


def test_an_export_that_fails_beside_training_only_tells(runs: Runs) -> None:
    runs.export = failing_at(4)
    summary = runs.controller(exporting(runs, export_at="commit")).drive()
    assert (summary["state"], summary["export"]["step"]) == ("done", 12)
    assert "the export of step 4 failed: RuntimeError: the logits of step 4 differ" in [
        event["reason"] for event in runs.events("train")
    ]


def test_the_last_export_is_the_run_s(runs: Runs) -> None:
    runs.export = failing_at(12)
    summary = runs.controller(exporting(runs)).drive()
    assert summary["state"] == "failed"
    assert "the export failed: RuntimeError: the logits of step 12" in summary["reason"]
    assert 12 in runs.commits()


def test_a_save_that_fails_is_told_and_training_goes_on(runs: Runs, quiet_curve: list[Any]) -> None:
    """Asked for in ray#55350."""
    runs.training = Training(failing=frozenset({4}))
    summary = runs.controller(faults=("kill@0:7",)).drive()
    assert summary["state"] == "done"
    assert "the save at step 4 failed: OSError: the disk is full" in [
        event["reason"] for event in runs.events("train")
    ]
    assert runs.training.gangs[1].config["restore"] is None
    assert curve(runs.path) == quiet_curve


def test_saving_that_resumes_is_told(runs: Runs) -> None:
    runs.training = Training(failing=frozenset({4, 8}))
    runs.controller().drive()
    told = [event["reason"] for event in runs.events("train")]
    assert told[-3:] == [
        "the save at step 4 failed: OSError: the disk is full",
        "the save at step 8 failed: OSError: the disk is full",
        "saving resumes with the commit at step 12",
    ]


def test_saves_that_fail_for_too_long_stop_the_run(runs: Runs) -> None:
    runs.training = Training(failing=frozenset(range(5, 13)))
    summary = runs.controller(runs.job(limits={"unsaved": 1e-6})).drive()
    assert (summary["state"], summary["commit"]) == ("stopped", 4)
    assert summary["reason"].startswith("limits.unsaved is reached: every save has failed for")
    assert summary["reason"].endswith("s, the last one: OSError: the disk is full")


def test_a_status_that_cannot_be_written_stops_nothing(
    runs: Runs, quiet_curve: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do rows that are refused: they wait."""
    plain = SingleRowFile.append

    def append(tape: SingleRowFile, added: bytes) -> int:
        if b'"loss"' in added and not full.pop():
            raise OSError(28, "No space left on device")
        return plain(tape, added)

    def write_json(run: RunDir, name: str, value: Any) -> None:
        if name in ("status.json", "plan.json"):
            raise OSError(28, "No space left on device")
        run.write_text(name, json.dumps(value))

    full = [True] * 99 + [False] * 3
    monkeypatch.setattr(SingleRowFile, "append", append)
    monkeypatch.setattr(RunDir, "write_json", write_json)
    assert runs.controller().drive()["state"] == "done"
    assert curve(runs.path) == quiet_curve
    assert len(full) <= 98  # refused three times, and then taken


def test_a_run_that_was_stopped_is_not_exported(runs: Runs) -> None:
    document = runs.job().model_dump(mode="json")
    document["checkpoint"]["export"] = "hf"
    runs.controller(parse(document), until=5).drive()
    assert runs.calls == []


def test_data_that_does_not_suit_starts_no_gang(runs: Runs) -> None:
    document = runs.job().model_dump(mode="json")
    document["data"]["sequence_length"] = 100_000
    document["workload"]["changes"]["max_positions"] = 100_000
    with pytest.raises(InputError):
        runs.controller(parse(document)).drive()
    assert runs.training.gangs == []


# -- faults


def test_a_death_costs_only_what_is_beyond_the_commit(runs: Runs, quiet_curve: list[Any]) -> None:
    summary = runs.controller(faults=("kill@1:7",)).drive()
    assert summary["state"] == "done"
    assert runs.phases() == [*QUIET[:-1], "wait", "start", "train", "stop", "done"]
    assert curve(runs.path) == quiet_curve
    assert [row["attempt"] for row in rows(runs.path)] == [1] * 4 + [2] * 8
    first, second = runs.training.gangs
    assert (first.config["restore"], second.config["restore"]) == (None, 4)
    fault = runs.events("stop")[0]
    assert fault["first_fault"] == "rank 1 on node-0 died: killed"
    assert (fault["step"], fault["attempt"], fault["lost_steps"]) == (6, 1, 2)
    assert fault["time"] - 60 < fault["seen"] <= fault["time"]
    assert fault["seconds_lost"] == pytest.approx(2 * 0.002)
    assert runs.events("start")[1]["reason"] == "2 workers in fp32 from the commit at step 4"
    assert [one["first_fault"] for one in summary["faults"]] == [fault["first_fault"]]
    assert summary["ledger"]["lost_steps"] == 2


def test_a_death_before_any_commit_begins_anew(runs: Runs, quiet_curve: list[Any]) -> None:
    runs.controller(faults=("kill@0:3",)).drive()
    assert runs.training.gangs[1].config["restore"] is None
    assert curve(runs.path) == quiet_curve
    assert runs.events("start")[1]["reason"] == "2 workers in fp32 from the beginning"


def test_deaths_in_a_row(runs: Runs, quiet_curve: list[Any]) -> None:
    summary = runs.controller(faults=("kill@0:3", "raise@1:6/2", "kill@1:12/3")).drive()
    assert (summary["state"], summary["attempts"]) == ("done", 4)
    assert curve(runs.path) == quiet_curve
    assert [gang.config["restore"] for gang in runs.training.gangs] == [None, None, 4, 8]


def test_a_silent_rank_is_a_fault(runs: Runs, quiet_curve: list[Any]) -> None:
    runs.controller(faults=("stop@1:6",)).drive()
    assert re.search("no sign of life for 3600.[0-9] s", runs.events("stop")[0]["first_fault"])
    assert curve(runs.path) == quiet_curve


@dataclass
class LateRank(Training):
    """After step 6 of the first attempt rank 1 is silent for a minute, and then heard of again or not."""

    is_heard: bool = True

    def __call__(self, gang: Attempt) -> Iterator[GangStatus]:
        for status in super().__call__(gang):
            yield status
            if status.ranks[0].step == 6 and len(self.gangs) == 1:
                first, second = status.ranks
                late = dataclasses.replace(second, last_heartbeat=status.at - 60.0)
                yield dataclasses.replace(status, ranks=(first, late), rows=())
                while not self.is_heard:
                    yield GangStatus((first, late))


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_rank_that_is_heard_of_while_it_is_asked_is_no_fault(
    runs: Runs, is_heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a healthy rank may be silent for longer than a frozen one is waited for."""
    monkeypatch.setattr("orchestrator.controller.workers.DUMP", 1e-6)
    runs.training = LateRank(is_heard=is_heard)
    assert runs.controller().drive()["state"] == "done"
    assert len(runs.training.gangs) == 2 - is_heard
    faults = [event["first_fault"] for event in runs.events() if event.get("first_fault")]
    notes = [event["reason"] for event in runs.events("train") if "sign of life" in event["reason"]]
    assert [len(faults), len(notes)] == [1 - is_heard, is_heard]
    assert re.match("rank 1 on .*: no sign of life for 60.* s", (faults + notes)[0])
    assert is_heard == (faults + notes)[0].endswith("; then it went on")


def test_a_fault_that_repeats_ends_the_run(runs: Runs) -> None:
    summary = runs.controller(faults=("raise@1:6", "raise@1:6/2")).drive()
    assert summary["state"] == "failed"
    assert "injected at rank 1, step 6; it would repeat" in summary["reason"]
    assert runs.phases()[-2:] == ["stop", "failed"]
    assert len(runs.training.gangs) == 2


def test_a_gang_that_goes_on_elsewhere_is_narrower(runs: Runs, quiet_curve: list[Any]) -> None:
    runs.capacity = lambda: 1 if runs.training.gangs else 2
    runs.controller(faults=("kill@1:7",)).drive()
    assert [gang.world for gang in runs.training.gangs] == [2, 1]
    second = runs.events("start")[1]
    assert second["layout_before"].startswith("dp2")
    assert second["layout_after"].startswith("dp1")
    assert second["layout"]["dp"] == 1
    assert curve(runs.path) == quiet_curve


def test_no_room_is_waited_for_and_then_given_up(runs: Runs) -> None:
    runs.capacity = lambda: 0
    summary = runs.controller(runs.job(limits={"wait": 0.2})).drive()
    assert summary["state"] == "failed"
    assert "for 1 worker and there is room for 0" in summary["reason"]
    assert runs.phases() == ["prepare", "wait", "failed"]
    assert (summary["attempts"], summary["step"], summary["commit"]) == (0, 0, None)


def test_a_placement_that_fails_takes_the_same_road(runs: Runs, quiet_curve: list[Any]) -> None:
    """It counts as an attempt, and so ends some time: asked for in ray#60376."""
    runs.refusals = ["no room for 2 workers within 30 s"]
    summary = runs.controller().drive()
    assert summary["state"] == "done"
    assert runs.events("stop")[0]["first_fault"] == "no room for 2 workers within 30 s"
    assert runs.events("stop")[0]["lost_steps"] == 0
    assert [gang.config["attempt"] for gang in runs.training.gangs if gang.config] == [2]
    assert curve(runs.path) == quiet_curve


def test_a_damaged_commit_is_passed_over(runs: Runs, quiet_curve: list[Any]) -> None:
    runs.controller(until=8).drive()
    (shard,) = (runs.path / "checkpoints/step-00000008").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    summary = runs.controller().drive()
    assert summary["state"] == "done"
    assert [gang.config["restore"] for gang in runs.training.gangs] == [None, 8, 4]
    assert any("CorruptCommit: step 8" in (event["first_fault"] or "") for event in runs.events("stop"))
    assert any("a commit is passed over: step 8" in event["reason"] for event in runs.events("wait"))
    assert curve(runs.path) == quiet_curve
    assert Store(runs.run.at("checkpoints")).verify(8) == []


def test_a_commit_made_anew_where_one_was_damaged_is_restored(runs: Runs, quiet_curve: list[Any]) -> None:
    runs.controller(until=8).drive()
    (shard,) = (runs.path / "checkpoints/step-00000008").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    summary = runs.controller(faults=("kill@1:11/3",)).drive()
    assert summary["state"] == "done"
    assert [gang.config["restore"] for gang in runs.training.gangs] == [None, 8, 4, 8]
    assert curve(runs.path) == quiet_curve


def test_a_commit_without_its_manifest_never_was(runs: Runs, quiet_curve: list[Any]) -> None:
    """A save that a crash cut short: asked for in transformers#35782."""
    runs.controller(until=8).drive()
    (runs.path / "checkpoints/step-00000008/manifest.json").write_text("{")
    runs.controller().drive()
    assert [gang.config["restore"] for gang in runs.training.gangs] == [None, 4]
    (told,) = [
        event["reason"] for event in runs.events("wait") if "a commit is passed over" in event["reason"]
    ]
    assert "step-00000008: the manifest is damaged" in told
    assert curve(runs.path) == quiet_curve


# -- instability


def test_nan_leaves_out_the_samples_of_its_step(runs: Runs, quiet_curve: list[Any]) -> None:
    summary = runs.controller(faults=("nan@1:7",)).drive()
    assert summary["state"] == "done"
    first, second = runs.training.gangs
    assert first.config["skips"] == ()
    assert second.config["restore"] == 4
    window = {"step": 7, "start": 48, "count": 8, "lr_scale": 1.0}
    assert second.config["skips"] == (window,)
    (stop,) = [event for event in runs.events("stop") if event["first_fault"]]
    assert stop["skipped"] == window
    assert (stop["step"], stop["lost_steps"]) == (6, 2)
    assert stop["reason"].endswith("8 samples from position 48 are left out")
    assert curve(runs.path)[:6] == quiet_curve[:6]
    assert [row[3] for row in curve(runs.path)[6:]] != [row[3] for row in quiet_curve[6:]]
    assert Store(runs.run.at("checkpoints")).manifest(12).position == 13 * 8


def test_retries_are_bounded_and_the_first_fault_is_told(runs: Runs) -> None:
    train = {**job(runs.text)["train"], "stability": {"retries": 2, "skip": 2, "lr_scale": 0.5}}
    faults = ("nan@0:7", "nan@0:7/2", "nan@0:7/3")
    summary = runs.controller(runs.job(train=train), faults=faults).drive()
    assert summary["state"] == "failed"
    assert "NonFinite: loss is nan at step 7, samples from position 88" in summary["reason"]
    assert "train.stability.retries 2 are spent" in summary["reason"]
    assert [e["skipped"]["start"] for e in runs.events("stop") if e.get("skipped")] == [48, 40]
    more = runs.job(train={**train, "stability": {"retries": 3}})
    assert runs.controller(more).drive()["state"] == "done"
    assert Store(runs.run.at("checkpoints")).manifest(12).position == (12 + 5) * 8


def test_a_new_controller_leaves_out_the_same_samples(runs: Runs, quiet_curve: list[Any]) -> None:
    """The commit that it starts from is older than the window, and does not know of it: the events do."""
    undisturbed = RunDir(str(Path(runs.run.path).with_name("whole")))
    undisturbed.create()
    Runs(runs.text, runs.cache, undisturbed).controller(faults=("nan@0:7",)).drive()
    runs.training = Training(kill_controller_at=9, gangs=runs.training.gangs)
    with pytest.raises(ControllerKilled):
        runs.controller(faults=("nan@0:7",)).drive()
    runs.training = Training(gangs=runs.training.gangs)
    (runs.path / "checkpoints/step-00000008/manifest.json").unlink()
    assert runs.controller().drive()["state"] == "done"
    assert runs.training.gangs[-1].config["restore"] == 4
    assert curve(runs.path) == curve(Path(undisturbed.path))


# -- snapshots in memory


def snapshots(runs: Runs) -> JobSpec:
    return runs.job(checkpoint={"every": 4, "snapshot_every": 1, "export": None})


def test_a_run_without_snapshots_has_no_holders(runs: Runs) -> None:
    runs.controller().drive()
    assert [holders.running for holders in runs.services] == [[]]
    assert runs.training.gangs[0].config["snapshot_servers"] == ()


def test_a_death_costs_nothing_that_was_held_in_memory(runs: Runs, quiet_curve: list[Any]) -> None:
    summary = runs.controller(snapshots(runs), faults=("kill@1:7",)).drive()
    first, second = runs.training.gangs
    assert first.config["snapshot_servers"][0]["node"] == "node-0"
    assert first.config["token"] != second.config["token"]
    assert second.config["restore"] == 6
    assert runs.events("stop")[0]["lost_steps"] == 0
    assert curve(runs.path) == quiet_curve
    assert summary["commit"] == 12
    assert runs.commits() == [4, 8, 12]


def test_memory_that_is_gone_leaves_the_store(runs: Runs, quiet_curve: list[Any]) -> None:
    runs.training = Training(kill_controller_at=7)
    with pytest.raises(ControllerKilled):
        runs.controller(snapshots(runs)).drive()
    runs.training = Training()
    runs.controller(snapshots(runs)).drive()
    assert runs.training.gangs[0].config["restore"] == 4
    assert curve(runs.path) == quiet_curve


def test_a_run_that_failed_names_the_commit_that_lasts(runs: Runs) -> None:
    """Memory ends with the run; only what the store holds can be gone on from."""
    summary = runs.controller(snapshots(runs), faults=("raise@1:7", "raise@1:7/2")).drive()
    assert summary["state"] == "failed"
    assert summary["commit"] == 4


# -- the controller's own death


@pytest.mark.parametrize(("step", "polls"), [(1, 1), (4, 1), (6, 1), (6, 5), (12, 5), (8, 100), (12, 100)])
def test_a_killed_controller_loses_no_row(runs: Runs, quiet_curve: list[Any], step: int, polls: int) -> None:
    """Rows of committed steps that no controller has written are in the manifest."""
    runs.training = Training(polls=polls, kill_controller_at=step)
    with pytest.raises(ControllerKilled):
        runs.controller().drive()
    runs.training = Training(gangs=runs.training.gangs)
    summary = runs.controller().drive()
    assert summary["state"] == "done"
    assert curve(runs.path) == quiet_curve
    restored = runs.training.gangs[1].config["restore"]
    assert restored == (step // 4 * 4 or None)


def test_a_new_controller_goes_on_counting(runs: Runs) -> None:
    runs.training = Training(kill_controller_at=6)
    with pytest.raises(ControllerKilled):
        runs.controller().drive()
    runs.training = Training()
    runs.controller().drive()
    assert [event["reason"] for event in runs.events("prepare")] == ["begun", "resumed"]
    assert [event["attempt"] for event in runs.events("start")] == [1, 2]
    assert runs.training.gangs[0].config["attempt"] == 2
    assert runs.events("prepare")[1]["last_seen"] <= runs.events("prepare")[1]["time"]
    assert [row["attempt"] for row in rows(runs.path)] == [1] * 4 + [2] * 8


def test_a_clock_that_is_set_while_it_trains_ends_nothing(
    runs: Runs, quiet_curve: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a year forward and back, at every look: neither a gang is lost, nor is a limit of hours reached."""
    real, day = time.time, 86_400.0
    steps = itertools.cycle([0.0, 400 * day, -3 * day, 3600.0])
    monkeypatch.setattr(time, "time", lambda: real() + next(steps))
    summary = runs.controller(runs.job(limits={"hours": 1.0}), faults=("kill@1:7",)).drive()
    assert (summary["state"], summary["attempts"]) == ("done", 2)
    assert summary["ledger"]["wall_seconds"] < 600
    assert curve(runs.path) == quiet_curve


def test_a_new_controller_remembers_failures(runs: Runs) -> None:
    spec = runs.job(limits={"restarts": 1})
    runs.training = Training(kill_controller_at=6)
    with pytest.raises(ControllerKilled):
        runs.controller(spec, faults=("kill@1:2",)).drive()
    runs.training = Training()
    summary = runs.controller(spec, faults=("kill@1:7/3",)).drive()
    assert summary["state"] == "failed"
    assert "2 failures within 3600 s" in summary["reason"]


def test_a_run_may_be_driven_again_after_its_end(runs: Runs, quiet_curve: list[Any]) -> None:
    first = runs.controller().drive()
    again = runs.controller().drive()
    assert again["state"] == "done"
    assert again["receipt"] == first["receipt"]
    assert curve(runs.path) == quiet_curve
    assert runs.commits() == [4, 8, 12]


def test_rows_torn_by_a_crash_are_made_whole(runs: Runs, quiet_curve: list[Any]) -> None:
    runs.training = Training(kill_controller_at=6)
    with pytest.raises(ControllerKilled):
        runs.controller().drive()
    with open(runs.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    runs.training = Training()
    runs.controller().drive()
    assert curve(runs.path) == quiet_curve


def test_no_gang_is_left_when_something_breaks(runs: Runs) -> None:
    def breaks(gang: Attempt) -> Iterator[GangStatus]:
        runs.training.gangs.append(gang)
        raise OSError("the disk is gone")
        yield

    class Breaking(Training):
        def __call__(self, gang: Attempt) -> Iterator[GangStatus]:
            return breaks(gang)

    gangs = runs.training.gangs
    runs.training = Breaking(gangs=gangs)
    with pytest.raises(OSError, match="the disk is gone"):
        runs.controller().drive()
    assert [gang.running for gang in gangs] == [False]


def test_no_gang_is_left_when_its_start_breaks(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: FakeGang, *arguments: Any, **more: Any) -> None:
        self._attempt = Attempt(2, {})
        runs.training.gangs.append(self._attempt)
        raise OSError("too many processes")

    monkeypatch.setattr(FakeGang, "start", start)
    with pytest.raises(OSError, match="too many processes"):
        runs.controller().drive()
    assert [gang.running for gang in runs.training.gangs] == [False]


# -- stops


class Watched(Training):
    """Calls `look` after each beat."""

    look: Callable[[GangStatus], None]

    def __call__(self, gang: Attempt) -> Iterator[GangStatus]:
        for beat in super().__call__(gang):
            yield beat
            self.look(beat)


def watched(runs: Runs, look: Callable[[GangStatus], None]) -> None:
    runs.training = Watched(gangs=runs.training.gangs)
    runs.training.look = look  # type: ignore[attr-defined]


def test_a_stop_ends_with_a_commit_and_the_run_goes_on(runs: Runs, quiet_curve: list[Any]) -> None:
    controller = runs.controller()

    def look(beat: GangStatus) -> None:
        if beat.ranks[0].step == 5:
            controller.request_stop("stopped by the user")

    watched(runs, look)
    summary = controller.drive()
    assert (summary["state"], summary["reason"]) == ("stopped", "stopped by the user")
    assert summary["commit"] == summary["step"]
    assert 5 < summary["step"] < 10
    assert runs.phases() == [*QUIET[:-2], "train", "stop", "stopped"]
    assert [event["reason"] for event in runs.events() if event.get("stopping")] == [
        "stopping: stopped by the user"
    ]
    runs.training = Training()
    assert runs.controller().drive()["state"] == "done"
    assert runs.training.gangs[0].config["restore"] == summary["step"]
    assert curve(runs.path) == quiet_curve


def test_a_stop_outlives_the_controller_that_heard_it(runs: Runs) -> None:
    """Ray starts another, and who had asked may be gone. A command that is given later knows nothing of it."""
    controller = runs.controller()

    def look(beat: GangStatus) -> None:
        if beat.ranks[0].step >= 5:
            controller.request_stop("stopped by the user")
        if any(event.get("stopping") for event in controller._status_writer.history.events):  # type: ignore[union-attr]
            raise KeyboardInterrupt

    watched(runs, look)
    with pytest.raises(KeyboardInterrupt):
        controller.drive()
    runs.training = Training()
    summary = runs.controller(died=True).drive()
    assert (summary["state"], summary["reason"]) == ("stopped", "stopped by the user")
    assert runs.controller().drive()["state"] == "done"


def test_a_stop_before_the_gang(runs: Runs) -> None:
    controller = runs.controller()
    controller.request_stop("stopped by the user")
    summary = controller.drive()
    assert (summary["state"], summary["step"]) == ("stopped", 0)
    assert runs.training.gangs == []


@pytest.mark.parametrize("until", [1, 4, 6, 99])
def test_until_ends_with_a_commit(runs: Runs, quiet_curve: list[Any], until: int) -> None:
    summary = runs.controller(until=until).drive()
    assert summary["state"] == ("stopped" if until < 12 else "done")
    assert summary["commit"] == summary["step"] == min(until, 12)
    if until < 12:
        assert f"step {until} is reached" in summary["reason"]
    assert runs.controller().drive()["state"] == "done"
    assert curve(runs.path) == quiet_curve


def test_a_ceiling_on_cost_stops_with_a_commit(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "COUNT_EVERY", 0.0)
    limits = {"cost_usd": 1e-4, "usd_per_worker_hour": 3600.0}
    summary = runs.controller(runs.job(limits=limits)).drive()
    assert (summary["state"], summary["reason"]) == ("stopped", "limits.cost_usd 0.0001 is reached")
    assert 0 < summary["step"] < 12
    assert summary["commit"] == summary["step"]


def test_at_a_ceiling_the_model_is_exported_and_a_warning_came_before(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prices come from the table, by the machines that the gang is on."""
    monkeypatch.setattr(history, "COUNT_EVERY", 0.0)
    table = runs.path / "prices.csv"
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text("machine,market,zone,usd_per_hour\nbig,spot,a,3600\nbig,on-demand,a,9999\n")
    runs.machine = "big"
    checkpoint = {"every": 4, "keep": 3, "export": "hf"}
    limits = {"cost_usd": 0.05, "prices": str(table)}
    spec = runs.job(limits=limits, checkpoint=checkpoint, train=job(runs.text, steps=5000)["train"])
    summary = runs.controller(spec).drive()
    assert (summary["state"], summary["reason"]) == ("stopped", "limits.cost_usd 0.05 is reached")
    assert 0.05 <= summary["cost_usd"] < 5
    assert summary["export"]["step"] == summary["commit"] == summary["step"] < 5000
    events = runs.events()
    (warned,) = [n for n, event in enumerate(events) if event["reason"].startswith("80% of limits.cost_usd")]
    asked = next(n for n, event in enumerate(events) if "is reached" in event["reason"] and n != warned)
    assert warned < asked
    (began,) = [event for event in events if event.get("machines")]
    assert began["usd_per_hour"] == 3600
    assert began["machines"] == [{"node": "node-0", "machine": "big", "market": "spot", "zone": "a"}]
    assert began["zones"] == [{"zone": "a", "market": "spot", "nodes": 1, "usd_per_hour": 3600}]
    assert runs.wants[-1] == 0


def test_a_price_that_is_not_known_is_not_made_up(runs: Runs) -> None:
    runs.machine = "unheard-of"
    assert runs.controller().drive()["cost_usd"] is None
    assert {event.get("usd_per_hour") for event in runs.events()} == {None}


def test_the_cluster_is_told_what_the_planner_can_use_until_the_run_lands(runs: Runs) -> None:
    """Eight sequences per step: three workers cannot share them, so two are wanted, and none for the export."""
    spec = runs.job(
        resources={"workers": {"min": 1, "max": 3}}, checkpoint={"every": 4, "keep": 3, "export": "hf"}
    )
    runs.controller(spec).drive()
    assert [workers for workers, _ in itertools.groupby(runs.wants)] == [3, 2, 0]


def test_a_run_that_waits_for_its_turn_asks_for_workers_too(runs: Runs) -> None:
    """Where nodes come only for who asks for them, its turn comes no other way."""
    queue, notes = GrowingQueue(runs.wants), []
    controller = runs.controller(queue=queue)
    look = controller._inputs.preparation.look
    controller._inputs.preparation.look = lambda *of, **keywords: (
        notes.append(controller.status()["note"]),
        look(*of, **keywords),
    )[1]
    assert controller.drive()["state"] == "done"
    assert notes[0] == "the run is admitted"  # and no more that it waits
    assert [workers for workers, _ in itertools.groupby(runs.wants)] == [2, 0]
    assert queue.left


@dataclass
class GrowingQueue:
    """The queue of a cluster that has as many nodes as it was asked for last."""

    wants: list[int]
    looks: int = 0
    left: bool = False

    @property
    def admission(self) -> Admission:
        room = self.wants[-1] if self.wants else 0
        self.looks += room == 0
        assert self.looks < 1000, "nobody asks for nodes"
        return Admission(room > 0, room, waits_for="2 workers", possible=room > 0)

    def report_nodes(self, places: Sequence[str]) -> None:
        pass

    def leave(self) -> None:
        self.left = True


def test_a_ceiling_on_hours_counts_all_attempts(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "COUNT_EVERY", 0.0)
    runs.controller(until=4).drive()
    summary = runs.controller(runs.job(limits={"hours": 1e-6})).drive()
    assert (summary["state"], summary["reason"]) == ("stopped", "limits.hours 1e-06 is reached")
    assert summary["attempts"] == 1


# -- what can be seen


def test_the_status_tells_where_the_run_is(runs: Runs) -> None:
    controller = runs.controller(until=10)
    before, seen = controller.status(), []
    watched(runs, lambda beat: seen.append((beat, controller.status())))
    controller.drive()
    after = controller.status()
    assert (before["phase"], before["step"], before["attempt"], before["ranks"]) == ("prepare", 0, 0, [])
    _, status = next(pair for pair in seen if pair[0].ranks[0].step == 7)
    assert (status["name"], status["phase"], status["attempt"]) == ("small", "train", 1)
    assert (status["step"], status["steps"], status["loss"]) == (7, 12, 6.0 / 7)
    assert status["layout"].startswith("dp2")
    assert status["eta_seconds"] == pytest.approx(3 * 0.002)
    rank = {"rank": 1, "node": "node-0", "pid": 1001, "state": "running", "step": 7, "doing": "starting"}
    assert status["ranks"][1] == rank
    assert (after["phase"], after["ranks"], after["eta_seconds"]) == ("stopped", [], None)
    assert after["note"] == "step 10 is reached, as asked by --until"
    written = runs.run.read_json("status.json")
    moment = {"time": 0, "memory_percent": 0}
    assert written | moment == after | moment
    json.dumps(status)


def test_a_start_says_from_where(runs: Runs) -> None:
    runs.controller(until=5).drive()
    controller, notes = runs.controller(), []
    watched(runs, lambda beat: notes.append(controller.status()["note"]))
    controller.drive()
    assert "starting 2 workers in fp32 from the commit at step 5" in notes


def test_every_event_has_the_same_columns(runs: Runs) -> None:
    runs.controller(faults=("kill@1:7",)).drive()
    wanted = {
        "time", "attempt", "phase", "reason", "step", "seconds_lost", "layout_before", "layout_after", "first_fault",
    }  # fmt: skip
    assert all(wanted <= event.keys() for event in runs.events())
    times = [event["time"] for event in runs.events()]
    assert times == sorted(times)


def test_a_run_on_another_file_system(runs: Runs, tmp_path: Path) -> None:
    """Objects cannot grow: rows are numbered parts there, written some seconds together, and the run is the same."""
    runs.run = RunDir(f"memory://{tmp_path.name}/runs/small")
    runs.training = Training(kill_controller_at=6)
    with pytest.raises(ControllerKilled):
        runs.controller().drive()
    stored = [row["step"] for row in runs.run.rows("metrics.jsonl")]
    assert stored == [1], "rows wait for others; those that a commit needs are in its manifest"
    runs.training = Training()
    summary = runs.controller().drive()
    assert summary["state"] == "done"
    assert [row["step"] for row in runs.run.rows("metrics.jsonl")] == list(range(1, 13))


def test_a_job_file_with_a_secret_is_for_its_user_alone(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_history, "TELLING", 0.1)  # nothing listens at the webhook
    path = Path(runs.run.path) / "job.yaml"
    runs.controller(runs.job()).drive()
    assert path.stat().st_mode & 0o044
    secret = runs.job(notify={"webhook": "http://127.0.0.1:1/T0/secret"})
    runs.controller(
        secret.model_copy(update={"train": secret.train.model_copy(update={"steps": 12})})
    ).drive()
    assert path.stat().st_mode & 0o077 == 0
