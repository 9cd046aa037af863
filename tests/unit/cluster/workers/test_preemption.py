"""Notices as the clouds give them, from a server that answers as theirs do."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cluster.workers import preemption as notices
from cluster.workers.preemption import PreemptionNotices, has_notice

AZURE_EVENTS = "/azure/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/azure/instance/compute/name?api-version=2021-02-01&format=text"
ANSWERS: dict[str, str] = {}
"""What the server says by method and path; everything else is a 404."""


class Metadata(BaseHTTPRequestHandler):
    """Refuses who does not send the headers that each cloud asks for."""

    def do_GET(self) -> None:
        azure = dict.fromkeys((AZURE_EVENTS, AZURE_NAME), ("Metadata", "true"))
        self._answer("GET", {"/gcp": ("Metadata-Flavor", "Google"), **azure})

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
        {
            "PUT /aws/api/token": "secret",
            "GET /gcp": "FALSE",
            f"GET {AZURE_EVENTS}": json.dumps({"Events": []}),
            f"GET {AZURE_NAME}": "spot_1",
        }
    )
    monkeypatch.setattr(notices, "POLL_INTERVAL", 0.01)
    yield url
    found.shutdown()
    found.server_close()


def events(kind: str, *names: str) -> str:
    """What Azure tells every machine of a scale set of those that are named."""
    more = {"EventId": "1", "EventType": "Freeze", "Resources": ["spot_1"], "EventStatus": "Scheduled"}
    return json.dumps(
        {"DocumentIncarnation": 3, "Events": [more, {**more, "EventType": kind, "Resources": names}]}
    )


@pytest.mark.parametrize(
    ("source", "place", "text", "is_one"),
    [
        ("aws", "GET /aws/meta-data/spot/instance-action", '{"action": "terminate"}', True),
        ("gcp", "GET /gcp", "TRUE", True),
        ("azure", f"GET {AZURE_EVENTS}", events("Preempt", "spot_1"), True),
        ("azure", f"GET {AZURE_EVENTS}", events("Terminate", "spot_17", "spot_1"), True),
        ("azure", f"GET {AZURE_EVENTS}", events("Preempt", "spot_17"), False),
        ("azure", f"GET {AZURE_EVENTS}", events("Reboot", "spot_1"), False),
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


class Drain:
    """Answers as it is told to: it raises an Exception, or returns whether it accepts."""

    def __init__(self, *answers: Exception | bool) -> None:
        self._answers, self.asked, self.accepted = list(answers), list[float](), threading.Event()

    def __call__(self, seconds: float) -> bool:
        self.asked.append(seconds)
        answer = self._answers.pop(0) if self._answers else True
        if isinstance(answer, Exception):
            raise answer
        if answer:
            self.accepted.set()
        return answer


def test_the_node_is_drained_once_with_the_cloud_s_grace() -> None:
    drain = Drain()
    PreemptionNotices("gcp", "127.0.0.1", drain)
    assert not drain.accepted.wait(0.1)
    ANSWERS["GET /gcp"] = "TRUE"
    assert drain.accepted.wait(10)
    assert drain.asked == [pytest.approx(30.0, abs=1.0)]


def test_a_drain_is_tried_until_ray_accepts_it_in_what_is_left_of_the_grace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    drain = Drain(RuntimeError("the GCS\ndoes not answer"), False, True)
    PreemptionNotices(str(tmp_path), "10.0.0.7", drain)
    assert drain.accepted.wait(10)
    assert len(drain.asked) == 3
    assert drain.asked == sorted(drain.asked, reverse=True)
    assert len(set(drain.asked)) == 3
    said = "the notice was not passed on (RuntimeError: the GCS does not answer); trying again\n"
    assert capfd.readouterr().err == f"preemption notices of 10.0.0.7: {said}"


def test_a_garbled_answer_does_not_end_the_polling_and_a_silent_source_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notices, "SILENCE", 0.0)
    listener = socket.create_server(("127.0.0.1", 0))
    source = f"http://127.0.0.1:{listener.getsockname()[1]}/soon"
    drain = Drain()
    PreemptionNotices(source, "10.0.0.7", drain)
    answers = [b"garbage\r\n\r\n"] * 3 + [b"HTTP/1.0 404 No\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n"]
    listener.settimeout(10)
    for answer in answers:
        assert not drain.asked
        connection, _ = listener.accept()
        connection.recv(4096)
        connection.sendall(answer)
        connection.close()
    listener.close()
    assert drain.accepted.wait(10)
    said = f"{source} has not answered for 0 s (BadStatusLine: garbage)"
    assert capfd.readouterr().err == f"preemption notices of 10.0.0.7: {said}\n"


def test_a_source_that_was_silent_for_a_moment_is_not_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    del ANSWERS["PUT /aws/api/token"]
    asked = threading.Semaphore(0)
    real = notices.has_notice

    def counted(source: str) -> bool:
        asked.release()
        return real(source)

    monkeypatch.setattr(notices, "has_notice", counted)
    drain = Drain()
    PreemptionNotices("aws", "10.0.0.7", drain)
    for _ in range(3):
        assert asked.acquire(timeout=10)
    ANSWERS.update({"PUT /aws/api/token": "secret", "GET /aws/meta-data/spot/instance-action": "{}"})
    assert drain.accepted.wait(10)
    assert capfd.readouterr().err == ""
