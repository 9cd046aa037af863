"""Sends messages about a run to a webhook, from a separate thread, so that no run waits for it or fails because of
it.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time

from orchestrator.config.outcome import Outcome
from orchestrator.config.redact import redact
from orchestrator.observe.config import VARIABLE, NotifySpec, Occasion
from orchestrator.storage.row_line import Row

LOGGER = logging.getLogger("orchestrator.notify")
TIMEOUT = 10.0
"""Seconds to wait for an answer."""
PAUSES = (0.0, 1.0, 5.0, 25.0)
"""Seconds before each try. Retried are status 429 and 5xx, and requests without an answer."""
QUIET = 60.0
"""Minimum seconds between two messages about the same kind of event, except the end, so that a run that keeps failing
does not flood the channel.
"""
WAITING = 100
"""Maximum number of waiting messages; later ones are dropped."""
TELLING = 15.0
"""Seconds that the end of a run waits for the webhook."""
ENDS: dict[str, Occasion] = {Outcome.DONE: "done", Outcome.FAILED: "failed", Outcome.STOPPED: "stopped"}
_ATTENTION = ("skipped", "missing_rows", "missing_events", "ceiling", "controller_died")


def occasion_of(event: Row) -> Occasion | None:
    """Return the kind of message for an event; None if it needs none."""
    if event.get("phase") in ENDS:
        return ENDS[event["phase"]]
    if (event.get("cause") or {}).get("end") in ("silent", "still"):
        return "stalled"
    needs = event.get("saving") == "failed" or any(event.get(key) not in (None, []) for key in _ATTENTION)
    return "attention" if needs else None


class _Unset(LookupError):
    """The environment variable is not set."""


class Notifier:
    """Sends a message for each relevant event. Does nothing without `spec`."""

    def __init__(self, spec: NotifySpec | None, name: str, run: str) -> None:
        """`name` is the run's name, `run` the URI of its directory."""
        self._spec = spec
        self._name = name
        self._run = redact(run)
        self._messages: queue.Queue[str] = queue.Queue(WAITING)
        self._sent: dict[str, float] = {}
        self._thread: threading.Thread | None = None
        self._unsent = 0
        self.problem = ""

    def event(self, event: Row) -> None:
        """Send a message about an event if the job wants it. Returns immediately, and never raises."""
        occasion = occasion_of(event)
        if self._spec is None or occasion is None or occasion not in self._spec.on:
            return
        now = time.monotonic()
        if occasion not in ENDS.values() and now - self._sent.get(occasion, -QUIET) < QUIET:
            return
        self._sent[occasion] = now
        try:
            self._messages.put_nowait(self._text(occasion, event))
        except queue.Full:
            return
        self._unsent += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="notifier", daemon=True)
            self._thread.start()

    def close(self, timeout: float) -> None:
        """Wait up to this many seconds until everything is sent."""
        end = time.monotonic() + timeout
        while self._unsent and time.monotonic() < end:
            time.sleep(0.02)

    def _text(self, occasion: Occasion, event: Row) -> str:
        reasons = [str(event[key]) for key in ("first_fault", "reason", "explained") if event.get(key)]
        words = {"attention": "needs attention"}.get(occasion, occasion)
        position = f"at step {event.get('step', 0)} (attempt {event.get('attempt')})"
        return redact(f"{self._name} {words} {position}: {'; '.join(reasons)}\n{self._run}")

    def _work(self) -> None:
        while True:
            text = self._messages.get()
            try:
                self._send(text)
            except (
                Exception
            ) as error:  # urllib may raise anything, and the text may contain the URL, which is a secret
                why = str(error) if isinstance(error, _Unset) else type(error).__name__
                self.problem = f"the webhook could not be reached: {why}"
                LOGGER.info(self.problem)
            finally:
                self._unsent -= 1

    def _send(self, text: str) -> None:
        import urllib.error  # imported late: a recovery need not wait for it
        import urllib.request

        assert self._spec is not None
        data = json.dumps({"text": text}).encode()
        address = self._spec.webhook
        if (named := VARIABLE.fullmatch(address)) and not (address := os.environ.get(named[1], "")):
            raise _Unset(f"{named[0]} is not set where the run's controller is")
        request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
        for number, pause in enumerate(PAUSES, 1):
            time.sleep(pause)
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT):
                    return
            except urllib.error.HTTPError as error:
                if error.code != 429 and error.code < 500:
                    raise
                if number == len(PAUSES):
                    raise
            except OSError:
                if number == len(PAUSES):
                    raise
