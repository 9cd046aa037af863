"""How the controller starts and ends the process that copies a run's rows and events to its sinks."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading

from cluster.workers.program import command_of
from orchestrator.observe.sinks.config import SinkSpec
from orchestrator.storage.run_directory import RunDir
from workloads.errors import WorkloadError
from workloads.own.object_reference import root_of

CLOSING = 15.0
"""Seconds that the end of a run waits for its sinks."""
LOGGER = logging.getLogger("orchestrator.sinks")


class SinkProcess:
    """The sink process, seen from the controller. Does nothing for a job without sinks."""

    def __init__(self, sinks: SinkSpec | None, run: RunDir) -> None:
        """Start the process if the job has sinks.

        Args:
            sinks: the key `sinks` of the job; None for no sinks.
            run: the run directory.
        """
        self._process: subprocess.Popen[str] | None = None
        if sinks is None:
            return
        folders: list[str] = []
        for user_sink in sinks.own:  # found here, so the process finds them too
            with contextlib.suppress(WorkloadError):  # the process reports what is missing; the run continues
                folders.append(str(root_of(user_sink.use)))
        self._process = subprocess.Popen(
            command_of("orchestrator.observe.sinks.follow", run.uri, str(os.getpid()), *folders),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._log, name="sinks", daemon=True)
        self._reader.start()

    def _log(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            LOGGER.info("sinks: %s", line.rstrip())

    def close(self) -> None:
        """Wait up to CLOSING seconds until everything is delivered, then end the process."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSING)
        except subprocess.TimeoutExpired:
            LOGGER.info("sinks: not all was delivered within %.0f s", CLOSING)
            self._process.kill()
            self._process.wait()
        self._reader.join(CLOSING)  # the last lines of the process are logged
