"""A loaded model behind the routes of OpenAI's API, for one user and for tests. One request generates at a time."""

from __future__ import annotations

import contextlib
import hmac
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from orchestrator.config.errors import InputError
from orchestrator.config.redact import redact
from orchestrator.evaluate.openai_routes import (
    CHAT,
    MODELS,
    TEXT,
    Answer,
    CompletionRequest,
    Refused,
    models,
    parse_request,
)
from orchestrator.evaluate.speaker import Speaker

TIMEOUT = 60.0
"""Seconds that a client may take to send a request, or to read a piece of an answer."""
LARGEST = 2**24
"""The most bytes of a request."""


class ModelServer:
    """Serves a model from `start` to `close`."""

    def __init__(self, speaker: Speaker, name: str, host: str, port: int, token: str | None) -> None:
        """
        Args:
            speaker: the model.
            name: its name in requests.
            host: the address to listen on.
            port: the port; 0 picks a free one.
            token: what clients send as their API key; None admits everyone.

        Raises OSError if the address cannot be used.
        """
        self._speaker = speaker
        self._name = name
        self._token = token
        self._made = int(time.time())
        self._turn = threading.Lock()
        self._closing = threading.Event()
        self._http = ThreadingHTTPServer((host, port), self._handler())
        self._http.daemon_threads = True
        self.port = int(self._http.server_address[1])

    def serve(self) -> None:
        """Answer requests until `close` is called from another thread."""
        self._http.serve_forever(poll_interval=0.2)

    def start(self) -> None:
        """Answer requests in a separate thread."""
        threading.Thread(target=self.serve, name="model", daemon=True).start()

    def close(self) -> None:
        """Stop answering. An answer that is being generated ends at its next token."""
        self._closing.set()
        self._http.shutdown()
        self._http.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            """One connection."""

            protocol_version = "HTTP/1.1"
            timeout = TIMEOUT

            def do_GET(self) -> None:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    server.answer(self, None)

            def do_POST(self) -> None:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    server.answer(self, _body_of(self))

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing: prompts are private."""

        return Handler

    def answer(self, request: BaseHTTPRequestHandler, body: bytes | None) -> None:
        """Answer a request, or say why not."""
        try:
            self._check(request)
            self._route(request, urlsplit(request.path).path, body)
        except ConnectionError:
            raise
        except Exception as error:  # a request must not end the others
            refused = _refused(error)
            _send(request, refused.status, refused.to_json())

    def _check(self, request: BaseHTTPRequestHandler) -> None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._token is not None and not hmac.compare_digest(token.encode(), self._token.encode()):
            raise Refused(401, "send the token that `orchestrator serve-model` printed as the API key")

    def _route(self, request: BaseHTTPRequestHandler, path: str, body: bytes | None) -> None:
        if path == MODELS and body is None:
            _send(request, 200, models(self._name, self._made))
        elif path in (CHAT, TEXT) and body is not None:
            try:
                document = json.loads(body)
            except ValueError as error:
                raise Refused(400, f"the body is not JSON ({error})") from None
            self._say(request, parse_request(self._speaker, self._name, path, document))
        else:
            raise Refused(404, f"there is no {request.command} {path}; use {MODELS}, {CHAT} or {TEXT}")

    def _say(self, request: BaseHTTPRequestHandler, completion: CompletionRequest) -> None:
        answer = Answer(self._name, completion)
        stream = _Stream(request)

        def heard(piece: str) -> None:
            if self._closing.is_set():
                raise ConnectionAbortedError("the server ends")
            if completion.streams:
                stream.send(answer.piece(piece))

        with self._turn:
            if completion.streams:
                answer.begin(stream.send)
            try:
                generated = self._speaker.say(
                    completion.prompt, completion.max_tokens, completion.sampling, heard, completion.stop
                )
            except ConnectionError:
                raise
            except Exception as error:  # a stream that has begun has its status, so the error is an event
                if not stream.begun:
                    raise
                stream.send(_refused(error).to_json())
                stream.end()
                return
            if completion.streams:
                answer.end(generated, stream.send)
        if completion.streams:
            stream.end()
        else:
            _send(request, 200, answer.whole(generated))


class _Stream:
    """Server-sent events on one connection, which ends with them. Raises ConnectionError if the client does not read
    them.
    """

    def __init__(self, request: BaseHTTPRequestHandler) -> None:
        self._request = request
        self.begun = False

    def send(self, data: dict[str, Any]) -> None:
        """Send one event."""
        self._write(json.dumps(data))

    def end(self) -> None:
        """Send the event that ends a stream."""
        self._write("[DONE]")

    def _write(self, text: str) -> None:
        begins = not self.begun
        self.begun = True
        try:
            if begins:
                self._begin()
            self._request.wfile.write(f"data: {text}\n\n".encode())
            self._request.wfile.flush()
        except TimeoutError as error:
            raise ConnectionAbortedError(str(error)) from None

    def _begin(self) -> None:
        self._request.close_connection = True
        self._request.send_response(200)
        self._request.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self._request.send_header("Cache-Control", "no-store")
        self._request.send_header("Connection", "close")
        self._request.end_headers()


def _refused(error: Exception) -> Refused:
    """Return the answer to a request that failed. Its message has no secrets."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, InputError):
        return Refused(400, redact(str(error)))
    return Refused(500, redact(f"{type(error).__name__}: {' '.join(str(error).split())}"))


def _body_of(request: BaseHTTPRequestHandler) -> bytes:
    """Return the body of a request, empty if its length is missing or too large."""
    length = request.headers.get("Content-Length", "0")
    size = int(length) if length.isdecimal() else 0
    if size > LARGEST:
        request.close_connection = True
        return b""
    return request.rfile.read(size)


def _send(request: BaseHTTPRequestHandler, code: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    request.send_response(code)
    request.send_header("Content-Type", "application/json")
    request.send_header("Content-Length", str(len(data)))
    request.send_header("Cache-Control", "no-store")
    request.end_headers()
    request.wfile.write(data)
