"""The pages that are served: to whoever has the token, from this machine's own address, and nothing else."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_directories import run_of

from orchestrator.observe.pages.page_server import COOKIE, PageServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    for name in ("a", "b"):
        run_of(tmp_path / "runs" / name)
    run_of(tmp_path / "runs" / "live", "train")
    (tmp_path / "secret").write_text("hunter2")
    found = PageServer(str(tmp_path / "runs"))
    found.start()
    yield found
    found.close()


def get(server: PageServer, path: str, token: bool = True, **headers: str) -> tuple[int, str, dict[str, str]]:
    """Status, text and headers of an answer; with the cookie of the token."""
    given = {"Cookie": f"{COOKIE}={server.url.partition('token=')[2]}"} if token else {}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request("GET", path, headers=given | headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def test_the_token_becomes_a_cookie_and_leaves_the_address(server: PageServer) -> None:
    status, _, headers = get(server, server.url.partition(str(server.port))[2], token=False)
    assert (status, headers["Location"]) == (303, "/")
    assert "HttpOnly; SameSite=Strict" in headers["Set-Cookie"]
    cookie = headers["Set-Cookie"].partition(";")[0]
    assert get(server, "/", token=False, Cookie=cookie)[0] == 200


def test_nobody_else_is_answered(server: PageServer) -> None:
    for path in ("/", "/run/a", "/compare?run=a&run=b", "/?token=wrong", "/?token="):
        status, text, _ = get(server, path, token=False)
        assert (status, text) == (403, "Open the address that `orchestrator serve` printed.")
    assert get(server, "/", token=False, Cookie=f"{COOKIE}=wrong")[0] == 403
    assert get(server, "/", Host="evil.example")[0] == 403  # a name that was made to point here
    assert server._http.server_address[0] == "127.0.0.1"


def test_pages_of_runs_are_live_while_these_are(server: PageServer) -> None:
    status, text, headers = get(server, "/")
    assert (status, headers["Refresh"], headers["Cache-Control"]) == (200, "5", "no-store")
    assert all(f'href="/run/{name}"' in text for name in ("a", "b", "live"))
    for path, live in (("/run/a", False), ("/run/live", True), ("/compare?run=a&run=b", False)):
        status, text, headers = get(server, path)
        assert (status, "Refresh" in headers) == (200, live), text
        assert "<svg" in text
        assert '<a href="/">All runs</a>' in text
    assert "/run/live" not in get(server, "/?q=a+done")[1]


@pytest.mark.parametrize(
    "path",
    [
        "/run/..%2fsecret",
        "/run/../secret",
        "/run//etc/passwd",
        "/run/nowhere",
        "/compare?run=a",
        "/compare?run=../secret&run=a",
        "/x",
    ],
)
def test_there_is_no_other_page(server: PageServer, path: str) -> None:
    status, text, headers = get(server, path)
    assert (status, headers["Content-Type"]) == (404, "text/plain; charset=utf-8")
    assert "hunter2" not in text


def test_a_run_that_cannot_be_drawn_leaves_the_others(server: PageServer, tmp_path: Path) -> None:
    (tmp_path / "runs" / "a" / "job.yaml").write_text("name: [")
    assert get(server, "/run/a")[0] in (404, 500)
    assert get(server, "/run/b")[0] == 200
    assert get(server, "/")[0] == 200
