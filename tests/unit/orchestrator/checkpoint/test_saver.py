from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint import saver as module
from orchestrator.checkpoint import shared_memory
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.committer import CommitOutcome
from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.retention import Retention
from orchestrator.checkpoint.saver import Saver
from orchestrator.checkpoint.shared_memory import SharedBuffer
from orchestrator.storage.retry import Retry


def meta(step: int) -> dict[str, object]:
    return {"position": step * 8, "receipt": "r"}


def ended(saver: Saver, count: int, seconds: float = 30.0) -> list[CommitOutcome]:
    outcomes: list[CommitOutcome] = []
    end = time.monotonic() + seconds
    while len(outcomes) < count and time.monotonic() < end:
        outcomes += saver.poll()
        time.sleep(0.005)
    return outcomes


def sidecar(saver: Saver) -> int:
    return saver._sidecar.process.pid


def test_what_was_there_at_the_save_is_committed(in_memory: Path) -> None:
    store = Store(str(in_memory))
    saver = Saver(store, retention=Retention(keep=3))
    state = {
        "model.w": torch.zeros(50, 3),
        "model.half": torch.zeros(4).bfloat16(),
        "optim.w.step": torch.tensor(0.0),
    }
    state["model.turned"] = torch.zeros(3, 5).t()
    for step in range(1, 7):
        for tensor in state.values():
            tensor.fill_(step)
        saver.save(step, [full_piece(*item) for item in state.items()], meta(step))
        for tensor in state.values():
            tensor.fill_(-1)
    outcomes = saver.close()
    assert [(outcome.step, outcome.state) for outcome in outcomes] == [
        (step, "published") for step in range(1, 7)
    ]
    assert store.steps() == [4, 5, 6]
    for step in store.steps():
        found = store.manifest(step)
        assert (found.position, store.verify(step)) == (step * 8, [])
        read = {name: store.reader(found).read(name) for name in found.tensors}
        assert all(torch.equal(read[name], torch.full_like(tensor, step)) for name, tensor in state.items())


def test_the_memory_grows_with_the_snapshot(in_memory: Path) -> None:
    store = Store(str(in_memory))
    saver = Saver(store)
    for step, rows in enumerate([0, 10, 100_000, 10], 1):
        saver.save(step, [full_piece("model.w", torch.full((rows, 2), float(step)))], meta(step))
    assert [outcome.state for outcome in saver.close()] == ["published"] * 4
    assert [store.manifest(step).tensors["model.w"].shape[0] for step in store.steps()] == [
        0,
        10,
        100_000,
        10,
    ]
    assert torch.equal(store.reader(store.manifest(3)).read("model.w"), torch.full((100_000, 2), 3.0))


def test_two_processes_make_one_commit(in_memory: Path) -> None:
    store = Store(str(in_memory), attempt="gang1")
    savers = [Saver(store, writer, 2) for writer in range(2)]
    rows = torch.randn(5, 4)
    for writer, (low, high) in enumerate([(0, 2), (2, 5)]):
        savers[writer].save(7, [TensorPiece("model.w", (5, 4), (low, 0), rows[low:high])], meta(7))
    assert [[outcome.state for outcome in saver.close()] for saver in savers] == [["published"], ["written"]]
    assert torch.equal(store.reader(store.manifest(7)).read("model.w"), rows)


def test_the_writing_process_hears_of_another_writer_that_failed(in_memory: Path) -> None:
    """While it waits for it."""
    saver = Saver(Store(str(in_memory)), 0, 2)
    saver.save(3, [full_piece("model.w", torch.ones(4))], meta(3))
    saver.tell_failed((-1, 3))
    (outcome,) = ended(saver, 1)
    saver.close()
    assert (outcome.step, outcome.state) == (3, "failed")
    assert "writers [1] failed" in outcome.reason


def test_a_killed_writing_process_is_told_and_replaced(in_memory: Path) -> None:
    saver = Saver(Store(str(in_memory)))
    os.kill(sidecar(saver), signal.SIGSTOP)
    saver.save(1, [full_piece("model.w", torch.ones(4))], meta(1))
    os.kill(sidecar(saver), signal.SIGKILL)
    (outcome,) = ended(saver, 1)
    assert (outcome.step, outcome.state) == (1, "failed")
    assert "ended with code -9" in outcome.reason
    saver.save(2, [full_piece("model.w", torch.ones(4))], meta(2))
    assert [(outcome.step, outcome.state) for outcome in saver.close()] == [(2, "published")]


