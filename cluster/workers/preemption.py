"""Pass preemption notices of a cloud on to Ray as a drain of the node, which makes gangs leave it.

A poller on each node asks the cloud's metadata service, by its documented interface and without credentials. Another
source may be a file that appears, or a URL that answers 200.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

POLL_INTERVAL = 2.0
"""Seconds between two polls. Clouds give between 30 seconds and two minutes of notice."""
REQUEST_TIMEOUT = 1.0
"""Seconds to wait for a response."""
SILENCE = 60.0
"""Seconds without an answer after which that is logged."""
GRACE = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""Seconds from the notice to the end of the machine."""
DEFAULT_GRACE = 30.0
"""The same for other sources."""
AWS = "http://169.254.169.254/latest"
GCP = "http://metadata.google.internal/computeMetadata/v1/instance/preempted"
AZURE = "http://169.254.169.254/metadata"


class PreemptionNotices:
    """Polls `source` (aws, gcp, azure, a path, or a URL) until there is a notice, and then drains this node once.

    No error ends the polling. An error is written to the node's Ray log once, and the poll is repeated.
    """

    address = ""

    def __init__(self, source: str, node: str, drain: Callable[[float], bool] | None = None) -> None:
        self._source = source
        self._node = node
        self._drain = drain or drain_this_node
        threading.Thread(target=self._poll, name="preemption-notices", daemon=True).start()

    def _poll(self) -> None:
        self._await_notice()
        end = time.monotonic() + GRACE.get(self._source, DEFAULT_GRACE)
        is_logged = False
        while why := self._refused(max(end - time.monotonic(), 1.0)):
            if not is_logged:
                self._log(f"the notice was not passed on ({why}); trying again")
            is_logged = True
            time.sleep(POLL_INTERVAL)

    def _await_notice(self) -> None:
        answered_at = time.monotonic()
        is_logged = False
        while True:
            try:
                if has_notice(self._source):
                    return
                answered_at = time.monotonic()
            except (
                Exception
            ) as error:  # even a garbled answer must not end the thread, which is never restarted
                if not is_logged and time.monotonic() - answered_at >= SILENCE:
                    self._log(f"{self._source} has not answered for {SILENCE:.0f} s ({_line(error)})")
                    is_logged = True
            time.sleep(POLL_INTERVAL)

    def _refused(self, seconds: float) -> str:
        """Drain the node. Return why that failed; empty if it did not."""
        try:
            return "" if self._drain(seconds) else "Ray does not accept it"
        except Exception as error:
            return _line(error)

    def _log(self, text: str) -> None:
        print(f"preemption notices of {self._node}: {text}", file=sys.stderr, flush=True)


def has_notice(source: str) -> bool:
    """Return whether the machine will be taken away. Raises an exception if the source does not answer correctly."""
    if source == "aws":
        return _aws()
    if source == "gcp":
        return _get(GCP, {"Metadata-Flavor": "Google"}).strip().upper() == "TRUE"
    if source == "azure":
        return _azure()
    return _exists(source, {}) if "://" in source else os.path.exists(source)


def drain_this_node(seconds: float) -> bool:
    """Announce to Ray that this node ends in `seconds`, so that it accepts no new work. Return whether Ray accepts."""
    import ray

    from cluster.workers import nodes

    return nodes.drain(ray.get_runtime_context().get_node_id(), seconds, "preemption notice")


def _aws() -> bool:
    """EC2 answers 200 at the address of the spot notice once there is one, and 404 before."""
    headers = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _get(f"{AWS}/api/token", headers, method="PUT")
    return _exists(f"{AWS}/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})


def _azure() -> bool:
    """Azure tells every machine of a scale set about the events of all, with the names of the affected machines."""
    header = {"Metadata": "true"}
    events = json.loads(_get(f"{AZURE}/scheduledevents?api-version=2020-07-01", header))["Events"]
    named = [
        each.get("Resources", []) for each in events if each.get("EventType") in ("Preempt", "Terminate")
    ]
    if not named:
        return False
    name = _get(f"{AZURE}/instance/compute/name?api-version=2021-02-01&format=text", header).strip()
    return any(name in names for names in named)


def _exists(url: str, headers: dict[str, str]) -> bool:
    """Whether the URL answers 200, as opposed to 404."""
    try:
        _get(url, headers)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return False
        raise
    return True


def _get(url: str, headers: dict[str, str], method: str = "GET") -> str:
    """Return the body of the response. Raises OSError unless its status is 200."""
    request = urllib.request.Request(url, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT) as response:
        if response.status != 200:
            raise OSError(f"{url} answers {response.status}")
        return str(response.read().decode())


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
