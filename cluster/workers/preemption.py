"""Preemption notices of a cloud, passed on to Ray as a drain of the node, which gangs then leave.

One poller on each node asks the cloud's own metadata service, by its documented interface and without credentials.
Another source may be a file that appears, or a URL that answers 200.
"""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

POLL_INTERVAL = 2.0
"""Seconds between polls; clouds give notice of between 30 seconds and two minutes."""
REQUEST_TIMEOUT = 1.0
"""Seconds that a response may take."""
GRACE = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""Seconds from the notice to the end of the machine."""
DEFAULT_GRACE = 30.0
"""The same for another source."""
AWS = "http://169.254.169.254/latest"
GCP = "http://metadata.google.internal/computeMetadata/v1/instance/preempted"
AZURE = "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"


class PreemptionNotices:
    """Polls `source` (aws, gcp, azure, a path, or a URL) until there is a notice, then drains this node once."""

    address = ""

    def __init__(self, source: str, node: str, drain: Callable[[float], None] | None = None) -> None:
        self._source, self._drain = source, drain or drain_this_node
        threading.Thread(target=self._poll, name="preemption-notices", daemon=True).start()

    def _poll(self) -> None:
        while not has_notice(self._source):
            time.sleep(POLL_INTERVAL)
        self._drain(GRACE.get(self._source, DEFAULT_GRACE))


def has_notice(source: str) -> bool:
    """Whether the machine will be taken away; no response counts as no notice."""
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
    """Announce to Ray that this node ends in `seconds`: it accepts nothing new from now on."""
    import ray

    from cluster.workers import nodes

    nodes.drain(ray.get_runtime_context().get_node_id(), seconds, "preemption notice")


def _aws() -> bool:
    """EC2 answers 200 at the address of the spot notice once there is one, and 404 before."""
    headers = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _get(f"{AWS}/api/token", headers, method="PUT")
    _get(f"{AWS}/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    return True


def _get(url: str, headers: dict[str, str], method: str = "GET") -> str:
    """The body of the response. Raises OSError unless its status is 200."""
    request = urllib.request.Request(url, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT) as response:
        if response.status != 200:
            raise OSError(f"{url} answers {response.status}")
        return str(response.read().decode())