def test_a_save_waits_for_memory_within_bounds(in_memory: Path) -> None:
    saver = Saver(Store(str(in_memory)), max_wait=0.3)
    os.kill(sidecar(saver), signal.SIGSTOP)
    pieces = [full_piece("model.w", torch.ones(4))]
    assert saver.save(1, pieces, meta(1)) < 0.1
    assert saver.save(2, pieces, meta(2)) < 0.1
    assert 0.3 <= saver.save(3, pieces, meta(3)) < 2.0
    (outcome,) = saver.poll()
    assert (outcome.step, outcome.state) == (3, "failed")
    assert "step 1 was still being written" in outcome.reason
    assert saver.failed_step == -1, "who waits for 1 and 2 may go on waiting"
    os.kill(sidecar(saver), signal.SIGCONT)
    assert [(outcome.step, outcome.state) for outcome in saver.close()] == [
        (1, "published"),
        (2, "published"),
    ]
    assert saver.failed_step == 3


def with_stopped(store: Store, seconds: float = 1.0) -> Saver:
    """One whose writing process has made the first commit, and is stopped."""
    saver = Saver(store, max_wait=seconds)
    saver.save(1, [full_piece("model.w", torch.ones(4))], meta(1))
    saver._wait(lambda: not saver._busy, 30.0)
    assert [outcome.state for outcome in saver.poll()] == ["published"]
    os.kill(sidecar(saver), signal.SIGSTOP)
    # A thread that runs just now is stopped a little later, and may answer until then.
    tasks, end = Path(f"/proc/{sidecar(saver)}/task"), time.monotonic() + 30
    while {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()} != {"T"}:
        assert time.monotonic() < end
        time.sleep(0.01)
    return saver


def test_a_stopped_writing_process_is_replaced_by_the_save_that_waits_for_it(in_memory: Path) -> None:
    store = Store(str(in_memory))
    saver = with_stopped(store)
    stopped, pieces = saver._sidecar.process, [full_piece("model.w", torch.ones(4))]
    assert [saver.save(step, pieces, meta(step)) < 0.5 for step in (2, 3)] == [True, True]
    assert saver.save(4, pieces, meta(4)) < 10
    assert stopped.returncode == -signal.SIGKILL
    lost = saver.poll()
    assert [(outcome.step, outcome.state) for outcome in lost] == [(2, "failed"), (3, "failed")]
    assert {outcome.reason for outcome in lost} == {
        "the writing process gave no answer for 1 s and was ended"
    }
    saver.save(5, pieces, meta(5))
    assert [(outcome.step, outcome.state) for outcome in saver.close()] == [
        (4, "published"),
        (5, "published"),
    ]
    assert store.steps() == [1, 4, 5]


def test_saves_that_are_far_apart_do_not_wait_for_a_stopped_writing_process(in_memory: Path) -> None:
    """It is found between them."""
    saver = with_stopped(Store(str(in_memory)))
    pieces = [full_piece("model.w", torch.ones(4))]
    saver.save(2, pieces, meta(2))
    (outcome,) = ended(saver, 1)
    assert (outcome.step, outcome.state) == (2, "failed")
    assert saver.save(3, pieces, meta(3)) < 0.5
    assert [(outcome.step, outcome.state) for outcome in saver.close()] == [(3, "published")]


def test_a_stopped_writing_process_is_found_at_the_end(in_memory: Path) -> None:
    saver = with_stopped(Store(str(in_memory)))
    saver.save(2, [full_piece("model.w", torch.ones(4))], meta(2))
    began = time.monotonic()
    assert [(outcome.step, outcome.state) for outcome in saver.close(timeout=60)] == [(2, "failed")]
    assert time.monotonic() - began < 30


def test_a_save_that_fills_the_pipe_of_a_stopped_writing_process_is_bounded(in_memory: Path) -> None:
    saver = with_stopped(Store(str(in_memory)))
    pieces = [full_piece(f"model.layers.{n}.weight", torch.ones(1)) for n in range(3000)]
    saver.save(2, pieces, meta(2))
    (outcome,) = ended(saver, 1)
    assert (outcome.step, outcome.state) == (2, "failed")
    saver.save(3, pieces, meta(3))
    assert [(outcome.step, outcome.state) for outcome in saver.close()] == [(3, "published")]


