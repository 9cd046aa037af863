"""Notices as the clouds give them, from a server that answers as theirs do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cluster.workers import preemption as notices
from cluster.workers.preemption import PreemptionNotices, has_notice

ANSWERS: dict[str, str] = {}
"""What the server says by method and path; everything else is a 404."""


class Metadata(BaseHTTPRequestHandler):
    """Refuses who does not send the headers that each cloud asks for."""

    def do_GET(self) -> None:
        self._answer("GET", {"/gcp": ("Metadata-Flavor", "Google"), "/azure": ("Metadata", "true")})

    def do_PUT(self) -> None:
        self._answer("PUT", {"/aws/api/token": ("X-aws-ec2-metadata-token-ttl-seconds", "60")})

    def _answer(self, method: str, needed: dict[str, tuple[str, str]]) -> None:
        if self.path.startswith("/aws/meta-data"):
            needed = {self.path: ("X-aws-ec2-metadata-token", ANSWERS["PUT /aws/api/token"])}
        name, value = needed.get(self.path, ("", ""))
        text = ANSWERS.get(f"{method} {self.path}")
        known = text is not None and (not name or self.headers.get(name) == value)
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write((text or "").encode() if known else b"")

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    found = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{found.server_address[1]}"
    monkeypatch.setattr(notices, "AWS", f"{url}/aws")
    monkeypatch.setattr(notices, "GCP", f"{url}/gcp")
    monkeypatch.setattr(notices, "AZURE", f"{url}/azure")
    ANSWERS.clear()
    ANSWERS.update(
        {"PUT /aws/api/token": "secret", "GET /gcp": "FALSE", "GET /azure": json.dumps({"Events": []})}
    )
    yield url
    found.shutdown()
    found.server_close()


PREEMPT = json.dumps({"Events": [{"EventType": "Preempt"}]})
REBOOT = json.dumps({"Events": [{"EventType": "Reboot"}]})


@pytest.mark.parametrize(
    ("source", "place", "text", "is_one"),
    [
        ("aws", "GET /aws/meta-data/spot/instance-action", '{"action": "terminate"}', True),
        ("gcp", "GET /gcp", "TRUE", True),
        ("azure", "GET /azure", PREEMPT, True),
        ("azure", "GET /azure", REBOOT, False),
        ("azure", "GET /azure", "no JSON", False),
    ],
)
def test_a_notice_is_known_when_it_comes(source: str, place: str, text: str, is_one: bool) -> None:
    assert not has_notice(source)
    ANSWERS[place] = text
    assert has_notice(source) == is_one


def test_a_file_or_an_address_is_a_source_too(server: str, tmp_path: Path) -> None:
    path = tmp_path / "taken-away"
    assert not has_notice(str(path))
    path.touch()
    assert has_notice(str(path))
    assert not has_notice(f"{server}/soon")
    ANSWERS["GET /soon"] = ""
    assert has_notice(f"{server}/soon")


def test_no_answer_is_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "AWS", "http://127.0.0.1:1")
    assert not has_notice("aws")


def test_the_node_is_drained_once_with_the_cloud_s_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "POLL_INTERVAL", 0.01)
    drained, seen = [], threading.Event()

    def drain(seconds: float) -> None:
        drained.append(seconds)
        seen.set()

    PreemptionNotices("gcp", "127.0.0.1", drain)
    assert not seen.wait(0.1)
    ANSWERS["GET /gcp"] = "TRUE"
    assert seen.wait(10)
    assert drained == [30.0]
