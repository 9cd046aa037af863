"""Word from a cloud that this machine will be taken away, passed on to Ray: gangs leave drained nodes.

One poller a node asks what the cloud itself answers on the machine, without credentials. What is asked and how is
each cloud's documented interface; another source is a file that appears, or a URL that answers 200.
"""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

EVERY = 2.0
"""Seconds between questions; clouds give between 30 seconds and two minutes."""
TIMEOUT = 1.0
"""Seconds that an answer may take."""
GRACE = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""Seconds from the notice to the end."""
LEAST = 30.0
"""The same for another source."""
AWS = "http://169.254.169.254/latest"
GCP = "http://metadata.google.internal/computeMetadata/v1/instance/preempted"
AZURE = "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"


class PreemptionNotices:
    """Asks `source` (aws, gcp, azure, a path, or a URL) until there is a notice, and then drains this node once."""

    address = ""

    def __init__(self, source: str, node: str, drain: Callable[[float], None] | None = None) -> None:
        self._source, self._drain = source, drain or drain_this_node
        threading.Thread(target=self._watch, name="notices", daemon=True).start()

    def _watch(self) -> None:
        while not noticed(self._source):
            time.sleep(EVERY)
        self._drain(GRACE.get(self._source, LEAST))


def noticed(source: str) -> bool:
    """Whether the machine will be taken away; no answer is no notice."""
    try:
        if source == "aws":
            return _aws()
        if source == "gcp":
            return _get(GCP, {"Metadata-Flavor": "Google"}).strip().upper() == "TRUE"
        if source == "azure":
            events = json.loads(_get(AZURE, {"Metadata": "true"})).get("Events", [])
            return any(event.get("EventType") in ("Preempt", "Terminate") for event in events)
        if "://" in source:
            _get(source, {})
            return True
        return os.path.exists(source)
    except (OSError, ValueError):
        return False


def drain_this_node(seconds: float) -> None:
    """Tell Ray that this node ends in so many seconds: it takes nothing new from now on."""
    import ray

    from cluster.workers import nodes

    nodes.drain(ray.get_runtime_context().get_node_id(), seconds, "notice of the cloud")


def _aws() -> bool:
    """A spot notice is there when its address answers 200; it answers 404 before."""
    headers = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _get(f"{AWS}/api/token", headers, method="PUT")
    _get(f"{AWS}/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    return True


def _get(url: str, headers: dict[str, str], method: str = "GET") -> str:
    """The text at an address. Raises OSError unless the answer is 200."""
    request = urllib.request.Request(url, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        if answer.status != 200:
            raise OSError(f"{url} answers {answer.status}")
        return str(answer.read().decode())
