"""A server of HTTP that gives a file no more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from orchestrator.config.errors import InputError, Unreachable
from orchestrator.data.config import Source
from orchestrator.data.sources import resolve
from orchestrator.data.sources.files import Span, opened

TEXT = b"a few words\n" * 100


class Server(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(TEXT)))
        self.send_header("ETag", '"1"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(TEXT)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Server, "status", 200)
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/a.txt"
        server.shutdown()


def test_a_file_that_is_refused_while_it_is_read_is_named(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data cache was named, as what could not be used."""
    (file,) = resolve([Source(uri=address)])

    def read() -> None:
        with opened(Span(file, 0, file.size, file.size)) as text:
            monkeypatch.setattr(Server, "status", 403)
            text.read()

    with pytest.raises(InputError, match="403") as refused:
        read()
    assert not isinstance(refused.value, Unreachable)
    assert refused.value.where == address


@pytest.mark.parametrize(
    ("status", "what"),
    [(401, "cannot be listed .401"), (403, "cannot be listed .403"), (404, "no such file")],
)
def test_a_file_that_is_refused_at_once_is_not_said_to_be_missing(
    address: str, monkeypatch: pytest.MonkeyPatch, status: int, what: str
) -> None:
    monkeypatch.setattr(Server, "status", status)
    with pytest.raises(InputError, match=what) as refused:
        resolve([Source(uri=address)])
    assert not isinstance(refused.value, Unreachable)
