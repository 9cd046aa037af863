"""Web pages of the runs in a folder, served on this machine only, to clients with the token."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import threading
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from orchestrator.config.errors import InputError
from orchestrator.config.outcome import ENDED
from orchestrator.config.redact import redact
from orchestrator.observe.pages import compare, runs_page
from orchestrator.observe.pages.report import report
from orchestrator.storage.run_directory import RunDir

LOOPBACK = "127.0.0.1"
COOKIE = "orchestrator-token"
REFRESH = 5
"""Seconds after which a browser reloads a page that may change."""
TIMEOUT = 20.0
"""Seconds that a browser may take to send a request."""


class PageServer:
    """Serves the runs in `folder` from `start` to `close`. `url` contains the token."""

    def __init__(self, folder: str, port: int = 0) -> None:
        """Raises OSError if the port is taken."""
        self.runs = runs_page.Runs(folder)
        self._seen: runs_page.Seen = {}
        self._token = secrets.token_urlsafe(24)
        self._http = ThreadingHTTPServer((LOOPBACK, port), self._handler())
        self._http.daemon_threads = True
        self.port = int(self._http.server_address[1])
        self.url = f"http://{LOOPBACK}:{self.port}/?token={self._token}"

    def serve(self) -> None:
        """Answer requests until `close` is called from another thread."""
        self._http.serve_forever(poll_interval=0.2)

    def start(self) -> None:
        """Answer requests in a separate thread."""
        threading.Thread(target=self.serve, name="pages", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self._http.shutdown()
        self._http.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            """One request."""

            timeout = TIMEOUT

            def do_GET(self) -> None:
                with contextlib.suppress(ConnectionError):  # the browser has moved on to another page
                    server.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing, because a request's line contains the token."""

        return Handler

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request: with a page, or with the reason for an error."""
        url = urlsplit(request.path)
        query = parse_qs(url.query)
        if request.headers.get("Host") not in (f"{LOOPBACK}:{self.port}", f"localhost:{self.port}"):
            _send(
                request, 403, "This server answers to its own address only."
            )  # refuse foreign names that resolve to this address (DNS rebinding)
        elif self._is_token(query.get("token", [""])[0]):
            cookie = f"{COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/"
            _send(request, 303, "", {"Location": url.path, "Set-Cookie": cookie})
        elif not self._is_token(_cookie(request)):
            _send(request, 403, "Open the address that `orchestrator serve` printed.")
        else:
            try:
                self._page(request, url.path, query)
            except ConnectionError:
                raise
            except InputError as error:
                _send(request, 404, redact(str(error)))
            except Exception as error:  # a page that cannot be rendered must not affect the others
                _send(request, 500, redact(f"{type(error).__name__}: {error}"))

    def _page(self, request: BaseHTTPRequestHandler, path: str, query: dict[str, list[str]]) -> None:
        runs = self.runs.find()
        if path == "/":
            words = query.get("q", [""])[0]
            rows = runs_page.listed(runs, words, self._seen)
            text = runs_page.page(self.runs.folder, rows, words, len(runs))
            _send(request, 200, text, _again(any(not row["ended"] for row in rows)))
        elif path == "/compare":
            chosen = [_of(runs, name) for name in query.get("run", [])]
            text = compare.page(compare.compared(chosen))
            _send(request, 200, _with_way_back(text), _again(any(map(_changes, chosen))))
        elif path.startswith("/run/"):
            run = _of(runs, unquote(path.removeprefix("/run/")))
            _send(request, 200, _with_way_back(report(run)), _again(_changes(run)))
        else:
            raise InputError("there is no such page", path, "begin at /")

    def _is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())


def _of(runs: dict[str, RunDir], name: str) -> RunDir:
    """Return the run of that name, which must be among the runs found: no other path is ever opened."""
    if name not in runs:
        raise InputError("there is no such run", name, "begin at /")
    return runs[name]


def _changes(run: RunDir) -> bool:
    return run.read_json_or_empty("status.json").get("phase") not in ENDED


def _again(changes: bool) -> dict[str, str]:
    return {"Refresh": str(REFRESH)} if changes else {}


def _with_way_back(page: str) -> str:
    return page.replace("<main>", '<main>\n<p style="margin: 0 0 10px"><a href="/">All runs</a></p>', 1)


def _cookie(request: BaseHTTPRequestHandler) -> str:
    try:
        cookie = SimpleCookie(request.headers.get("Cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return cookie.value if cookie else ""


def _send(request: BaseHTTPRequestHandler, code: int, text: str, more: dict[str, str] | None = None) -> None:
    data = text.encode(errors="replace")
    request.send_response(code)
    kind = "text/html" if code == 200 else "text/plain"
    headers = {
        "Content-Type": f"{kind}; charset=utf-8",
        "Content-Length": str(len(data)),
        "Cache-Control": "no-store",
    }
    headers |= {
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "X-Frame-Options": "DENY",
    }
    for name, value in (headers | (more or {})).items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(data)
