"""The trainer's end of a worker: a process, its pipes, and the question that it is busy with.

The worker enforces the `timeout` of a reward. The deadline kept here is later: `scorer` uses it to replace a worker
that hangs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from typing import Any

from cluster.workers.json_lines import Lines, line_of
from cluster.workers.program import command_of, environment_of_ranks
from orchestrator.rewards.confinement import IS_LINUX
from orchestrator.rewards.unit_tests import remove
from orchestrator.rewards.worker import MARK

PROGRAM = "orchestrator.rewards.worker"
GRACE = 5.0
"""Seconds for a worker to end what is below it."""


class WorkerProcess:
    """A worker. It is started without a fork of this process's memory, so other threads do no harm."""

    def __init__(self, rewards: list[dict[str, Any]], roots: list[str]) -> None:
        """Start the process.

        Args:
            rewards: the specs of all rewards.
            roots: folders in which own code is found too.
        """
        self._mark = secrets.token_hex(8)
        has_tests = any(reward["kind"] == "unit_tests" for reward in rewards)
        # Many workers share a machine, threads count as memory, and the order of a set must not differ between workers.
        environment = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", MARK: self._mark}
        self._process = subprocess.Popen(
            command_of(PROGRAM, str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment_of_ranks() | environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._folder = tempfile.mkdtemp(prefix="orchestrator-rewards-") if has_tests else None
        self._requests = self._process.stdin.fileno()
        os.set_blocking(self._requests, False)
        self._lines = Lines(self._process.stdout.fileno())
        self._unsent = memoryview(line_of({"rewards": rewards, "roots": roots, "folder": self._folder}))
        self.task: Any = None
        """Its present task; None if it is free."""
        self.deadline = 0.0
        """The monotonic time after which the worker counts as stuck, see `scorer.ANSWERS`."""

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(self, task: Any, question: dict[str, Any], seconds: float) -> None:
        """Send a question. Sets the deadline of its reply, which the caller enforces."""
        self.task, self.deadline = task, time.monotonic() + seconds
        self._unsent = memoryview(bytes(self._unsent) + line_of(question))
        self.send()

    def send(self) -> None:
        """Send as much as the pipe takes. A process that has ended is noticed by `reply`."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self._requests, self._unsent) :]

    @property
    def descriptors(self) -> tuple[int, int | None]:
        """The descriptors to wait for: one to read from, and one to write to if data is unsent."""
        return self._lines.source, self._requests if self._unsent else None

    def reply(self) -> dict[str, Any] | None:
        """Read what is there, and return a reply if it is complete. Raises EOFError if the process has ended."""
        if not self._lines.fill():
            raise EOFError
        return self._lines.take()

    def close(self) -> None:
        """End the process and all processes below it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if self.task is not None:
            self._process.terminate()
        try:
            self._process.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        if self._process.returncode:  # otherwise it has done all of this itself
            _kill_marked(f"{MARK}={self._mark}".encode())
            if self._folder is not None:
                remove(self._folder)


def _kill_marked(mark: bytes) -> None:
    """Kill the processes that have the mark in their environment, and those that they start during the kill (Linux)."""
    deadline, is_left = time.monotonic() + GRACE, True
    while is_left and time.monotonic() < deadline:
        is_left = False
        for name in filter(str.isdecimal, os.listdir("/proc") if IS_LINUX else ()):
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/environ", "rb") as file:
                    is_marked = mark in file.read().split(b"\0")
                if is_marked:
                    is_left = True
                    os.kill(int(name), signal.SIGKILL)
        time.sleep(0.01)
