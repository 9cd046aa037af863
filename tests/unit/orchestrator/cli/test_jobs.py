"""What is wrong with a submission is told before any cluster is asked, and without its secrets."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import job as job_document
from jobs import write_job
from run_directories import run_of

from cluster.jobs.ray_jobs import Submission
from cluster.local import local_cluster as loopback
from cluster.local.node_processes import OF_CLUSTER
from orchestrator.api.run import load_run
from orchestrator.cli import jobs
from orchestrator.controller.stop_file import StopRequests
from orchestrator.launch import submission
from orchestrator.storage.process_identity import lineage
from orchestrator.storage.run_directory import RunDir


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file in the current folder."""
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path, job_document("corpus.txt"))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            ["submit", "job.yaml"],
            "no address is given, and no local cluster is up; give --address, or start a",
        ),
        (["list"], "no address is given, and no local cluster is up"),
        (["logs", "small"], "there is no run here"),
        (["attach", "small"], "there is no run here"),
        (["list", "--address", "nonsense"], "--address nonsense: nonsense is not an address: give HOST:PORT"),
        (["list", "--address", "a:99999"], "--address a:99999: a:99999 is not an address: give HOST:PORT"),
        (["list", "--address", "127.0.0.1:9"], "--address 127.0.0.1:9: nobody answers at 127.0.0.1:9"),
        (["list", "--address", "http://127.0.0.1:9"], "nobody answers at http://127.0.0.1:9"),
        (["submit", "nowhere.yaml"], "nowhere.yaml: there is no such job file"),
        (
            ["submit", "job.yaml", "--working-dir", "nowhere"],
            "--working-dir nowhere: there is no such folder",
        ),
        (
            ["submit", "job.yaml", "--working-dir", ".", "--package"],
            "--working-dir, --package: give one of them",
        ),
        (["submit", "job.yaml", "--exclude", "*.bin"], "--exclude: there is no folder to leave it out of"),
        (
            ["cluster", "show"],
            "local: no local cluster is up; start one with `orchestrator cluster up --local 2`",
        ),
        (["cluster", "add"], "local: no local cluster is up"),
        (["cluster", "remove", "127.0.1.2"], "local: no local cluster is up"),
        (["cluster", "up", "--local", "1", "--resources", "{"], "--resources: is not JSON"),
        (
            ["cluster", "up", "--local", "1", "--resources", '{"a": "b"}'],
            "--resources: must be an object whose",
        ),
        (
            ["cluster", "up", "--local", "1", "--labels", "[]"],
            "--labels: must be an object whose values are str",
        ),
        (["cluster", "up", "--local", "3", "--max", "2"], "--max: --max 2 is below --local 3; raise it"),
        (["cluster", "up", "--local", "0", "--name", "x" * 13], "is too long; use at most 12 letters"),
    ],
)
def test_one_line_and_exit_code_2(command: Any, folder: Path, words: list[str], wanted: str) -> None:
    ended = command(*words)
    assert (ended.code, ended.out) == (2, "")
    line = [line for line in ended.err.splitlines() if line.startswith("orchestrator: ")]
    assert len(line) == 1
    assert wanted in line[0]
    assert not loopback.folder_of("local").exists()


def test_a_secret_is_refused_and_not_repeated(command: Any, folder: Path) -> None:
    tracking = "tracking={uri: 'https://me:hunter2@tracking.example', experiment: a}"
    ended = command("submit", "job.yaml", "--set", tracking, "--json")
    assert ended.code == 2
    assert "the job carries a credential" in json.loads(ended.out)["line"]
    assert "hunter2" not in ended.out + ended.err


def test_there_is_nothing_to_end(command: Any, folder: Path) -> None:
    assert (
        command("cluster", "down", "--name", "t-none").out == "there is no cluster 't-none': nothing to do\n"
    )


def test_a_cluster_of_another_tmpdir_is_told_with_the_command_that_ends_it(
    command: Any, folder: Path, tmp_path: Path
) -> None:
    place = tmp_path / "theirs"
    theirs = place / f"orchestrator-{os.getuid()}" / "t-none"
    with subprocess.Popen(["sleep", "60"], env=os.environ | {OF_CLUSTER: str(theirs)}) as process:
        try:
            ended = command("cluster", "down", "--name", "t-none")
        finally:
            process.kill()
    assert ended.code == 2
    assert "is not running here; 1 processes of a cluster with that name run elsewhere; " in ended.err
    assert f"TMPDIR={place} orchestrator cluster down --name t-none" in ended.err


