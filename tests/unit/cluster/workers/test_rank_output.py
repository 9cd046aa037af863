"""What ranks print is kept beyond their end, copied once and in order, and never in their way."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from cluster.workers import rank_output
from cluster.workers.gang import FINISHED, Bundle
from cluster.workers.process_gang import ProcessGang
from cluster.workers.rank_output import OutputTarget, RankOutput, StampedStream, last_lines, log_of
from cluster.workers.worker_context import RankInfo, WorkerContext

CONTEXT = WorkerContext(RankInfo(0, 1, 0, "127.0.0.1"))


class FileWriter:
    """Writes to one local file, and fails as often as `failures` says."""

    failures = 0

    def __init__(self, folder: str, name: str) -> None:
        self._path = Path(folder) / name

    def append(self, data: bytes) -> None:
        if FileWriter.failures:
            FileWriter.failures -= 1
            raise OSError("no storage")
        with self._path.open("ab") as file:
            file.write(data)


def target(folder: Path) -> OutputTarget:
    return OutputTarget(f"{__name__}:FileWriter", str(folder))


def written(output: RankOutput, data: bytes) -> None:
    with open(output.path, "ab", buffering=0) as file:
        file.write(data)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_output, "INTERVAL", 0.01)
    FileWriter.failures = 0


def test_all_is_copied_once_though_storage_fails_and_memory_is_given_back(tmp_path: Path) -> None:
    FileWriter.failures = 5
    output = RankOutput(log_of(3), target(tmp_path))
    expected = b""
    for number in range(40):
        part = f"{number} ".encode() * 20_000
        written(output, part)
        expected += part
        time.sleep(0.002)
    output.close()
    output.join(5)
    assert (tmp_path / "rank-3.log").read_bytes() == expected
    assert output.tail() == expected[-rank_output.TAIL_BYTES :].decode()


def test_memory_holds_no_more_than_the_end(tmp_path: Path) -> None:
    output = RankOutput(log_of(0), target(tmp_path))
    written(output, b"x" * (4 << 20))
    deadline = time.monotonic() + 10
    while os.stat(output.path).st_blocks * 512 > 2 * rank_output.TAIL_BYTES and time.monotonic() < deadline:
        time.sleep(0.01)
    assert os.stat(output.path).st_blocks * 512 <= 2 * rank_output.TAIL_BYTES
    assert output.tail() == "x" * rank_output.TAIL_BYTES
    output.close()
    output.join(5)
    assert not os.path.exists(output.path)


def test_without_a_target_the_end_is_kept() -> None:
    output = RankOutput(log_of(0), None)
    written(output, b"a\nb\n")
    output.close()
    output.join(5)
    assert last_lines(output.tail(), 1) == ["b"]


def test_lines_have_time_and_step_and_a_broken_file_stops_nobody() -> None:
    reader, writer = os.pipe()
    stream = StampedStream(writer, lambda: CONTEXT.step + 1)
    print("one\ntw", end="", file=stream)
    print("o", file=stream)
    CONTEXT.report(6)
    print("10%\r20%\r", end="", file=stream, flush=True)
    print("\udcff", file=stream)
    lines = os.read(reader, 1000).decode().splitlines()
    assert [line[12:] for line in lines] == [": one", ": two", " step 7: 20%", " step 7: \\udcff"]
    os.close(reader)
    os.close(writer)
    print("nobody hears this", file=stream)


def test_a_process_that_dies_leaves_its_words_and_a_hanging_one_its_stacks(tmp_path: Path) -> None:
    gang = ProcessGang()
    with contextlib.closing(gang):
        gang.start(2, Bundle(), f"{__name__}:dies_or_hangs", {}, output=target(tmp_path))
        deadline = time.monotonic() + 60
        while "hangs" not in gang.output(1) and time.monotonic() < deadline:
            time.sleep(0.05)
        while gang.poll(0, 0.05).ranks[0].state not in FINISHED and time.monotonic() < deadline:
            pass
        assert last_lines(gang.output(0))[0].endswith(": about to die")
        assert "Segmentation fault" in gang.output(0)
        gang.print_stacks()
        while "in hang_here" not in gang.output(1) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "in hang_here" in gang.output(1)
        gang.stop()
    assert "Segmentation fault" in (tmp_path / "rank-0.log").read_text()
    assert "in hang_here" in (tmp_path / "rank-1.log").read_text()


def dies_or_hangs(config: dict[str, object], context: WorkerContext) -> None:
    """Rank 0 prints and dies of a signal, rank 1 hangs."""
    if context.rank_info.rank == 0:
        sys.stdout.write("about to die\n")
        os.kill(os.getpid(), signal.SIGSEGV)
    print("hangs")
    hang_here()


def hang_here() -> None:
    """Wait for what does not come."""
    threading.Event().wait()
