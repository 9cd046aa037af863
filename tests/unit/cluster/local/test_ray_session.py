"""The token that an embedded cluster asks for, and an interruption while Ray starts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.local.address import Connected
from cluster.local.ray_session import (
    _ALONE,
    ANOTHER_FOLDER,
    NoCluster,
    NotStarted,
    _not_started,
    _own_folder,
    _put_back,
    _require_token,
    connected_ray,
)
from cluster.workers.machine import processors_here

MODE, TOKEN, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of a user; what a test sets is undone."""
    for name in (MODE, TOKEN, PATH):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "ray", raising=False)


def test_each_cluster_has_a_token_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = []
    for _ in range(2):
        monkeypatch.delenv(TOKEN, raising=False)
        _require_token()
        tokens.append(os.environ[TOKEN])
    assert os.environ[MODE] == "token"
    assert len(set(tokens)) == 2
    assert all(len(token) == 64 for token in tokens)


def test_a_user_s_token_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "mine")
    _require_token()
    assert os.environ[TOKEN] == "mine"


def test_a_user_s_token_file_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH, "/home/me/token")
    _require_token()
    assert TOKEN not in os.environ


@pytest.mark.parametrize("before", ["", "mine"])
def test_what_a_connection_changes_is_as_before_after_it(
    monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    if before:
        monkeypatch.setenv(TOKEN, before)
    handler = signal.signal(signal.SIGTERM, ignored)
    try:
        with _put_back():
            os.environ.pop(TOKEN, None)
            os.environ[PATH] = "/tmp/token"
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        assert (os.environ.get(TOKEN, ""), PATH in os.environ) == (before, False)
        assert signal.getsignal(signal.SIGTERM) is ignored
    finally:
        signal.signal(signal.SIGTERM, handler)


def ignored(*_: object) -> None:
    """What a caller may have SIGTERM do."""


def test_ray_that_was_imported_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", sys)
    with pytest.raises(NoCluster, match="set RAY_AUTH_MODE=token first"):
        _require_token()
    assert MODE not in os.environ
    monkeypatch.setenv(MODE, "token")
    _require_token()


def test_importing_what_starts_ray_does_not_import_ray() -> None:
    code = "import cluster.local.ray_session, sys; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_processors_are_those_that_this_process_may_use() -> None:
    assert processors_here() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("reason", "free", "hint"),
    [
        ("timed out", 10**9, "try again when this machine has less to do; Ray's logs are in {folder}"),
        (
            "AF_UNIX path length cannot exceed 107 bytes: /tmp/x",
            10**9,
            "its sockets are below TMPDIR, or RAY_TMPDIR: set it to a shorter path",
        ),
        ("[Errno 28] No space left on device: '/tmp/x'", 10**9, ANOTHER_FOLDER),
        ("[Errno 13] Permission denied: '/tmp/x'", 10**9, ANOTHER_FOLDER),
        ("timed out", 10**6, ANOTHER_FOLDER),
    ],
)
def test_why_ray_did_not_start_has_its_own_mend(
    reason: str, free: int, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    found = _not_started(reason, str(tmp_path))
    assert found.hint == hint.format(folder=tmp_path)
    assert reason in found.what
    assert str(found) == f"{found.what}; {found.hint}"


def test_a_ray_has_a_folder_that_is_this_user_s_alone_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "new"))
    with _own_folder() as own:
        folder = Path(own.path)
        assert folder.parent == tmp_path / "new"
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "log").write_text("")
    assert not folder.exists()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "other"))
    with pytest.raises(NotStarted, match="Ray's logs are in"), _own_folder() as own:
        raise _not_started("timed out", own.path)
    assert Path(own.path).parent == tmp_path / "other"
    assert Path(own.path).exists()
    with _own_folder() as own:
        own.kept = True
    assert Path(own.path).exists()


def test_a_temporary_folder_that_cannot_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file" / "below"))
    with pytest.raises(NotStarted, match="Not a directory; make room there, or set TMPDIR"), _own_folder():
        pass


def test_the_folder_of_a_process_that_was_killed_ends_too(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from cluster.local.ray_session import _own_folder
with _own_folder() as own:
    print(own.path, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RAY_TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert ended.stdout.startswith(str(tmp_path))
    deadline = time.monotonic() + 20
    while Path(ended.stdout.strip()).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(tmp_path.iterdir()) == []


def test_a_connection_that_is_there_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would end it."""
    ended: list[str] = []
    theirs = SimpleNamespace(is_initialized=lambda: True, shutdown=lambda: ended.append("theirs"))
    monkeypatch.setitem(sys.modules, "ray", theirs)
    with pytest.raises(Connected, match="has initialised Ray already"), connected_ray(None, packages=()):
        pass
    with (
        _ALONE,
        pytest.raises(Connected, match="another thread of this process"),
        connected_ray(None, packages=()),
    ):
        pass
    assert not ended
    assert not _ALONE.locked()
