"""Many controllers of one run at once on a real object store: one at a time, and none takes another's attempt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.checkpoint.commit_store import Store
from orchestrator.storage.run_directory import RunDir

NEXT = {"time": 0.0, "attempt": 1, "phase": "train", "who": "next"}
CONTROLLER = """
import json, os, signal, sys, time
from orchestrator.storage import lease
from orchestrator.checkpoint.commit_store import Store
from orchestrator.storage.run_directory import RunDir
lease.LOCK_TIMEOUT = 60.0
run, name, dies, turns = RunDir(sys.argv[1]), sys.argv[2], sys.argv[3] == "dies", int(sys.argv[4])
store = Store(run.at("checkpoints"))
for turn in range(turns):
    with run.lock():
        began, attempt = time.monotonic(), store.fenced() + 1
        store.fence(attempt)
        row = {"time": time.time(), "phase": "train", "who": name, "attempt": attempt}
        run.append("events.jsonl", [row | {"began": began}])
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        run.append("events.jsonl", [row | {"ended": time.monotonic()}])
"""


def controller(uri: str, name: str, how: str = "lives", turns: int = 1) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, uri, name, how, str(turns)], stderr=subprocess.PIPE
    )


def test_of_many_at_once_one_is_at_work_and_each_has_an_attempt_of_its_own(bucket: str) -> None:
    """Some are killed with the lease in their hands; who waits sees at once that they are gone."""
    uri = f"{bucket}/runs/a"
    several = [controller(uri, f"{n}", "dies" if n in (1, 3) else "lives", 2) for n in range(5)]
    ended = [process.communicate(timeout=120) and process.returncode for process in several]
    assert ended == [-signal.SIGKILL if n in (1, 3) else 0 for n in range(5)]
    rows = RunDir(uri).rows("events.jsonl")
    attempts = [row["attempt"] for row in rows if "began" in row]
    assert attempts == list(range(1, 3 * 2 + 2 + 1))
    ends = {row["attempt"]: row["ended"] for row in rows if "ended" in row}
    begins = {row["attempt"]: row["began"] for row in rows if "began" in row}
    assert all(end < begins[attempt + 1] for attempt, end in ends.items() if attempt + 1 in begins)
    assert Store(f"{uri}/checkpoints").fenced() == len(attempts)
    run = RunDir(uri)
    told = [json.loads(run.fs.cat_file(path)) for path in sorted(run.fs.find(f"{run.path}/.lock"))]
    assert [one["ended"] for one in told].count(False) == 2


def test_who_holds_the_lease_again_writes_after_what_another_has_written(bucket: str) -> None:
    """Ten appends are merged into one object meanwhile, so that numbers which were taken are free again."""
    one, another = RunDir(f"{bucket}/runs/a"), RunDir(f"{bucket}/runs/a")
    for number, (run, rows) in enumerate([(one, 1), (another, 10), (one, 1), (another, 1)]):
        with run.lock():
            for _ in range(rows):
                run.append("events.jsonl", [NEXT | {"who": f"{number}"}])
    assert "".join(row["who"] for row in RunDir(one.uri).rows("events.jsonl")) == "0" + 10 * "1" + "23"


@pytest.mark.slow
def test_a_frozen_holder_is_overtaken_after_its_silence_and_writes_nothing_when_it_wakes(
    bucket: str, tmp_path: Path
) -> None:
    uri = f"{bucket}/runs/a"
    code = (
        "import sys, time\n"
        "from orchestrator.storage import lease\n"
        "from orchestrator.storage.run_directory import RunDir\n"
        "lease._symlink_target = lambda path: 'another machine'\n"
        "run = RunDir(sys.argv[1])\n"
        "with run.lock():\n"
        "    row = {'time': time.time(), 'attempt': 1, 'phase': 'train'}\n"
        "    run.append('events.jsonl', [row | {'who': 'frozen'}]); print(flush=True)\n"
        "    time.sleep(3)\n"
        "    run.append('events.jsonl', [row | {'who': 'woken'}])\n"
    )
    frozen = subprocess.Popen(
        [sys.executable, "-c", code, uri], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert frozen.stdout is not None
    frozen.stdout.readline()
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        run, began = RunDir(uri), time.monotonic()
        with run.lock():
            assert 10 < time.monotonic() - began < 60
            run.append("events.jsonl", [NEXT])
            os.kill(frozen.pid, signal.SIGCONT)
            _, said = frozen.communicate(timeout=60)
            assert "LeaseLost: another controller has taken over" in said
            run.append("events.jsonl", [NEXT])
    finally:
        frozen.kill()
    assert [row["who"] for row in RunDir(uri).rows("events.jsonl")] == ["frozen", "next", "next"]
