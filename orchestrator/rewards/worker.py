"""A worker that scores answers: it forks a process for each reward, and kills a process that takes too long.

The worker enforces the `timeout` of a reward: it kills the process that scores an answer and reports the limit. If the
worker itself hangs, `scorer` replaces it after a longer time.

    python -m orchestrator.rewards.worker PARENT

PARENT is the process id of the process that asks. The first line on the standard input has the rewards, each later one
an answer and the number of a reward. Each answer gets one line on the standard output. The worker has one thread and
runs no code of the user's itself. It ends, with all processes below it, when its parent ends or closes its input.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import site
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from cluster.workers.json_lines import Lines, line_of, write
from orchestrator.rewards import confinement, unit_tests
from orchestrator.rewards.function_process import serve
from orchestrator.rewards.rules import NoAnswer, Refused, as_reply, expected

START_TIMEOUT = 120.0
"""Seconds for a process to import what it needs on a busy machine."""
MARK = "ORCHESTRATOR_REWARD_WORKER"
"""An environment variable that marks a worker's descendants, even after the worker is gone."""
LONGEST = 1 << 20
"""Bytes of a reply, which code that is scored may try to write as well."""
MOST_PRINTED = 1 << 16
"""Bytes of what a process prints during an answer that reach the log, which is kept in memory at first."""
LOOK_EVERY = 1.0
"""Seconds between checks whether the parent is alive, if the kernel does not notify."""


