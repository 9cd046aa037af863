"""The checks of a job beside the start of Ray: both take seconds, and neither needs the other."""

from __future__ import annotations

import threading
from collections.abc import Callable

Likely = Callable[[], None]
"""Is called once nothing is wrong of what is checked in an instant: what begins then is seldom in vain."""


class Checks:
    """Runs `check` in a thread."""

    def __init__(self, check: Callable[[Likely], object]) -> None:
        self._check = check
        self._error: BaseException | None = None
        self._likely, self._done = threading.Event(), threading.Event()
        # One that imports a library cannot be ended: a command that is interrupted does not wait for it.
        threading.Thread(target=self._work, name="checks", daemon=True).start()

    def wait_until_likely(self) -> None:
        """Wait until the rest is likely to pass. Raises what the check has raised before."""
        self._likely.wait()
        if self._done.is_set():
            self.wait()

    def wait(self) -> None:
        """Wait for the end of the check. Raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            self._check(self._likely.set)
        except BaseException as error:  # is raised where it is waited for
            self._error = error
        finally:
            self._done.set()
            self._likely.set()
