"""Token shards on an object store, read block by block: what is used is what was written, whatever the store does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from jobs import curve, job, rows, write_text
from local_run import LocalGang, drive_here
from prepared import prepare_here
from s3 import Proxy
from tmpfs import mounted

from orchestrator.config.spec import parse
from orchestrator.data.prepare import prepare, shards
from orchestrator.data.store import blocks, data_folder, verified_shard
from orchestrator.data.store.quarantine import is_noted
from orchestrator.data.store.tokens import Tokens
from orchestrator.data.store.verified_shard import DamagedShard
from orchestrator.storage import file_system
from orchestrator.storage.retry import Retry

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
BLOCK = 2048
KEEP = 16 * BLOCK


@pytest.fixture
def data(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of prepared data of many small blocks; the system's temporary folder is one of this test."""
    for module in (shards, blocks, verified_shard):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return prepare_here(parse(job(write_text(tmp_path / "text", 300_000))), f"{bucket}/cache")


def whole(data: str) -> np.ndarray:
    """All tokens, by a whole copy elsewhere."""
    fs = fsspec.filesystem("s3", skip_instance_cache=True)
    names = sorted(fs.ls(f"{data.removeprefix('s3://')}/shards", detail=False))
    return np.concatenate([np.frombuffer(fs.cat_file(n), "<u2") for n in names if n.endswith(".bin")])


def kept(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "tmp").rglob("blocks/*-*") if path.suffix != ".lock"]


def windows(tokens: Tokens, expected: np.ndarray, count: int = 300) -> None:
    """Random windows are those that were written."""
    draw = np.random.default_rng(count)
    for start in draw.integers(0, len(expected) - 3 * BLOCK, count):
        length = int(draw.integers(1, 3 * BLOCK))
        assert np.array_equal(tokens.window(0, int(start), length), expected[start : start + length])


def test_data_that_is_larger_than_its_room_is_read_by_blocks(data: str, proxy: Proxy, tmp_path: Path) -> None:
    expected, asked = whole(data), []
    proxy.spoil = lambda line: asked.append(line) or "" if "/shards/" in line else ""  # type: ignore[func-returns-value]
    tokens = Tokens.open(data, keep=KEEP)
    assert tokens.at_once > 1
    assert not asked
    windows(tokens, expected)
    assert 0 < sum(path.stat().st_size for path in kept(tmp_path)) <= KEEP + 2 * BLOCK
    assert not list((tmp_path / "tmp").rglob("*.bin"))
    # another process of the node finds what this one has read last
    count = len(asked)
    again = Tokens.open(data, keep=KEEP)
    again.window(0, 0, 64)
    first = len(asked)
    Tokens.open(data, keep=KEEP).window(0, 0, 64)
    assert len(asked) == first <= count + 1
    # ranks that want one block at once ask for it once
    before, far = len(asked), len(expected) - 100
    several = [Tokens.open(data, keep=KEEP) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: one.window(0, far, 50), several))
    assert all(np.array_equal(one, expected[far : far + 50]) for one in found)
    assert len(asked) - before <= 1
    tokens.check()


def test_where_all_fits_whole_shards_are_copied(data: str, tmp_path: Path) -> None:
    tokens = Tokens.open(data, keep=10**9)
    assert tokens.at_once == 1
    assert list((tmp_path / "tmp").rglob("*.bin"))
    windows(tokens, whole(data), 20)
    assert Tokens.open(data, keep=0).at_once == 1  # what is there is used


