"""A cluster that asks for no token is refused, by a server that is one as far as that goes."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from cluster.jobs.ray_jobs import Jobs
from cluster.local.address import ClusterAddress, NoCluster


class Open(http.server.BaseHTTPRequestHandler):
    """Answers everybody."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b'{"ray_version": "2.60.0"}')

    def log_message(self, *words: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Open) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test and `Jobs` set is undone."""
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_an_open_cluster_is_refused_unless_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        NoCluster, match="asks for no token, so anyone may run code there; RAY_AUTH_MODE=disabled"
    ):
        Jobs(ClusterAddress(url, "", url), {})
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    Jobs(ClusterAddress(url, "", url), {})


def test_what_is_no_cluster_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Open, "status", 404)
    with pytest.raises(NoCluster, match="answers, but not as a Ray cluster does \\(404\\)"):
        Jobs(ClusterAddress(url, "", url), {})
