"""A run in a separate process on this machine, as a submission that a `Run` can query."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time

from cluster.jobs.ray_jobs import RUNNING, Submission
from orchestrator.api.job import Job
from orchestrator.config.outcome import Outcome
from orchestrator.storage.run_directory import RunDir

PROGRAM = "orchestrator: "
"""The prefix of the line in which a command says why it ended."""


class BackgroundRun:
    """`orchestrator run` as a child process. It goes on when this process ends."""

    def __init__(self, job: Job, run: RunDir, address: str | None, until: int | None, priority: int) -> None:
        """Start the command.

        Args:
            job: the job to train.
            run: the run directory.
            address: the address of a Ray cluster; None to start Ray on this machine.
            until: end after this step, with a checkpoint; None to train to the end.
            priority: the priority in the cluster's queue; higher ones run first.
        """
        words = [sys.executable, "-P", "-m", "orchestrator", "run", "/dev/stdin", "--run-dir", run.uri]
        words += ["--progress", "none"]
        words += ["--address", address] if address is not None else []
        words += ["--until", str(until)] if until is not None else []
        words += ["--priority", str(priority)] if priority else []
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        path = os.pathsep.join(filter(None, sys.path))  # the command finds own code where this process does
        # A new session: an interrupt of the notebook's or the terminal's processes does not reach it.
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._output,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._is_stopped = False
        assert self._process.stdin is not None
        # If the command has ended already, its last line on standard error says why.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(job.to_yaml().encode())
        self.submission = Submission(
            id=f"process {self._process.pid}",
            name=job.name,
            run_dir=run.uri,
            priority=priority,
            state=RUNNING,
            entrypoint=" ".join(words),
            started=time.time(),
            ended=None,
            exit_code=None,
            message="",
        )

    def get(self, _: str) -> Submission:
        """Return the present state of the command."""
        code = self._process.poll()
        if code is None or self.submission.has_ended:
            return self.submission
        outcome = Outcome.of_exit(code) or (Outcome.STOPPED if self._is_stopped else Outcome.FAILED)
        self.submission = dataclasses.replace(
            self.submission, state=str(outcome), ended=time.time(), exit_code=code, message=self._line(code)
        )
        return self.submission

    def stop(self, _: str) -> None:
        """Ask the command once to save a checkpoint and end. A second request would end it at once."""
        if not self._is_stopped:
            self._is_stopped = True
            self._process.terminate()

    def _line(self, code: int) -> str:
        """Why the command ended: its last line on standard error."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return lines[-1].removeprefix(PROGRAM) if lines else f"exit code {code}"