class Child:
    """A forked process that answers in lines."""

    def __init__(self, run: Callable[[int, int], None], others: list[int]) -> None:
        """Fork the process.

        Args:
            run: what it does with two descriptors, for requests and replies. It must not return.
            others: descriptors that the process closes.
        """
        requests, self.requests = os.pipe()
        replies, answers = os.pipe()
        self.output, printed = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            try:
                for ours in (self.requests, replies, self.output, *others):
                    os.close(ours)
                for standard in (1, 2):
                    os.dup2(printed, standard)
                os.close(printed)
                _become_ordinary(parent)
                run(requests, answers)
            except BrokenPipeError:  # the worker has ended
                pass
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(requests)
        os.close(answers)
        os.close(printed)
        os.set_blocking(self.output, False)
        self.prints = True
        """Whether it may still print."""
        self._printed = 0
        self.lines = Lines(replies, LONGEST)
        self.is_ready = False
        self.status: int | None = None
        """How it ended, as `os.waitpid` returns it; None while it runs."""

    def begin_answer(self) -> None:
        """Allow it to print as much as for any answer."""
        self._printed = 0

    def pass_on(self) -> None:
        """Write what it has printed to the log of the process that asks, and leave out what is too much."""
        for _ in range(16):  # it may print without end
            try:
                data = os.read(self.output, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self.prints = False
                return
            left = MOST_PRINTED - self._printed
            self._printed += len(data)
            shown = data[: max(left, 0)]
            if 0 <= left < len(data):
                shown += b"\n(a reward has printed more than this for one answer; the rest is left out)\n"
            with contextlib.suppress(OSError):
                write(2, shown)

    def ended(self) -> bool:
        """Return whether it has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is not None

    def how_it_ended(self) -> str:
        """Return how it ended, as a sentence without its subject."""
        code = os.waitstatus_to_exitcode(self.status or 0)
        if code >= 0:
            return f"ended its process with {code}"
        names = {number.value: number.name for number in signal.Signals}
        return f"ended its process by {names.get(-code, f'signal {-code}')}"

    def was_killed(self) -> bool:
        """Return whether it ended by SIGKILL, which someone else may have sent."""
        return (
            self.status is not None
            and os.WIFSIGNALED(self.status)
            and os.WTERMSIG(self.status) == signal.SIGKILL
        )

    def close(self) -> None:
        """Kill and reap it, and close its pipes."""
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            _, self.status = os.waitpid(self.pid, 0)
        self.pass_on()
        for end in (self.requests, self.lines.source, self.output):
            os.close(end)


def _become_ordinary(parent: int) -> None:
    """Undo in a forked process what the worker has set up for itself."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    confinement.die_with(parent)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


class Worker:
    """The loop of a worker."""

    def __init__(self, requests: int, replies: int, parent: int) -> None:
        self._lines = Lines(requests)
        self._replies = replies
        self._parent = parent
        self._children: dict[int, Child] = {}
        """The processes that call a reward, by its number."""
        self._rewards: list[dict[str, Any]] = []
        self._folder: str | None = None
        """The folder for the temporary folders of unit tests."""
        self._wake, wake = os.pipe()
        for end in (self._wake, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._own = [requests, replies, self._wake, wake]
        for number in (signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.end())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
        confinement.adopt_orphans()
        confinement.die_with(parent, signal.SIGUSR1)

    def run(self) -> NoReturn:
        """Serve until the parent ends or closes the pipe."""
        while True:
            while (request := self._lines.take()) is None:
                if self._wait([self._lines.source], LOOK_EVERY) and not self._lines.fill():
                    self.end()
            if "rewards" in request:
                self._rewards, self._folder = request["rewards"], request["folder"]
                sys.path += [root for root in request["roots"] if root not in sys.path]
                continue
            reward = self._rewards[request["reward"]]
            answer = request["answer"]
            if reward["kind"] == "unit_tests":
                reply = self._tested(reward, answer)
            else:
                reply = self._called(request["reward"], answer)
            confinement.kill_children({child.pid for child in self._children.values()})
            write(self._replies, line_of(reply))

    def end(self) -> NoReturn:
        """End with all processes below."""
        for child in self._children.values():
            with contextlib.suppress(OSError):
                os.kill(child.pid, signal.SIGKILL)
        confinement.kill_children()
        if self._folder is not None:
            unit_tests.remove(self._folder)
        os._exit(0)

    def _called(self, number: int, answer: dict[str, Any]) -> dict[str, Any]:
        """Return what the process of a reward says of an answer."""
        reward = self._rewards[number]
        child = self._children.get(number)
        if child is not None and child.ended():
            self._children.pop(number).close()
            child = None
        if child is None:
            child = self._children[number] = self._fork(lambda *pipes: serve(reward, *pipes), reward)
        try:
            reply = self._start_of(child) or self._reply_of(child, reward, answer)
        finally:
            stays = child.is_ready and not child.ended()
        if not stays or "ends" in reply:
            self._children.pop(number).close()
        if reward["kind"] == "math" and "limit" in reply:  # the answer's value is too large, so it is wrong
            reply["value"] = 0.0
        return reply

    def _start_of(self, child: Child) -> dict[str, Any]:
        """Wait until a process is ready. Returns the reply if it is not; empty if it is."""
        if child.is_ready:
            return {}
        line = self._next_line(child, START_TIMEOUT)
        if line is not None and "ready" in line:
            child.is_ready = True
            return {}
        what = child.how_it_ended() if child.ended() else f"did not start in {START_TIMEOUT:.0f} s"
        hint = "fix it, or raise the memory of the reward"
        return line or {"refused": what, "hint": hint, "again": child.was_killed()}

    def _reply_of(self, child: Child, reward: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        child.begin_answer()
        with contextlib.suppress(BrokenPipeError):
            write(child.requests, line_of(answer))
        return self._next_line(child, reward["timeout"]) or self._limit_of(child, reward)

    def _limit_of(self, child: Child, reward: dict[str, Any]) -> dict[str, Any]:
        """Return the problem of a process that has ended or is too slow."""
        if child.ended():
            return {"problem": child.how_it_ended(), "again": child.was_killed(), "limit": True}
        return {"problem": f"took longer than {reward['timeout']:g} s", "ends": True, "limit": True}

    def _tested(self, reward: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """Return the share of the tests that the code of an answer passes."""
        try:
            tests = unit_tests.column_tests(expected(reward, answer))
        except (Refused, NoAnswer) as error:
            return as_reply(error)
        folder = tempfile.mkdtemp(dir=self._folder)
        mark = {MARK: os.environ.get(MARK, "")}
        largest = int(reward["memory"] * 2**30)
        child = self._fork(
            lambda *pipes: unit_tests.become_test_process(folder, mark, largest, *pipes), reward
        )
        try:
            return self._passed(child, reward, unit_tests.code_of(answer["text"]), tests)
        finally:
            child.close()
            confinement.kill_children({child.pid for child in self._children.values()})
            unit_tests.remove(folder)

    def _passed(self, child: Child, reward: dict[str, Any], code: str, tests: list[str]) -> dict[str, Any]:
        token = secrets.token_hex(8)
        notes = []
        passed = 0
        with contextlib.suppress(BrokenPipeError):
            job = {"token": token, "code": code, "tests": tests, "folders": site.getsitepackages()}
            write(child.requests, line_of(job))
        if line := self._next_line(child, START_TIMEOUT):
            notes = line.get("notes", [])
        if problem := self._start_of(child):
            return problem
        deadline = time.monotonic() + reward["timeout"]
        while (left := deadline - time.monotonic()) > 0 and (line := self._next_line(child, left)):
            if line.get("token") != token:  # the code under test has written it
                continue
            if "passed" not in line:
                return {"value": passed / len(tests), "notes": notes}
            passed += bool(line["passed"])
        return self._limit_of(child, reward) | {"value": passed / len(tests), "notes": notes}

    def _fork(self, run: Callable[[int, int], None], reward: dict[str, Any]) -> Child:
        pipes = [
            end
            for child in self._children.values()
            for end in (child.requests, child.lines.source, child.output)
        ]

        def limited(requests: int, replies: int) -> None:
            confinement.limit_memory(int(reward["memory"] * 2**30))
            run(requests, replies)

        return Child(limited, [*self._own, *pipes])

    def _next_line(self, child: Child, seconds: float) -> dict[str, Any] | None:
        """Return the next line of a process; None if it has ended or gives none in that time."""
        deadline = time.monotonic() + seconds
        is_open = True
        while (now := time.monotonic()) < deadline:
            try:
                if (line := child.lines.take()) is not None:
                    child.pass_on()
                    return line
            except (ValueError, TypeError):  # its code has written into the pipe
                continue
            has_ended = child.ended()  # asked before the pipe is read, which may hold its last words
            sources = [child.lines.source] if is_open else []
            outputs = [child.output] if child.prints else []
            readable = self._wait(
                [*sources, *outputs, self._lines.source], 0.0 if has_ended else deadline - now
            )
            if self._lines.source in readable and not self._lines.fill():
                self.end()
            if child.output in readable:
                child.pass_on()
            if child.lines.source in readable:
                is_open = child.lines.fill()
            elif has_ended:
                break
        return None

    def _wait(self, sources: list[int], seconds: float) -> list[int]:
        """Wait until a descriptor has something to read, or a process ends; at most `LOOK_EVERY`."""
        readable, _, _ = select.select([*sources, self._wake], [], [], min(seconds, LOOK_EVERY))
        if self._wake in readable:
            readable.remove(self._wake)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        if os.getppid() != self._parent:
            self.end()
        return readable


def main() -> None:
    """Serve on the standard input and output."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what own code prints must not get among the replies
    os.close(nothing)
    worker = Worker(requests, replies, int(sys.argv[1]))
    try:
        worker.run()
    except BrokenPipeError:  # the parent has ended
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        worker.end()


if __name__ == "__main__":
    main()
