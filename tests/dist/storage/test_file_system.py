"""Every verb of a remote store, against a server that is silent, slow, hangs up or fails, for now and for good."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from s3 import Proxy

from orchestrator.storage import file_system
from orchestrator.storage.input_files import RemoteFile
from orchestrator.storage.object_backend import ObjectBackend
from orchestrator.storage.retry import Retry, storage_failed

TIMEOUT = 0.5
PART = 5 << 20
SMALL, LARGE = b"small", random.Random(1).randbytes(PART + 1000)
LOST = ("hang", "stall", "trickle", "refuse", "deaf", "cut", "busy", "broken")


def read_into(files: ObjectBackend, path: str, offset: int, count: int) -> bytes:
    target = memoryview(bytearray(count))
    return bytes(target[: files.read_into(path, offset, target)])


def publish(files: ObjectBackend, path: str) -> None:
    """As who publishes does: an object that is there may be one's own, of a put whose answer was lost."""
    try:
        files.publish(path, SMALL)
    except FileExistsError:
        assert files.read(path) == SMALL


VERBS: dict[str, tuple[Callable[[ObjectBackend], Any], Any]] = {
    "list": (lambda files: files.list("there"), {"there/large": len(LARGE), "there/small": len(SMALL)}),
    "stat": (lambda files: files.fs.isfile(f"{files.root}/there/small"), True),
    "read": (lambda files: files.read("there/small"), SMALL),
    "read large": (lambda files: files.read("there/large"), LARGE),
    "read a range": (
        lambda files: read_into(files, "there/large", PART - 7, 100),
        LARGE[PART - 7 : PART + 93],
    ),
    "read as a file": (
        lambda files: RemoteFile(files.fs, f"{files.root}/there/small", Retry(1)).read(),
        SMALL,
    ),
    "write": (lambda files: files.write("new/small", [SMALL]), None),
    "write large": (lambda files: files.write("new/large", [LARGE[:9], LARGE[9:]]), None),
    "publish": (lambda files: publish(files, "new/published"), None),
    "replace": (lambda files: files.replace("there/small", SMALL), None),
    "remove": (lambda files: files.remove("there/other"), None),
    "glob": (lambda files: len(files.fs.glob(f"{files.root}/there/*")), 2),
}


@pytest.fixture
def files(bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> ObjectBackend:
    """A store with a small and a large file; calls have half a second, and parts as much again."""
    monkeypatch.setattr(file_system, "PART_BYTES", PART)
    made = ObjectBackend(f"{bucket}/folder", 20.0)
    made.write("there/small", [SMALL])
    made.write("there/large", [LARGE])
    made.fs.timeout = TIMEOUT
    monkeypatch.setattr(file_system, "MIN_BYTES_PER_SECOND", PART / TIMEOUT)
    return made


@pytest.mark.parametrize(
    "fault",
    [
        fault if fault in ("cut", "refuse", "hang") else pytest.param(fault, marks=pytest.mark.slow)
        for fault in LOST
    ],
)
def test_every_call_ends_while_a_fault_lasts_and_succeeds_after_it(
    files: ObjectBackend, proxy: Proxy, fault: str
) -> None:
    def ended(verb: str) -> tuple[str, float, BaseException | None]:
        began = time.monotonic()
        try:
            VERBS[verb][0](files)
        except Exception as error:
            return verb, time.monotonic() - began, error
        return verb, 0.0, None

    proxy.spoil = lambda line: fault
    with ThreadPoolExecutor(len(VERBS)) as pool:
        for verb, seconds, error in pool.map(ended, VERBS):
            # connection, sending and answer together; a listing has four times that, a broken upload is withdrawn too
            assert seconds < 4 * TIMEOUT + 20, verb
            assert error is not None, verb
            assert storage_failed(error), (verb, error)
            if isinstance(error, TimeoutError):
                assert f"{files.fs.unstrip_protocol(files.root)}/" in str(error)
                assert "had not ended after" in str(error)
        count = itertools.count(1)
        proxy.spoil = lambda line: fault if next(count) < 10 else ""
        patient = Retry(attempts=20, first=0.01)
        found = dict(zip(VERBS, pool.map(lambda verb: patient(VERBS[verb][0], files), VERBS), strict=True))
    assert found == {verb: expected for verb, (_, expected) in VERBS.items()}


def test_a_broken_upload_is_withdrawn(files: ObjectBackend, proxy: Proxy) -> None:
    parts = itertools.count(1)
    proxy.spoil = lambda line: "hang" if "partNumber" in line and next(parts) == 2 else ""
    with pytest.raises(TimeoutError, match=r"new/large: upload_part had not ended after 1 s"):
        files.write("new/large", [LARGE])
    bucket_name = files.root.split("/")[0]
    assert not files.fs._plain.call_s3("list_multipart_uploads", Bucket=bucket_name).get("Uploads")
    assert files.list("new") == {}


def test_what_is_no_file_is_not_there_and_what_does_not_answer_is_an_error(
    files: ObjectBackend, proxy: Proxy
) -> None:
    files.fs.timeout = 20.0  # nothing hangs here, and a busy machine takes its time
    files.write("gone/a", [SMALL])
    files.remove("gone/a")
    assert not files.fs.isfile(f"{files.root}/gone/a")
    assert files.list("gone") == {}
    assert files.read("there/small") == SMALL
    files.write("empty", [b""])
    assert files.read("empty") == b""
    assert read_into(files, "there/small", 3, 100) == SMALL[3:]
    assert read_into(files, "there/small", len(SMALL), 100) == b""
    proxy.spoil = lambda line: "refuse"
    with pytest.raises(Exception) as found:
        files.fs.isfile(f"{files.root}/there/small")
    assert storage_failed(found.value)


def test_a_second_publication_is_refused_and_named(files: ObjectBackend) -> None:
    files.publish("once", b"first")
    with pytest.raises(FileExistsError):
        files.publish("once", b"second")
    assert files.read("once") == b"first"


def test_listings_have_more_than_one_page(
    files: ObjectBackend, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.fs.timeout = 20.0
    monkeypatch.setitem(files.fs._plain.s3_additional_kwargs, "MaxKeys", 50)
    names = {f"many/{number:04d}": 1 for number in range(121)}
    asked: list[str] = []
    proxy.spoil = lambda line: asked.append(line) or ""  # type: ignore[func-returns-value]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: files.replace(name, b"x"), names))
        for listed, count in (
            (lambda: files.list("many"), 121),
            (lambda: files.fs.ls(f"{files.root}/many"), 121),
            (lambda: files.fs.glob(f"{files.root}/many/*1"), 12),
        ):
            asked.clear()
            assert len(listed()) == count
            assert sum("continuation-token" in line for line in asked) >= 2
        assert files.list("many") == names
        list(pool.map(files.remove, names))
    assert files.list("many") == {}