def test_a_writing_process_that_storage_keeps_waiting_is_left_alone(in_memory: Path) -> None:
    """Here for the note of another writer."""
    saver = Saver(Store(str(in_memory)), 0, 2, max_wait=2.0)
    pieces = [full_piece("model.w", torch.ones(4))]
    for step in (1, 2, 3):
        saver.save(step, pieces, meta(step))
    (outcome,) = saver.poll()
    assert (outcome.step, outcome.state) == (3, "failed")
    assert "step 1 was still being written" in outcome.reason
    assert saver._sidecar.process.poll() is None
    saver.abandon()


def test_storage_that_takes_no_more_costs_the_save_and_nothing_else(in_memory: Path) -> None:
    store = Store(str(in_memory), retry=Retry(2, first=0.01))
    saver = Saver(store)
    pieces = [full_piece("model.w", torch.ones(100_000))]
    saver.save(1, pieces, meta(1))
    assert ended(saver, 1)[0].state == "published"
    _, most = resource.prlimit(sidecar(saver), resource.RLIMIT_FSIZE)
    resource.prlimit(sidecar(saver), resource.RLIMIT_FSIZE, (100_000, most))
    saver.save(2, pieces, meta(2))
    (outcome,) = ended(saver, 1)
    assert outcome.state == "failed"
    assert "File too large" in outcome.reason
    assert not any("step-00000002" in path for path in store.backend.list())
    resource.prlimit(sidecar(saver), resource.RLIMIT_FSIZE, (most, most))
    saver.save(3, pieces, meta(3))
    assert [(outcome.step, outcome.state) for outcome in saver.close()] == [(3, "published")]
    assert store.steps() == [1, 3]


PARENT = """
import os, signal, sys, torch
from orchestrator.checkpoint.pieces import full_piece
from orchestrator.checkpoint.saver import Saver
from orchestrator.checkpoint.commit_store import Store
saver = Saver(Store(sys.argv[1]))
saver.save(1, [full_piece("model.w", torch.ones(4))], {"position": 1, "receipt": ""})
while not saver.poll():
    pass
print(saver._sidecar.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_writing_process_dies_with_its_parent(in_memory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PARENT, str(in_memory)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    end = time.monotonic() + 10
    while time.monotonic() < end and os.path.exists(f"/proc/{pid}/cmdline"):
        if not Path(f"/proc/{pid}/cmdline").read_bytes():
            break
        time.sleep(0.01)
    else:
        assert not os.path.exists(f"/proc/{pid}")
    assert Store(str(in_memory)).steps() == [1]


def test_the_writing_process_imports_no_torch() -> None:
    code = "import orchestrator.checkpoint.sidecar, sys; print('torch' in sys.modules, 's3fs' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_close_is_bounded(in_memory: Path) -> None:
    saver = Saver(Store(str(in_memory)))
    saver.save(1, [full_piece("model.w", torch.ones(4))], meta(1))
    os.kill(sidecar(saver), signal.SIGSTOP)
    began = time.monotonic()
    outcomes = saver.close(timeout=0.2)
    assert time.monotonic() - began < 60
    assert {outcome.state for outcome in outcomes} <= {"failed", "published"}
    assert len(outcomes) == 1


class Driver:
    """In place of CUDA's runtime: it registers nothing and says so."""

    def __init__(self, code: int) -> None:
        self._code, self.asked = code, list[int]()

    def cudaHostRegister(self, at: int, size: int, flags: int) -> int:
        self.asked.append(size)
        return self._code


