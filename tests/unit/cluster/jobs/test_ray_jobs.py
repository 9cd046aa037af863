"""Which cluster is asked, and with which token, by servers that are one as far as that goes."""

from __future__ import annotations

import asyncio
import http.server
import os
import signal
import threading
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.jobs.ray_jobs import Jobs, _tail, working_tree
from cluster.local import local_cluster
from cluster.local.address import ClusterAddress, NoCluster, resolve_address
from cluster.local.ray_session import _put_back, _require_token


class Open(http.server.BaseHTTPRequestHandler):
    """Answers everybody."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b'{"ray_version": "2.60.0"}')

    def log_message(self, *words: object) -> None:
        """Say nothing."""


class Closed(Open):
    """Answers those with a token, whatever that is."""

    asked: list[tuple[int, str]]
    """The port, and the token, of each question with one."""

    def do_GET(self) -> None:
        given = self.headers.get("Authorization")
        self.status = 200 if given else 401
        if given:
            self.asked.append((self.server.server_address[1], given.removeprefix("Bearer ")))  # type: ignore[misc]
        super().do_GET()


def served(kind: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def url() -> Iterator[str]:
    yield from served(Open)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Closed, "asked", [], raising=False)
    yield from served(Closed)


@pytest.fixture
def another() -> Iterator[str]:
    yield from served(Closed)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a test and `Jobs` set is undone; no local cluster."""
    monkeypatch.setattr(local_cluster.tempfile, "tempdir", str(tmp_path))
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
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


def test_own_code_below_the_top_is_sent_along_whatever_its_folder_is_called(tmp_path: Path) -> None:
    """As Ray packs it."""
    from ray._private.runtime_env.packaging import create_package

    tree, package = tmp_path / "tree", tmp_path / "package.zip"
    kept = ["job.yaml", "mine/runs/net.py", "mine/venv/net.py", "mine/mlruns/net.py"]
    left = [
        "runs/a/job.yaml",
        "venv/a.py",
        "mlruns/a",
        "mlflow.db",
        "mine/a.safetensors",
        "mine/__pycache__/a.pyc",
    ]
    for name in (*kept, *left, "mine/extra.txt"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    create_package(
        str(tree), package, include_gitignore=False, excludes=working_tree(tree, ["*.txt"])["excludes"]
    )
    with zipfile.ZipFile(package) as archive:
        found = {name for name in archive.namelist() if not name.endswith("/")}
    assert found == set(kept)


def place(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def test_one_cluster_after_another_is_asked_with_its_own_token(
    closed: str, another: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "c" * 64)
    (tmp_path / "token").write_text("d" * 64)
    Jobs(ClusterAddress(closed, "", closed, str(tmp_path / "token")), {})
    assert set(Closed.asked) == {(place(closed), "d" * 64)}
    assert resolve_address(another).api == another
    Closed.asked.clear()
    Jobs(resolve_address(another), {})
    assert set(Closed.asked) == {(place(another), "c" * 64)}
    assert "RAY_API_SERVER_ADDRESS" not in os.environ
    with pytest.raises(NoCluster, match="no address is given"):
        resolve_address(None)


def test_the_variables_of_a_user_stay(closed: str, another: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", another)
    Jobs(resolve_address(closed), {})
    assert {port for port, _ in Closed.asked} == {place(closed)}
    assert resolve_address(None).api == another


def test_a_token_of_a_connection_is_that_of_no_cluster_after_it(
    closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray keeps the first token that it finds."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")
    with _put_back():
        _require_token()
        Jobs(resolve_address(closed), {})
    monkeypatch.setenv("RAY_AUTH_TOKEN", "c" * 64)
    Jobs(resolve_address(closed), {})
    tokens = list(dict.fromkeys(token for _, token in Closed.asked))
    assert len(tokens) == 2
    assert tokens[1] == "c" * 64


class Chatty:
    """Ray's client, whose connection is to be closed; SIGINT or SIGTERM comes while it waits for more."""

    def __init__(self, number: signal.Signals) -> None:
        self.closed, self._number = False, number

    async def tail_job_logs(self, _: str) -> AsyncIterator[str]:
        try:
            yield "step 1\n"
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), self._number)
            await asyncio.sleep(9)
        finally:
            await asyncio.sleep(0)
            self.closed = True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_interrupted_while_following_leaves_no_connection(number: signal.Signals) -> None:
    client = Chatty(number)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        parts = _tail(client, "small-1", 0)
        assert next(parts) == "step 1\n"
        with pytest.raises(KeyboardInterrupt):
            next(parts)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert client.closed


def test_who_stops_following_leaves_no_connection() -> None:
    client = Chatty(signal.SIGINT)
    parts = _tail(client, "small-1", 0)
    next(parts)
    parts.close()
    assert client.closed


class Finished:
    """Ray's client, with a job that has ended."""

    def __init__(self, log: str, message: str = "") -> None:
        self._log, self._message = log, message

    def get_job_info(self, number: str) -> SimpleNamespace:
        ended = {"start_time": 1000, "end_time": 2000, "driver_exit_code": None, "message": self._message}
        return SimpleNamespace(
            submission_id=number, metadata={}, status="FAILED", entrypoint="exec run <<X\na: 1\nX", **ended
        )

    def get_job_logs(self, _: str) -> str:
        return self._log


def jobs_of(client: Any) -> Jobs:
    found = object.__new__(Jobs)
    found._client, found._exit_states = client, {}
    return found


def test_what_a_job_printed_is_told_without_its_file() -> None:
    found = jobs_of(
        Finished("set up\nRunning entrypoint for job a-1: exec run <<X\na: 1\nX\nstep 1\nstep 2\n")
    )
    assert found.logs("a-1") == "set up\nstep 1\nstep 2\n"
    assert "".join(found.follow("a-1")) == found.logs("a-1")


def test_of_a_trace_the_end_is_told() -> None:
    trace = "Traceback (most recent call last):\n" + "  File a.py\n" * 99 + "OSError: Argument list too long"
    message = jobs_of(Finished("", trace)).get("a-1").message
    assert message.startswith("Traceback (most recent call last): File")
    assert message.endswith("OSError: Argument list too long")
    assert len(message) <= 300


class Takes(Finished):
    """Ray's client, which sends a folder and then takes a job; SIGINT comes while it does one of both. It is asked to
    stop the job before there is what could stop it."""

    def __init__(self, moment: str) -> None:
        super().__init__("")
        self.moment, self.jobs, self.asked = moment, list[SimpleNamespace](), 0

    def _upload_working_dir_if_needed(self, environment: dict[str, Any]) -> None:
        self._interrupted("upload")
        environment["working_dir"] = "gcs://a.zip"

    def _upload_py_modules_if_needed(self, _: dict[str, Any]) -> None:
        pass

    def list_jobs(self) -> list[SimpleNamespace]:
        return self.jobs

    def submit_job(self, submission_id: str, metadata: dict[str, str], **given: Any) -> str:
        self._interrupted("submit")
        assert given["runtime_env"]["working_dir"] == "gcs://a.zip"
        job = self.get_job_info(submission_id)
        job.metadata, job.status = metadata, "PENDING"
        self.jobs.append(job)
        return submission_id

    def stop_job(self, _: str) -> bool:
        self.asked += 1
        return self.asked == 3

    def _interrupted(self, moment: str) -> None:
        if moment == self.moment:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("moment", "known"), [("upload", False), ("submit", True)])