@pytest.mark.parametrize("is_there_a_cluster", [False, True])
def test_a_run_inside_a_command_is_asked_by_a_file(
    folder: Path, command: Any, monkeypatch: pytest.MonkeyPatch, is_there_a_cluster: bool
) -> None:
    """As `run` without an address trains: no cluster knows its controller."""
    if is_there_a_cluster:
        monkeypatch.setattr(
            "cluster.local.ray_session.connected_ray", lambda _, **__: contextlib.nullcontext()
        )
        monkeypatch.setattr("orchestrator.launch.controller_actor.controller_of", lambda run: None)
    run = run_of(folder / "runs/small", phase="train", seen=time.time())
    assert "small: its controller has written no status yet, or" in command("stop", run.uri).err
    status = run.read_json_or_empty("status.json")
    run.write_json("status.json", {**status, "processes": lineage()})
    said = command("stop", run.uri, "--no-wait")
    assert (said.code, said.out) == (0, f"{run.uri} will commit and end\n")
    assert StopRequests(run, lineage()[0]).look() == "stopped by the user"
    assert StopRequests(run, {**lineage()[0], "born": "1"}).look() == "", "another controller of this run"


def test_a_stop_waits_for_the_end(folder: Path, command: Any) -> None:
    run = run_of(folder / "runs/small", phase="train", seen=time.time())
    status = run.read_json_or_empty("status.json") | {"processes": lineage()}
    run.write_json("status.json", status)

    def end() -> None:
        while not StopRequests(run, lineage()[0]).look():
            time.sleep(0.05)
        run.write_json("status.json", {**status, "phase": "stopped"})

    ends = threading.Thread(target=end)
    ends.start()
    assert command("stop", run.uri).out == f"{run.uri}: stopped\n"
    ends.join()
    assert "small: this run has ended already" in command("stop", run.uri).err


class OneJob:
    """A cluster with a job of the name small, whose run directory is elsewhere."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    def find(self, name: str) -> Submission | None:
        found = Submission("small-1", "small", "s3://b/small", 0, "running", "", 1.0, None, None, "")
        return found if name in ("small", found.id, found.run_dir) else None

    def all(self) -> list[Submission]:
        return [found] if (found := self.find("small")) else []

    def get(self, number: str) -> Submission:
        found = self.find(number)
        assert found is not None
        return found

    def stop(self, job: str) -> None:
        self.stopped.append(job)

    def follow(self, _: str) -> Iterator[str]:
        yield "step 1\n"
        raise KeyboardInterrupt  # as Ctrl-C and SIGTERM do


@pytest.mark.parametrize(
    ("phase", "submitted", "shown"),
    [
        ("queue", 1.0, "waiting"),
        ("wait", 1.0, "waiting"),
        ("train", 1.0, "running"),
        ("prepare", 1.0, "running"),
        ("queue", 2e9, "running"),
    ],
    ids=["its turn", "workers", "at work", "prepares", "a status of an earlier submission"],
)
def test_a_job_that_waits_is_not_said_to_run(
    folder: Path, command: Any, monkeypatch: pytest.MonkeyPatch, phase: str, submitted: float, shown: str
) -> None:
    """Ray calls the command of a submission running, whatever the run does."""
    run = run_of(folder / "elsewhere", phase=phase, seen=time.time())
    cluster: Any = OneJob()
    job = Submission("small-1", "small", run.uri, 0, "running", "", submitted, None, None, "")
    cluster.all = lambda: [
        job,
        dataclasses.replace(job, id="far-1", run_dir="memory://nowhere/far"),
        dataclasses.replace(job, id="old-1", state="done", ended=submitted + 1),
        dataclasses.replace(job, id="new-1", state="pending", started=None),
    ]
    monkeypatch.setattr(submission, "jobs_at", lambda address: cluster)
    states = [line.split()[1] for line in command("list").out.splitlines() if "-1 " in line]
    assert states[:3] == [shown, "running", "done"]
    rows = json.loads(command("list", "--json").out)
    assert [row["waiting"] for row in rows[:3]] == [shown == "waiting", False, False]
    assert [row["state"] for row in rows] == [shown, "running", "done", "pending"]
    # `status` of the job, and the run in Python, say the same.
    cluster.find = lambda name: job
    first, *_ = command("status", "small-1").out.splitlines()
    assert first == f"small-1: {shown}, run directory {run.uri}"
    said = json.loads(command("status", "small-1", "--json").out)
    assert said["job"] == rows[0]
    assert said["state"] == load_run(run.uri).state == ("waiting" if phase in ("queue", "wait") else phase)
    assert (said["phase"], json.loads(command("top", str(folder), "--json").out)[0]["state"]) == (
        phase,
        said["state"],
    )


def chain_of_two(root: Path) -> RunDir:
    """A chain whose first stage trains."""
    chain = RunDir(str(root))
    chain.create()
    stages = {"name": "c", "stages": [{"name": "first"}, {"name": "second"}]}
    chain.write_text("job.yaml", yaml.safe_dump(job_document("corpus.txt") | stages))
    chain.write_json("chain.json", {})
    run_of(root / "first", phase="train", seen=time.time())
    return chain


def test_a_job_is_shown_without_torch(folder: Path) -> None:
    """Its import takes longer than all else that `list` and `status` do, of a run and of a chain."""
    run = run_of(folder / "runs/small", phase="train", seen=time.time())
    chain = chain_of_two(folder / "runs/chain")
    code = f"""
