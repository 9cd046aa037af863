"""One controller of a run at a time, on a disk and on a store without locks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.config.errors import InputError
from orchestrator.storage import lease
from orchestrator.storage.lease import LeaseLost
from orchestrator.storage.process_identity import process_identity
from orchestrator.storage.run_directory import RunDir

HOLD = (
    "import sys, time; from orchestrator.storage.run_directory import RunDir\n"
    "with RunDir(sys.argv[1]).lock():\n    print(flush=True)\n    time.sleep(60)\n"
)


# -- on a disk


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the lock of the run."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


@pytest.mark.usefixtures("holder")
def test_only_one_process_holds_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LOCK_TIMEOUT", 0.3)
    before = sorted(os.listdir(tmp_path))
    with (
        pytest.raises(InputError, match="another controller is active for this run"),
        RunDir(str(tmp_path)).lock(),
    ):
        pytest.fail("two controllers at work")
    assert sorted(os.listdir(tmp_path)) == before == [".lock"]


def test_the_lock_ends_with_its_process(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    with RunDir(str(tmp_path)).lock():
        pass


def test_the_lock_ends_with_its_block_and_leaves_no_file_where_nothing_began(tmp_path: Path) -> None:
    for _ in range(2):
        with RunDir(str(tmp_path)).lock():
            assert os.path.exists(tmp_path / ".lock")
        assert os.listdir(tmp_path) == []
    with RunDir(str(tmp_path)).lock():
        (tmp_path / "events.jsonl").write_text("")
    assert sorted(os.listdir(tmp_path)) == [".lock", "events.jsonl"]


@pytest.mark.parametrize("recreated", [False, True])
def test_nothing_is_written_where_a_directory_was_that_has_been_moved(
    tmp_path: Path, recreated: bool
) -> None:
    """It would be a second, incomplete run, which another controller may hold by now."""
    run, moved = RunDir(str(tmp_path / "run")), tmp_path / "moved"
    with run.lock():
        run.write_text("status.json", "{}")
        os.rename(tmp_path / "run", moved)
        if recreated:
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / ".lock").write_text("")
        for write in (
            lambda: run.write_text("status.json", "{}"),
            lambda: run.append("events.jsonl", [{"step": 1}]),
        ):
            with pytest.raises(LeaseLost, match="was moved or removed during the run"):
                write()
    assert not (tmp_path / "run" / "status.json").exists()
    assert not (tmp_path / "run" / "events.jsonl").exists()
    with RunDir(str(moved)).lock():
        assert (moved / "status.json").exists()


def test_what_a_killed_controller_was_writing_goes_with_the_next_and_nothing_else(tmp_path: Path) -> None:
    """A young draft of the report may be of `orchestrator report`, which needs no lock; a folder is no draft."""
    young, old = f"{'a' * 32}.tmp", f"{'b' * 32}.tmp"
    commits = tmp_path / "checkpoints"
    (commits / f"ATTEMPT.{old}").mkdir(parents=True)
    torn = [tmp_path / f"{name}.{young}" for name in ("status.json", "metrics.jsonl", "job.yaml")]
    torn += [commits / f"ATTEMPT.{young}", tmp_path / f"report.html.{old}"]
    others = [tmp_path / f"report.html.{young}", commits / f"LATEST.{young}", tmp_path / "mine.tmp"]
    others += [tmp_path / "status.json", tmp_path / f"status.json.{'x' * 32}.tmp"]
    for path in (*torn, *others):
        path.write_text("torn")
    os.utime(tmp_path / f"report.html.{old}", (1.0, 1.0))
    with RunDir(str(tmp_path)).lock():
        assert [path for path in torn if path.exists()] == []
        assert [path for path in others if not path.exists()] == []
        assert (commits / f"ATTEMPT.{old}").is_dir()


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path: Path) -> None:
    """Many take turns in a folder that each leaves empty: never two at once."""
    inside, most = [0], [0]

    def turn() -> None:
        for _ in range(20):
            with RunDir(str(tmp_path / "a")).lock():
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.001)
                inside[0] -= 1
            try:
                os.rmdir(tmp_path / "a")
            except OSError:
                continue

    threads = [threading.Thread(target=turn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


# -- on a store without locks; many processes at a real one are in tests/dist/checkpoint/test_lease.py


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run directory on a store whose objects cannot grow."""
    return RunDir(f"memory://{tmp_path}/runs/a")


