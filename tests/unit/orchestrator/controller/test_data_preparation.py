"""A controller whose storage is out for a while, or silent: it waits, hears a stop, and goes on where it was."""

from __future__ import annotations

import errno
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_gang import FakeGang
from jobs import job, wait_for, write_text
from prepared import prepare_here
from scripted import Training, fake_cluster

from cluster.workers.gang import GangStatus
from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.spec import JobSpec, parse
from orchestrator.controller import decide, run_files
from orchestrator.controller.controller import Controller
from orchestrator.storage import retry
from orchestrator.storage.file_names import ATTEMPT_FILE
from orchestrator.storage.file_system import RemoteFileSystem
from orchestrator.storage.run_directory import RunDir

STEPS = 12


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    """A job whose data is prepared."""
    folder = tmp_path_factory.mktemp("shards")
    document = job(write_text(folder, 20_000))
    document["data"]["cache"] = str(folder / "cache")
    prepare_here(parse(document), str(folder / "cache"))
    return parse(document)


@dataclass
class Outage:
    """From the first call for a path with this word in it, so many calls fail; or all wait while it is silent."""

    word: str = ""
    left: int = 0
    failed: int = 0
    spoken: threading.Event = field(default_factory=threading.Event)
    waiting: int = 0

    def __post_init__(self) -> None:
        self.spoken.set()

    def meet(self, path: str) -> None:
        """What a call for a path meets."""
        if not self.spoken.is_set():
            self.waiting += 1
            self.spoken.wait(60)
            raise TimeoutError(f"{path} had not ended after 15 s")
        if self.left and (self.failed or self.word in path):
            self.left -= 1
            self.failed += 1
            raise ConnectionResetError(104, "reset")


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Outage:
    """Every call to remote storage meets it; nothing settles for longer than it must."""
    found, plain = Outage(), RemoteFileSystem._call

    def call(fs: RemoteFileSystem, verb: str, path: str, *arguments: Any, **options: Any) -> Any:
        found.meet(path)
        return plain(fs, verb, path, *arguments, **options)

    monkeypatch.setattr(RemoteFileSystem, "_call", call)
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    monkeypatch.setattr(retry.random, "uniform", lambda low, high: 0.001)
    return found


class Gang(FakeGang):
    """Notes what it is asked; `look` is called with the step before each look."""

    def __init__(self, look: Callable[[int], None] = lambda step: None) -> None:
        super().__init__(Training(), capacity=lambda: 2)
        self.asked, self._look = threading.Event(), look

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        """See `Gang.poll`."""
        beat = super().poll(saved, wait)
        self._look(max((rank.step for rank in beat.ranks), default=0))
        return beat

    def request_stop(self) -> None:
        """See `Gang.request_stop`."""
        super().request_stop()
        self.asked.set()


def controller(spec: JobSpec, run: RunDir, gang: FakeGang, faults: tuple[str, ...] = ()) -> Controller:
    return Controller(spec, run, None, fake_cluster(lambda: gang), faults)


@pytest.fixture
def run() -> RunDir:
    """An empty directory in an object store."""
    return RunDir(f"memory://{uuid.uuid4().hex}/runs/a")


@pytest.mark.parametrize("word", ["events.jsonl", "job.yaml", ATTEMPT_FILE, "summary.json"])
def test_an_outage_is_waited_for_whatever_it_meets_first(
    spec: JobSpec, run: RunDir, outage: Outage, word: str
) -> None:
    """More calls fail than one call is tried: when a run is taken up, goes back to its commit, and ends."""
    outage.word, outage.left = word, 40
    summary = controller(spec, run, Gang(), faults=("raise@0:10",)).drive()
    assert (outage.left, outage.failed) == (0, 40)
    assert (summary["state"], summary["attempts"], summary["commit"]) == ("done", 2, STEPS)
    assert [row["step"] for row in run.rows("metrics.jsonl")] == list(range(1, STEPS + 1))