def test_of_an_interruption_it_is_certain_whether_the_job_is_submitted(moment: str, known: bool) -> None:
    jobs = jobs_of(Takes(moment))
    with pytest.raises(KeyboardInterrupt):
        jobs.submit("small", "/runs/small", "run", {"working_dir": "/a"})
    assert (jobs.find("small") is not None) == known


def test_a_job_that_cannot_be_asked_yet_is_asked_to_stop_until_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.jobs.ray_jobs.POLL_INTERVAL", 0.0)
    client = Takes("")
    jobs = jobs_of(client)
    jobs.submit("small", "/runs/small", "run", {"working_dir": "/a"})
    client.get_job_info = lambda number: client.jobs[0]  # type: ignore[method-assign]
    assert jobs.stop("small-1")
    assert client.asked == 3
    client.jobs[0].status = "STOPPED"
    assert not jobs.stop("small-1")


def test_folders_are_sent_before_the_one_request_that_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the parts of Ray's own client, which has no server here."""
    from ray.job_submission import JobSubmissionClient

    def answered(_: Any, method: str, endpoint: str, json_data: Any = None, **given: Any) -> Any:
        done.append((method, endpoint))
        sent.append(json_data)
        held.append(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)
        return SimpleNamespace(status_code=200, json=lambda: {"job_id": "a", "submission_id": "small-1"})

    done: list[tuple[str, str]] = []
    sent: list[Any] = []
    held: list[bool] = []
    monkeypatch.setattr(JobSubmissionClient, "_do_request", answered)
    monkeypatch.setattr(JobSubmissionClient, "_package_exists", lambda *_, **__: False)
    monkeypatch.setattr(
        JobSubmissionClient, "_upload_package", lambda *_, **__: done.append(("PUT", "package"))
    )
    monkeypatch.setattr(JobSubmissionClient, "list_jobs", lambda _: [])
    client = object.__new__(JobSubmissionClient)
    client._default_metadata = {}
    for name in ("tree", "package"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("pass")
    environment = working_tree(tmp_path / "tree") | {"py_modules": [str(tmp_path / "package")]}
    assert jobs_of(client).submit("small", "/runs/small", "run", environment) == "small-1"
    assert done == [("PUT", "package"), ("PUT", "package"), ("POST", "/api/jobs/")]
    assert held == [True]
    there = sent[-1]["runtime_env"]
    assert [place.partition("://")[0] for place in (there["working_dir"], *there["py_modules"])] == [
        "gcs"
    ] * 2
    assert environment["working_dir"] == str(tmp_path / "tree"), "the caller's is as it was"