def leases(run: RunDir) -> dict[str, dict[str, object]]:
    return {
        path.rsplit("/", 1)[1]: json.loads(run.fs.cat_file(path)) for path in run.fs.find(f"{run.path}/.lock")
    }


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LOCK_TIMEOUT", 0.6)
    monkeypatch.setattr(lease, "EXPIRES_AFTER", 0.4)
    monkeypatch.setattr(lease, "RENEW_EVERY", 0.05)


def test_only_one_holds_a_lease_and_it_is_free_again_at_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LOCK_TIMEOUT", 0.0)
    with run.lock():
        run.write_text("events.jsonl", "")
        with pytest.raises(InputError, match="another controller is active"), RunDir(run.uri).lock():
            pytest.fail("two controllers at work")
    with RunDir(run.uri).lock():
        run.require_lock()
    assert [told["ended"] for told in leases(run).values()] == [True, True]


def test_a_lease_of_a_run_that_never_began_leaves_nothing(run: RunDir) -> None:
    with run.lock():
        assert list(leases(run)) == ["00000001"]
    assert run.fs.find(run.path) == []


def test_a_holder_that_shows_signs_is_waited_for(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    monkeypatch.setattr(lease, "_has_ended", lambda told: not told)  # as seen from another machine
    with run.lock(), pytest.raises(InputError, match="another controller"), RunDir(run.uri).lock():
        pytest.fail("two controllers at work")


def test_a_silent_holder_is_overtaken_and_writes_nothing_more(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    monkeypatch.setattr(lease, "_has_ended", lambda told: not told)
    monkeypatch.setattr(lease.Lease, "_keep_renewing", lambda self: None)  # frozen, or behind a cut network
    with run.lock():
        run.append("events.jsonl", [{"phase": "train"}])
        with RunDir(run.uri).lock():
            before = {path: run.fs.cat_file(path) for path in run.fs.find(run.path)}
            for write in (
                lambda: run.append("events.jsonl", [{"phase": "stop"}]),
                lambda: run.write_json("status.json", {}),
                run.require_lock,
            ):
                with pytest.raises(LeaseLost, match="another controller has taken over"):
                    write()
            assert {path: run.fs.cat_file(path) for path in run.fs.find(run.path)} == before
    assert list(leases(run)) == ["00000001", "00000002"]


def test_a_process_of_this_machine_that_has_ended_is_not_waited_for(run: RunDir) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    gone = {"owner": "a", "ended": False, **process_identity(int(done.stdout))}
    run.fs.pipe_file(f"{run.path}/.lock/00000003", json.dumps({**gone, "born": "12345"}).encode())
    began = time.monotonic()
    with run.lock():
        assert list(leases(run)) == ["00000003", "00000004"]
    assert time.monotonic() - began < lease.EXPIRES_AFTER / 2


@pytest.mark.parametrize("told", [b"", b"{", b"[]", b'{"ended": 1}', b"\xff"])
def test_a_damaged_lease_is_of_one_who_gives_no_sign(
    run: RunDir, told: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    run.fs.pipe_file(f"{run.path}/.lock/00000003", told)
    with run.lock():
        assert max(leases_names(run)) == "00000004"


def leases_names(run: RunDir) -> list[str]:
    return [path.rsplit("/", 1)[1] for path in run.fs.find(f"{run.path}/.lock")]


def test_an_answer_that_was_lost_is_no_other_s_lease(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = lease.create_object

    def deaf(fs: object, path: str, data: bytes) -> None:
        plain(fs, path, data)
        plain(fs, path, data)

    monkeypatch.setattr(lease, "create_object", deaf)
    with run.lock():
        assert list(leases(run)) == ["00000001"]


def test_a_store_that_ignores_the_condition_of_a_put_is_refused(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "create_object", lambda fs, path, data: fs.pipe_file(path, data))
    with pytest.raises(InputError, match="ignores the condition of a conditional put"), run.lock():
        pytest.fail("nothing kept a second controller away")
    assert run.fs.find(run.path) == []
