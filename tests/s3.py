"""A real S3 server, and a proxy before it that spoils requests."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import pytest

METHODS = (b"GET ", b"PUT ", b"POST ", b"HEAD ", b"DELETE ")


def free_ports(count: int) -> set[int]:
    """Ports that are free, as are those 10000 above: the server's gRPC takes these.

    All are below those that the system gives to outgoing connections, one of which would have it before the server
    does, and beyond those of Ray's workers.
    """
    found: set[int] = set()
    while len(found) < count:
        port = random.randint(20_000, 22_700)
        with contextlib.suppress(OSError):
            for number in (port, port + 10_000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
            found.add(port)
    return found


KEYS = {
    "AWS_ACCESS_KEY_ID": "checkpoint",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests",
    "AWS_DEFAULT_REGION": "us-east-1",
}
"""What a client of the server needs in its environment, beside AWS_ENDPOINT_URL."""


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a SeaweedFS server that lives as long as the tests."""
    with served(tmp_path_factory.mktemp("s3")) as port:
        yield port


@contextlib.contextmanager
def served(folder: Path) -> Iterator[int]:
    """The port of a SeaweedFS server whose objects are in `folder`."""
    weed = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert weed, "the S3 server is missing: install the development dependencies"
    names = ("s3", "master", "filer", "volume", "admin")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    command = [
        weed,
        "mini",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
    ]
    command += ["-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    with (folder / "log").open("wb") as log:
        with subprocess.Popen(command, env=os.environ | KEYS, cwd=folder, stdout=log, stderr=log) as server:
            try:
                _wait_for(ports["s3"], server, folder / "log")
                yield ports["s3"]
            finally:
                server.kill()


def _wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and server.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), 1.0):
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"the S3 server did not start: {log.read_text()[-500:]}")


@dataclass
class Proxy:
    """Forwards to a port; `spoil` names what happens to a request: see `_FAULTS`, or "" for nothing.

    Attributes:
        spoil: called with the first line of every request.
        spoiled: what has happened so far.
    """

    target: int
    spoil: Callable[[str], str] = lambda line: ""
    spoiled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        _hang_up(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self.target))
        fault = [""]
        answers = threading.Thread(target=self._answer, args=(client, server, fault), daemon=True)
        answers.start()
        try:
            while data := client.recv(1 << 16):
                if data.startswith(METHODS):
                    line = data.split(b"\r\n", 1)[0].decode()
                    fault[0] = self.spoil(line)
                    if fault[0]:
                        self.spoiled.append(f"{fault[0]} {line}")
                if fault[0] == "refuse":
                    break
                if fault[0] == "stall":  # nothing more is taken: what the client sends fills its own buffers
                    answers.join()
                    break
                if fault[0] in ("busy", "broken"):
                    answer = {"busy": b"503 Slow Down", "broken": b"500 Internal Server Error"}[fault[0]]
                    client.sendall(
                        b"HTTP/1.1 " + answer + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                    )
                    break
                if fault[0] != "hang":
                    server.sendall(data)
        except OSError:
            pass
        _hang_up(client, server)
        answers.join()
        client.close()
        server.close()

    def _answer(self, client: socket.socket, server: socket.socket, fault: list[str]) -> None:
        try:
            while data := server.recv(1 << 16):
                if fault[0] == "deaf":  # the server has done it, and nobody hears of it
                    break
                if fault[0] == "cut":
                    client.sendall(data[: len(data) // 2])
                    break
                if fault[0] == "slow":
                    time.sleep(0.3)
                if fault[0] == "trickle":  # each byte is a sign of life
                    for at in range(len(data)):
                        client.sendall(data[at : at + 1])
                        time.sleep(0.2)
                    continue
                client.sendall(data)
        except OSError:
            pass
        _hang_up(client, server)


def _hang_up(*sockets: socket.socket) -> None:
    for one in sockets:
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


@pytest.fixture
def proxy(s3_server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the server; the environment makes it the S3 endpoint."""
    made = Proxy(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.port}")
    for key, value in KEYS.items():
        monkeypatch.setenv(key, value)
    yield made
    made.close()


@pytest.fixture
def bucket(proxy: Proxy) -> str:
    """The URI of a new bucket."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
    return f"s3://{name}"