import sys
from cluster.jobs.ray_jobs import Submission
from orchestrator.cli.run import status
from orchestrator.cli.targets import shown_of
for uri in {run.uri!r}, {chain.uri!r}:
    shown = shown_of(Submission("small-1", "small", uri, 0, "running", "", 1.0, None, None, ""))
    status(uri)
    print(shown["state"], "torch" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    lines = ended.stdout.splitlines()
    assert lines.count("running False") == 2, ended.stdout + ended.stderr
    assert any(line.startswith("c: running") for line in lines), ended.stdout


def test_a_job_without_a_status_says_what_it_does(
    folder: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an earlier submission has left a status."""
    monkeypatch.setenv("COLUMNS", "200")
    before = run_of(folder / "before", phase="stopped", seen=time.time() - 60)
    chain = chain_of_two(folder / "chain")
    job = Submission("new-1", "new", str(folder / "nowhere"), 0, "running", "", 2e9, None, None, "")
    cluster: Any = OneJob()
    cluster.all = lambda: [
        job,
        dataclasses.replace(job, name="ray", state="pending", started=None),
        dataclasses.replace(job, name="again", run_dir=before.uri),
        dataclasses.replace(job, name="wrong", state="failed", ended=2e9, message="no such image"),
        dataclasses.replace(job, name="of-before", run_dir=before.uri, started=1.0),
        dataclasses.replace(job, name="finished", run_dir=before.uri, state="done", ended=2e9),
        dataclasses.replace(job, name="chain", run_dir=chain.uri),
        dataclasses.replace(job, name="chained", run_dir=chain.uri, state="done", ended=2e9, message="ok"),
    ]
    cluster.find = lambda name: job
    monkeypatch.setattr(submission, "jobs_at", lambda address: cluster)
    rows = {row["name"]: (row["state"], row["says"]) for row in json.loads(command("top", "--json").out)}
    checks = "its command checks the job and starts the controller"
    assert rows == {
        "new": ("running", checks),
        "ray": ("pending", "Ray starts its command"),
        "again": ("running", checks),
        "wrong": ("failed", "no such image"),
        "of-before": ("stopped", rows["of-before"][1]),
        "finished": rows["of-before"],
        "chain": ("running", "first: train"),
        "chained": ("done", "ok"),
    }
    cluster.all = list
    assert command("list").out == "no jobs yet; `orchestrator submit JOB` adds one\n"
    assert checks in command("status", "new").out
    for changes, says in (
        ({"state": "wrong input", "ended": 2e9, "message": "train.steps is 9"}, "train.steps is 9"),
        ({}, checks),
    ):
        again = dataclasses.replace(job, run_dir=before.uri, **changes)
        cluster.find = lambda name, again=again: again
        first, second, third, *_ = command("status", "new").out.splitlines()
        assert first == f"new-1: {again.state}, run directory {before.uri}"
        assert (second, third.split(",")[0]) == (says, "before: stopped")


@pytest.mark.parametrize("words", ["status", "stop", "logs", "attach"])
def test_a_path_without_a_run_is_no_name_of_a_job(
    folder: Path, command: Any, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setattr(submission, "jobs_at", lambda address: OneJob())
    said = command(words, "runs/nothing_here")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "runs/nothing_here: there is no run here; give a run directory" in said.err
    assert "choose from: small" in command(words, "nothing_here").err


@pytest.mark.parametrize(("phase", "stopped"), [("done", ["small-1"]), ("train", [])])
def test_a_name_is_of_the_clusters_job_where_the_run_of_that_name_has_ended(
    folder: Path, command: Any, monkeypatch: pytest.MonkeyPatch, phase: str, stopped: list[str]
) -> None:
    """And of the run while it trains: the job is not stopped in its place."""
    jobs = OneJob()
    monkeypatch.setattr(submission, "jobs_at", lambda address: jobs)
    run = run_of(folder / "runs/small", phase=phase, seen=time.time())
    if phase == "done":
        run.write_json("summary.json", {"state": "done"})
    said = command("stop", "small", "--no-wait")
    assert (jobs.stopped, said.code) == (stopped, 0 if stopped else 2)


@pytest.mark.parametrize("words", [["attach", "small"], ["submit", "job.yaml", "--wait"]])
def test_who_stops_following_a_job_is_not_told_that_it_is_done(
    folder: Path, command: Any, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """By Ctrl-C, or SIGTERM as a scheduler sends it: what follows in a script would go on without the model."""
    monkeypatch.setattr(submission, "jobs_at", lambda address: OneJob())
    monkeypatch.setattr(submission, "submit", lambda jobs, *_, **__: (jobs.get("small"), True))
    said = command(*words)
    assert (said.code, said.out) == (130, "")
    assert said.err.endswith("small-1 is still running; `orchestrator stop small` ends it\n")
    said = command(*words, "--json")
    assert said.code == 130
    assert (json.loads(said.out)["id"], json.loads(said.out)["state"]) == ("small-1", "running")


def test_who_stops_following_a_run_is_not_told_that_it_is_done(
    folder: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    run = run_of(folder / "runs/small", phase="train", seen=time.time())
    monkeypatch.setattr(jobs.time, "sleep", interrupted)
    said = command("attach", run.path, "--json", "--progress", "none")
    assert (said.code, json.loads(said.out)["phase"]) == (130, "train")
    assert said.err == f"\n{run.path} goes on\n"


class NeverStarted(OneJob):
    """The job has failed before its command could print anything."""

    def find(self, name: str) -> Submission | None:
        return Submission(
            "small-1", "small", "s3://b/small", 0, "failed", "", 1.0, 2.0, None, "no such image"
        )

    def follow(self, _: str) -> Iterator[str]:
        yield ""


def test_why_a_job_did_not_start_is_told(folder: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "jobs_at", lambda address: NeverStarted())
    said = command("attach", "small")
    assert (said.code, said.out, said.err) == (1, "small-1: failed\n", "orchestrator: no such image\n")


@pytest.mark.parametrize(
    ("phase", "state", "shown"),
    [("done", "running", "job"), ("done", "failed", "run"), ("train", "running", "run")],
)
def test_of_two_runs_of_one_name_one_is_shown_and_the_other_named(
    folder: Path, command: Any, monkeypatch: pytest.MonkeyPatch, phase: str, state: str, shown: str
) -> None:
    """That of the job while it is at work and the other has ended; never keys of both in one document."""
    elsewhere = run_of(folder / "elsewhere", phase="prepare", seen=time.time())
    job = Submission("small-2", "small", elsewhere.uri, 0, state, "", 1.0, None, None, "")
    only: Any = OneJob()
    only.find = lambda name: job if name in ("small", elsewhere.uri) else None
    monkeypatch.setattr(submission, "jobs_at", lambda address: only)
    near = run_of(folder / "runs/small", phase=phase, seen=time.time())
    said, found = command("status", "small").out, json.loads(command("status", "small", "--json").out)
    first = said.splitlines()[0]
    if shown == "job":
        assert (found["phase"], found["job"]["run_dir"]) == ("prepare", elsewhere.uri)
        assert first == f"small-2: running, run directory {elsewhere.uri}"
        assert said.endswith(f"\n{near.uri} is another run\n")
    else:
        assert (found["phase"], "job" in found) == (phase, False)
        assert first.startswith(f"small: {phase}, step 3")
        assert said.endswith(f"\nsmall-2 is another run: {state}, run directory {elsewhere.uri}\n")


class Stopped(OneJob):
    """The job was stopped, in this run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = str(run_dir)

    def find(self, name: str) -> Submission | None:
        return Submission("small-1", "small", self._run_dir, 0, "stopped", "", 1.0, 2.0, None, "")

    def follow(self, _: str) -> Iterator[str]:
        yield ""

    def wait(self, number: str, _: float) -> Submission:
        return self.get(number)


@pytest.mark.parametrize(
    ("commit", "code", "next_time"),
    [
        (True, 3, "continues from its last checkpoint"),
        (False, 1, "starts from the beginning: no checkpoint yet"),
        (None, 3, "goes on"),
    ],
)
def test_a_stopped_job_is_said_to_go_on_from_a_commit_that_is_there(
    runs: Path,
    tmp_path: Path,
    command: Any,
    monkeypatch: pytest.MonkeyPatch,
    commit: bool | None,
    code: int,
    next_time: str,
) -> None:
    place = {True: runs / "runs" / "half", False: tmp_path / "young", None: tmp_path / "elsewhere"}[commit]
    if commit is False:
        run_of(place, phase="stopped").write_json("summary.json", {"state": "stopped", "commit": None})
    stopped = Stopped(place)
    monkeypatch.setattr(submission, "jobs_at", lambda address: stopped)
    said = command("attach", "small", "--address", "a:1")
    assert (said.code, said.out) == (code, "small-1: stopped\n")
    assert ("no checkpoint yet" in said.err) == (commit is False)
    at_work = dataclasses.replace(stopped.get("small"), state="running")
    monkeypatch.setattr(submission, "existing", lambda *_, **__: at_work)
    monkeypatch.setattr(stopped, "stop", lambda _: None)
    assert command("stop", "small", "--address", "a:1").out == f"small-1: stopped; the same job {next_time}\n"
    if commit is False:
        assert command("attach", place).code == 1


def test_what_a_run_would_refuse_is_refused_before_it_is_queued(
    folder: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job, and the stages of a chain. A text that only the cluster has is left to the run."""
    sent: list[str] = []
    (folder / "tmp").mkdir()  # for the tokenizers of stages to come

    def submit(jobs: Any, name: str, *_: Any, **__: Any) -> tuple[Submission, bool]:
        sent.append(name)
        return jobs.get("small"), True

    monkeypatch.setattr(submission, "jobs_at", lambda address: OneJob())
    monkeypatch.setattr(submission, "submit", submit)
    wrong = {"resources": {"workers": {"min": 3, "max": 3}}, "parallel": {"tp": 3}}
    document = job_document(str(folder / "corpus.txt"))
    write_job(folder, document | wrong, "wrong.yaml")
    chain = {"stages": [{"name": "one"}, {"name": "two", **wrong}], "name": "chain"}
    write_job(folder, document | chain, "chain.yaml")
    for name in ("wrong.yaml", "job.yaml"):
        said = command("submit", name)
        assert (said.code, "heads" in said.err) == ((2, True) if name == "wrong.yaml" else (0, False)), said
    assert sent == ["small"]
    assert command("submit", "chain.yaml").code == 0, "its text is not here"
    (folder / "corpus.txt").write_text("some text\n" * 100)
    said = command("submit", "chain.yaml")
    assert (said.code, sent) == (2, ["small", "chain"])
    assert "stages.two" in said.err
