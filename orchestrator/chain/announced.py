"""The status of a stage that has no controller, and how another process asks it to stop."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from cluster.workers.stop_signals import held_interruptions
from orchestrator.config.errors import InputError
from orchestrator.controller.stop_file import REQUEST, StopRequests
from orchestrator.storage.process_identity import lineage
from orchestrator.storage.run_directory import RunDir

STATUS = "status.json"
EVERY = 1.0
"""Seconds between two writes of the status, and between two looks for a request to stop."""


@contextlib.contextmanager
def announced(run: RunDir, note: str) -> Iterator[None]:
    """Write status.json of a stage during the block. If another process asks the stage to stop, the block is
    interrupted, as by Ctrl-C.

    Both files are removed at the end, so they remain only where this process was killed. A thread that is not the main
    one cannot be interrupted, and announces nothing.

    Args:
        run: the directory of the stage, on the local file system.
        note: what the stage does, as text for people.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    os.makedirs(run.path, exist_ok=True)
    processes = lineage(1)  # nothing starts this process again, as Ray does with a controller
    requests = StopRequests(run, processes[0])
    watch = _Watch(run, {"phase": "prepare", "started": time.time(), "note": note, "processes": processes})
    thread = threading.Thread(target=partial(watch.until_end, requests), name="stage status", daemon=True)
    thread.start()
    noticed = False
    try:
        yield
    except KeyboardInterrupt:
        noticed = True
        raise
    finally:
        with held_interruptions():
            watch.ended.set()
            thread.join()
            requests.close()
            for name in (STATUS, REQUEST):
                with contextlib.suppress(OSError):
                    run.remove(name)
    if watch.asked and not noticed:  # Python drops an exception in some places, such as the hooks of a fork
        raise KeyboardInterrupt


class _Watch:
    """Writes a status again and again, and interrupts the main thread once it is asked to."""

    def __init__(self, run: RunDir, status: dict[str, Any]) -> None:
        self.ended = threading.Event()
        self.asked = False
        """Whether another process has asked for the end."""
        self._run = run
        self._status = status

    def until_end(self, requests: StopRequests) -> None:
        """Work until `ended` is set."""
        while not self.ended.is_set():
            with contextlib.suppress(InputError, OSError):  # a missing status stops nothing
                self._run.write_json(STATUS, self._status | {"time": time.time()})
            if not self.asked and requests.look():
                self.asked = True
                _thread.interrupt_main(signal.SIGTERM)  # a shell may ignore SIGINT for its background jobs
            self.ended.wait(EVERY)