def test_flipped_bits_on_disk_and_on_the_way_are_seen(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(data)
    Tokens.open(data, keep=10**5).window(0, 0, 20_000)
    assert len(kept(tmp_path)) > 10
    for path in kept(tmp_path):
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 16
        path.write_bytes(content)
    flips = iter([True, False] * 10**6)
    read: Callable[..., int] = data_folder.DataFolder.read_into

    def flipping(self: Any, name: str, offset: int, target: memoryview) -> int:
        count = read(self, name, offset, target)
        if next(flips):
            target[count // 2] ^= 1
        return count

    monkeypatch.setattr(data_folder.DataFolder, "read_into", flipping)
    windows(Tokens.open(data, keep=10**5), expected, 100)


@pytest.mark.parametrize("how", ["flipped", "vanished", "short"])
def test_an_object_that_is_damaged_or_gone_is_never_used(data: str, how: str) -> None:
    expected = whole(data)
    tokens = Tokens.open(data, keep=KEEP)
    fs, shard = fsspec.filesystem("s3", skip_instance_cache=True), tokens.manifest.shards[0]
    place = f"{data}/{shard.file}"
    content = bytearray(fs.cat_file(place))
    content[5000] ^= 1
    if how == "vanished":
        fs.rm_file(place)
    else:
        fs.pipe_file(place, bytes(content) if how == "flipped" else bytes(content[:4096]))
    if how != "vanished":
        assert np.array_equal(tokens.window(0, 0, 1000), expected[:1000])
    assert not is_noted(tokens.folder)
    with pytest.raises(DamagedShard, match=f"{shard.file}: .*made again from the text"):
        tokens.window(0, 2400, 200)
    assert is_noted(tokens.folder)
    assert not shards.is_complete(tokens.folder)


def test_a_store_that_stalls_has_a_deadline_and_costs_nothing_but_time(
    data: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_folder, "TIMEOUT", 1.0)
    monkeypatch.setattr(file_system, "MIN_BYTES_PER_SECOND", 1 << 20)
    expected, seen = whole(data), 0

    def spoil(line: str) -> str:
        nonlocal seen
        seen += "/shards/" in line
        return "hang" if "/shards/" in line and seen % 7 == 1 else ""

    tokens = Tokens.open(data, keep=KEEP)
    proxy.spoil = spoil
    windows(tokens, expected, 10)
    assert proxy.spoiled
    silent = Tokens.open(data, keep=0)
    proxy.spoil = lambda line: "hang"
    silent.folder.retry = Retry(attempts=2, first=0.01)
    with pytest.raises(TimeoutError, match="had not ended after 1 s"):
        silent.window(0, 0, 10)


def test_a_full_disk_keeps_nothing_and_stops_nothing(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(data)
    with mounted(tmp_path / "small", "64k") as small:
        monkeypatch.setattr(tempfile, "tempdir", str(small))
        tokens = Tokens.open(data, keep=150_000)
        windows(tokens, expected, 100)
        assert tokens.at_once > 1


def test_a_run_on_a_store_is_that_on_a_disk_though_an_object_vanishes(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, cache = write_text(tmp_path / "text"), f"{bucket}/cache"
    with Path(text).open("a") as file:
        file.write(bucket)  # nothing that another test has left on this machine is of this text
    local, remote = tmp_path / "local", tmp_path / "remote"
    drive_here(job(text), str(local), tmp_path / "cache")
    document, data = job(text), prepare_here(parse(job(text)), cache)
    document["data"]["node_cache"] = KEEP / 2**30
    made: list[str] = []
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    def make(*_: Any, **__: Any) -> None:
        """What tasks of Ray do elsewhere."""
        made.append(prepare_here(parse(document), cache))

    monkeypatch.setattr(prepare.Preparation, "make", make)
    fs = fsspec.filesystem("s3", skip_instance_cache=True)

    class Losing(LocalGang):
        def start(self, *arguments: Any, **more: Any) -> None:
            for name in fs.ls(f"{data}/shards", detail=False) if not made else ():
                if name.endswith(".bin"):
                    fs.rm_file(name)
            super().start(*arguments, **more)

    drive_here(document, str(remote), cache, gang=lambda: Losing([2]))  # type: ignore[arg-type]
    assert made
    assert curve(remote) == curve(local)
    assert [row["samples"] for row in rows(remote)] == [row["samples"] for row in rows(local)]