def test_a_stop_ends_the_wait_for_storage(spec: JobSpec, run: RunDir, outage: Outage) -> None:
    outage.word, outage.left = "events.jsonl", 10**9
    waiting = controller(spec, run, Gang())
    with ThreadPoolExecutor(1) as pool:
        driven = pool.submit(waiting.drive)
        wait_for(lambda: waiting.status()["note"].startswith("waiting for storage: "), "a note of the wait")
        waiting.request_stop("stopped by the user")
        with pytest.raises(ConnectionResetError):
            driven.result(timeout=60)


def test_a_silent_store_keeps_no_stop_from_the_gang(spec: JobSpec, run: RunDir, outage: Outage) -> None:
    def look(step: int) -> None:
        if step == 5:
            outage.spoken.clear()

    gang = Gang(look)
    silent = controller(spec, run, gang)
    with ThreadPoolExecutor(1) as pool:
        driven = pool.submit(silent.drive)
        wait_for(lambda: outage.waiting, "a call that nobody answers")
        silent.request_stop("stopped by the user")
        assert gang.asked.is_set(), "the controller waits for storage, and the gang does not hear of the stop"
        outage.spoken.set()
        summary = driven.result(timeout=60)
    assert (summary["state"], summary["reason"], summary["attempts"]) == ("stopped", "stopped by the user", 1)
    assert 5 < summary["commit"] == summary["step"] < STEPS


def test_a_gang_is_watched_while_the_store_is_silent(
    spec: JobSpec, run: RunDir, outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row, event or document is answered for from step 5 on; a rank dies at step 7, and that is seen."""

    def look(step: int) -> None:
        if step == 5 and not outage.waiting:
            outage.spoken.clear()

    monkeypatch.setattr(run_files, "HOLD", 0.0)
    silent = controller(spec, run, Gang(look), faults=("kill@0:7",))
    with ThreadPoolExecutor(1) as pool:
        driven = pool.submit(silent.drive)
        wait_for(lambda: silent.status()["note"].startswith("recovering: "), "the fault to be seen")
        assert not outage.spoken.is_set()
        assert outage.waiting
        outage.spoken.set()
        summary = driven.result(timeout=60)
    assert (summary["state"], summary["attempts"], summary["commit"]) == ("done", 2, STEPS)
    assert [row["step"] for row in run.rows("metrics.jsonl")] == list(range(1, STEPS + 1))
    phases = [event["phase"] for event in run.rows("events.jsonl")]
    assert phases == ["prepare", *["wait", "start", "train", "stop"] * 2, "done"]
    assert run.read_json("status.json")["phase"] == "done"


@pytest.mark.slow
def test_what_a_store_takes_to_store_rows_is_no_silence_of_the_ranks(
    spec: JobSpec, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writing of rows takes longer than a rank may be silent."""
    plain, clock, passed = RemoteFileSystem.pipe_file, time.monotonic, [0.0]

    def pipe_file(fs: RemoteFileSystem, path: str, *arguments: Any, **options: Any) -> None:
        passed[0] += 45.0 if ".jsonl" in path else 0.0
        plain(fs, path, *arguments, **options)

    monkeypatch.setattr(RemoteFileSystem, "pipe_file", pipe_file)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed[0])
    monkeypatch.setattr(run_files, "HOLD", 0.0)
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    summary = controller(spec, run, Gang()).drive()
    assert passed[0] > 45.0
    assert [event["first_fault"] for event in run.rows("events.jsonl") if event["first_fault"]] == []
    assert (summary["state"], summary["attempts"], summary["commit"]) == ("done", 1, STEPS)


def test_a_disk_that_is_full_or_away_at_a_restart_is_waited_for(
    spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a running gang waits for it: the return to the commit is tried again until there is room."""
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    monkeypatch.setattr(retry.random, "uniform", lambda low, high: 0.001)
    errors, plain = [errno.ENOSPC, errno.EROFS, errno.ENOTDIR] * 3, Store.fence

    def fence(store: Store, attempt: int) -> None:
        if attempt == 2 and errors:
            raise OSError(errors.pop(), "not now")
        plain(store, attempt)

    monkeypatch.setattr(Store, "fence", fence)
    run = RunDir(str(tmp_path / "run"))
    run.create()
    summary = Controller(spec, run, None, fake_cluster(lambda: FakeGang(Training())), ("kill@0:7",)).drive()
    assert (summary["state"], summary["attempts"], errors) == ("done", 2, [])
