"""A run in a bucket of a real S3 server that loses a worker, while many a request is spoiled on its way."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jobs import curve, job, slow_job, wait_for, write_text
from local_run import LocalGang, controller_here, drive_here
from s3 import Proxy

from orchestrator.checkpoint.commit_store import Store
from orchestrator.controller import decide, run_files
from orchestrator.storage import run_directory
from orchestrator.storage.file_names import ATTEMPT_FILE
from orchestrator.storage.row_line import METRICS
from orchestrator.storage.run_directory import RunDir

FAULTS = ("busy", "refuse", "deaf", "cut", "slow")


def test_a_run_in_a_bucket_goes_on_from_its_commit(
    bucket: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    monkeypatch.setattr(run_files, "HOLD", 3600.0)  # events write rows, no clock
    text, cache, quiet = write_text(tmp_path, 20_000), tmp_path / "cache", tmp_path / "quiet"
    drive_here(job(text), str(quiet), cache)
    count, kinds = itertools.count(1), itertools.cycle(FAULTS)
    proxy.spoil = lambda line: "" if next(count) % 9 else next(kinds)
    summary = drive_here(job(text), f"{bucket}/runs/small", cache, faults=("kill@1:10",))
    assert {line.split()[0] for line in proxy.spoiled} == set(FAULTS)
    proxy.spoil = lambda line: ""
    assert (summary["state"], summary["attempts"], summary["commit"]) == ("done", 2, 12)
    run = RunDir(f"{bucket}/runs/small")
    assert run.read_json("summary.json") == summary
    found = run.rows("metrics.jsonl")
    assert [(row["step"], row["loss"], row["grad_norm"], row["samples"]) for row in found] == curve(quiet)
    store = Store(run.at("checkpoints"))
    assert [(step, store.verify(step)) for step in store.steps()] == [(4, []), (8, []), (12, [])]
    parts = Counter(path.split("/")[-2] for path in run.fs.find(run.path) if "/part-" in path)
    assert parts["metrics.jsonl"] < len(found), "rows are written together"


@pytest.mark.slow
def test_a_gang_that_begins_again_while_the_store_is_out_waits_for_it(
    bucket: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the fence before the second attempt on: the commit that it goes back to, the rows, the ranks' load."""
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    text, run = write_text(tmp_path, 20_000), f"{bucket}/runs/out"
    fences, refused = itertools.count(1), itertools.count(1)
    out = threading.Event()

    def spoil(line: str) -> str:
        if line.startswith("PUT") and ATTEMPT_FILE in line and next(fences) == 2:
            out.set()
        return "refuse" if out.is_set() and next(refused) <= 25 else ""

    proxy.spoil = spoil
    summary = drive_here(job(text), run, tmp_path / "cache", faults=("kill@1:10",))
    assert len(proxy.spoiled) == 25
    assert (summary["state"], summary["attempts"], summary["commit"]) == ("done", 2, 12)
    assert [row["step"] for row in RunDir(run).rows("metrics.jsonl")] == list(range(1, 13))


class Heard(LocalGang):
    """A gang that notes when it is asked to stop."""

    def __init__(self) -> None:
        super().__init__([2])
        self.asked = threading.Event()

    def request_stop(self) -> None:
        """See `Gang.request_stop`."""
        super().request_stop()
        self.asked.set()


@pytest.mark.slow
def test_a_silent_store_neither_ends_a_gang_nor_hides_a_stop(
    bucket: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller waits for storage with the rows of a look in hand, for longer than a rank may be silent."""
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    monkeypatch.setattr(run_directory, "REMOTE_TIMEOUT", 2.0)
    gang, run = Heard(), f"{bucket}/runs/silent"
    document = slow_job(write_text(tmp_path, 200_000), steps=2000)
    document["checkpoint"]["every"] = 1000  # the first commit is the one that the stop asks for
    controller = controller_here(document, run, tmp_path / "cache", gang=lambda: gang)
    with ThreadPoolExecutor(1) as pool:
        driven = pool.submit(controller.drive)
        wait_for(lambda: controller.status()["step"] >= 5, "training")
        proxy.spoil = lambda line: "hang"
        wait_for(lambda: any(METRICS in line for line in proxy.spoiled), "rows that nobody takes")
        controller.request_stop("stopped by the user")
        assert gang.asked.wait(1.0), (
            "the controller waits for storage, and the gang does not hear of the stop"
        )
        wait_for(
            lambda: sum(METRICS in line for line in proxy.spoiled) >= 5,
            "more tries than a rank may be silent",
        )
        proxy.spoil = lambda line: ""
        summary = driven.result()
    assert (summary["state"], summary["reason"], summary["attempts"]) == ("stopped", "stopped by the user", 1)
    assert summary["commit"] == summary["step"]
    assert [row["step"] for row in RunDir(run).rows("metrics.jsonl")] == list(range(1, summary["step"] + 1))