@pytest.mark.parametrize("code", [0, 712])
def test_a_failed_registration_is_forgotten_and_costs_only_speed(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    driver, forgotten = Driver(code), list[bool]()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(shared_memory, "_forget_error", lambda: forgotten.append(True))
    buffer = SharedBuffer()
    buffer.make_room(1000, pin=True)
    assert (buffer._pinned, forgotten) == (code == 0, [True] * (code != 0))
    assert driver.asked == [1000]
    buffer._pinned = False
    buffer.close()


def test_memory_is_pinned_while_training_goes_on(monkeypatch: pytest.MonkeyPatch, in_memory: Path) -> None:
    """A save waits for it, and says beforehand whether it would."""
    go, rooms = threading.Event(), list[tuple[int, bool]]()

    def make_room(_: SharedBuffer, size: int, pin: bool) -> None:
        assert go.wait(30)
        rooms.append((size, pin))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    saver = Saver(Store(str(in_memory)))
    with monkeypatch.context() as patch:
        patch.setattr(SharedBuffer, "make_room", make_room)
        patch.setattr(module, "room_for", lambda pieces: (1 << 20, True))
        assert saver.has_room
        saver.prepare([])
        assert not saver.has_room
        go.set()
        saver.wait_until_prepared()
    assert saver.has_room
    assert rooms == [(1 << 20, True)] * 2
    saver.close()


def test_a_step_computes_while_the_state_is_copied(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state may change once `finish_copy` has returned, and is committed as it was at the save."""
    store = Store(str(in_memory))
    saver = Saver(store)
    may_copy, finish = threading.Event(), SharedBuffer.finish
    monkeypatch.setattr(SharedBuffer, "finish", lambda buffer: may_copy.wait(30) and finish(buffer))
    tensor = torch.zeros(1000)
    for step in (1, 2, 3):
        tensor.fill_(step)
        may_copy.clear()
        saver.save(step, [full_piece("model.w", tensor)], meta(step), overlap=True)
        assert saver._copying is not None
        assert not saver._copying.done()
        threading.Timer(0.05, may_copy.set).start()
        if step < 3:
            saver.finish_copy()
        else:
            saver.tell_failed((-1,))  # whatever speaks to the writing process waits as well
        tensor.fill_(-1)
    assert [outcome.state for outcome in saver.close()] == ["published"] * 3
    for step in store.steps():
        assert torch.equal(
            store.reader(store.manifest(step)).read("model.w"), torch.full((1000,), float(step))
        )


def test_an_error_of_the_copy_is_raised_where_it_is_awaited(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(Store(str(in_memory)))
    with monkeypatch.context() as patch:
        patch.setattr(SharedBuffer, "finish", lambda _: 1 / 0)
        saver.save(1, [full_piece("model.w", torch.zeros(3))], meta(1), overlap=True)
        with pytest.raises(ZeroDivisionError):
            saver.finish_copy()
    saver.abandon()


@pytest.mark.gpu
def test_from_an_accelerator(in_memory: Path) -> None:
    store = Store(str(in_memory))
    saver = Saver(store)
    tensor = torch.arange(1_000_000, device="cuda", dtype=torch.float32)
    for step in range(1, 5):
        tensor.add_(1)
        saver.save(step, [full_piece("model.w", tensor)], meta(step))
    assert saver._buffers[0]._pinned
    assert saver._buffers[1]._pinned
    assert [outcome.state for outcome in saver.close()] == ["published"] * 4
    assert torch.equal(store.reader(store.manifest(4)).read("model.w"), tensor.cpu())


@pytest.mark.gpu
def test_a_snapshot_is_of_what_the_device_was_asked_before_it(in_memory: Path) -> None:
    """Work that is queued when the save is called is in it, and what is queued right after it is not."""
    store = Store(str(in_memory))
    saver = Saver(store)
    big, tensor = torch.randn(4096, 4096, device="cuda"), torch.zeros(1_000_000, device="cuda")
    for step in range(1, 9):
        for _ in range(20):
            big = (big @ big).clamp(-1, 1)  # keeps the device busy, so that the copy would come too early
        tensor.add_(1)
        saver.save(step, [full_piece("model.w", tensor), full_piece("model.part", tensor[:7])], meta(step))
        tensor.add_(1000)
        tensor.sub_(1000)
    saver.close()
    for step in store.steps():
        reader = store.reader(store.manifest(step))
        assert torch.equal(reader.read("model.w"), torch.full((1_000_000,), float(step)))
        assert torch.equal(reader.read("model.part"), torch.full((7,), float(step)))


@pytest.mark.gpu
def test_a_copy_waits_for_no_other_stream(in_memory: Path) -> None:
    buffer, other = SharedBuffer(), torch.cuda.Stream()
    piece, big = (
        full_piece("model.w", torch.ones(1000, device="cuda")),
        torch.randn(8192, 8192, device="cuda"),
    )
    buffer.fill([piece])
    done = torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(50):
            big = (big @ big).clamp(-1, 1)
        done.record()
    buffer.fill([piece])
    assert not done.query()
    torch.cuda.synchronize()
    buffer.close()
