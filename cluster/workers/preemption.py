"""Preemption notices of a cloud, passed on to Ray as a drain of the node, which gangs then leave.

One poller on each node asks the cloud's own metadata service, by its documented interface and without credentials.
Another source may be a file that appears, or a URL that answers 200.
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
"""Seconds between polls; clouds give notice of between 30 seconds and two minutes."""
REQUEST_TIMEOUT = 1.0
"""Seconds that a response may take."""
SILENCE = 60.0
"""Seconds without an answer after which the log says so."""
GRACE = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""Seconds from the notice to the end of the machine."""
DEFAULT_GRACE = 30.0
"""The same for another source."""
AWS = "http://169.254.169.254/latest"
GCP = "http://metadata.google.internal/computeMetadata/v1/instance/preempted"
AZURE = "http://169.254.169.254/metadata"


class PreemptionNotices:
    """Polls `source` (aws, gcp, azure, a path, or a URL) until there is a notice, then drains this node once. Nothing
    that goes wrong meanwhile ends it: what does is told in the node's log of Ray, once, and tried again."""

    address = ""

    def __init__(self, source: str, node: str, drain: Callable[[float], bool] | None = None) -> None:
        self._source, self._node, self._drain = source, node, drain or drain_this_node
        threading.Thread(target=self._poll, name="preemption-notices", daemon=True).start()

    def _poll(self) -> None:
        self._await_notice()
        end, told = time.monotonic() + GRACE.get(self._source, DEFAULT_GRACE), False
        while why := self._refused(max(end - time.monotonic(), 1.0)):
            if not told:
                self._tell(f"the notice is not passed on ({why}), which is tried again")
            told = True
            time.sleep(POLL_INTERVAL)

    def _await_notice(self) -> None:
        answered, told = time.monotonic(), False
        while True:
            try:
                if has_notice(self._source):
                    return
                answered = time.monotonic()
            except Exception as error:  # a garbled answer must not end what nobody would start again
                if not told and time.monotonic() - answered >= SILENCE:
                    self._tell(f"{self._source} has not answered for {SILENCE:.0f} s ({_line(error)})")
                    told = True
            time.sleep(POLL_INTERVAL)

    def _refused(self, seconds: float) -> str:
        """Why the node is not drained; empty if it is."""
        try:
            return "" if self._drain(seconds) else "Ray does not accept it"
        except Exception as error:
            return _line(error)

    def _tell(self, text: str) -> None:
        print(f"preemption notices of {self._node}: {text}", file=sys.stderr, flush=True)


def has_notice(source: str) -> bool:
    """Whether the machine will be taken away. Raises some Exception if the source does not answer as it is meant to."""
    if source == "aws":
        return _aws()
    if source == "gcp":
        return _get(GCP, {"Metadata-Flavor": "Google"}).strip().upper() == "TRUE"
    if source == "azure":
        return _azure()
    return _is_there(source, {}) if "://" in source else os.path.exists(source)


def drain_this_node(seconds: float) -> bool:
    """Announce to Ray that this node ends in `seconds`: it accepts nothing new from now on. Returns whether Ray
    accepts."""
    import ray

    from cluster.workers import nodes

    return nodes.drain(ray.get_runtime_context().get_node_id(), seconds, "preemption notice")


def _aws() -> bool:
    """EC2 answers 200 at the address of the spot notice once there is one, and 404 before."""
    headers = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _get(f"{AWS}/api/token", headers, method="PUT")
    return _is_there(f"{AWS}/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})


def _azure() -> bool:
    """Azure tells all machines of a scale set of the events of each, with the names of those concerned."""
    header = {"Metadata": "true"}
    events = json.loads(_get(f"{AZURE}/scheduledevents?api-version=2020-07-01", header))["Events"]
    named = [
        each.get("Resources", []) for each in events if each.get("EventType") in ("Preempt", "Terminate")
    ]
    if not named:
        return False
    name = _get(f"{AZURE}/instance/compute/name?api-version=2021-02-01&format=text", header).strip()
    return any(name in names for names in named)


def _is_there(url: str, headers: dict[str, str]) -> bool:
    """Whether something answers 200 there, and not 404."""
    try:
        _get(url, headers)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return False
        raise
    return True


def _get(url: str, headers: dict[str, str], method: str = "GET") -> str:
    """The body of the response. Raises OSError unless its status is 200."""
    request = urllib.request.Request(url, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT) as response:
        if response.status != 200:
            raise OSError(f"{url} answers {response.status}")
        return str(response.read().decode())


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
