from __future__ import annotations

import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest

from orchestrator.data.tokens import Tokens
from orchestrator.errors import InputError

Prepare = Callable[..., str]
TEXT = "one two three.\n<|endoftext|>\nfour five six seven!\n" * 40


def test_a_source_is_one_stream_over_its_shards(prepare_here: Prepare) -> None:
    tokens = Tokens.open(prepare_here([TEXT, "last words"], ["other"]))
    shards = tokens.manifest.sources[0].shards
    assert len(shards) > 3
    raw = np.concatenate([np.fromfile(tokens.folder.at(shard.file), "<u2") for shard in shards])
    assert tokens.length(0) == len(raw)
    whole = tokens.window(0, 0, len(raw))
    assert whole.dtype == np.int64
    assert np.array_equal(whole, raw)
    for start in range(0, len(raw) - 150, 37):
        assert np.array_equal(tokens.window(0, start, 150), raw[start : start + 150])
    assert tokens.window(0, len(raw), 0).shape == (0,)


def test_the_text_comes_back(prepare_here: Prepare) -> None:
    tokens = Tokens.open(prepare_here([TEXT, "last words"], ["other"]))
    read = [tokens.tokenizer().decode(tokens.window(s, 0, tokens.length(s)).tolist(), False) for s in (0, 1)]
    first = "one two three.<|endoftext|>" + "four five six seven!\none two three.<|endoftext|>" * 39
    assert read == [first + "four five six seven!<|endoftext|>last words<|endoftext|>", "other<|endoftext|>"]


@pytest.mark.parametrize(("source", "start", "length"), [(0, -1, 3), (0, 0, 10**6), (0, 0, -1), (1, 0, 1)])
def test_no_window_reaches_outside(prepare_here: Prepare, source: int, start: int, length: int) -> None:
    tokens = Tokens.open(prepare_here(["some words"], [""]))
    with pytest.raises(IndexError):
        tokens.window(source, start, length)


@pytest.mark.parametrize(
    ("length", "window", "expected"),
    [(8, 8, 12), (8, 9, 12), (8, 13, 11), (100, 100, 1), (100, 101, 0), (8, 300, 0)],
)
def test_a_sample_starts_every_sequence_length(
    prepare_here: Prepare, length: int, window: int, expected: int
) -> None:
    tokens = Tokens.open(prepare_here(["x"]))
    tokens._ends = [np.array([60, 100])]
    assert tokens.samples(0, length, window) == expected
    if expected:
        assert (expected - 1) * length + window <= 100


def test_vocabulary_of_prepared_data(prepare_here: Prepare) -> None:
    found = Tokens.open(prepare_here([TEXT], special=("<extra_id_0>",))).vocabulary()
    assert (found.size, found.eos, found.mask, found.sentinels) == (320, 0, 5, (7,))
    assert found.word_start is not None
    assert len(found.word_start) == found.size
    assert not found.word_start[list(found.special)].any()


def test_missing_and_damaged_data_are_told(prepare_here: Prepare, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no prepared data; make it with"):
        Tokens.open(str(tmp_path / "nothing"))
    folder = Path(prepare_here([TEXT]))
    shard = folder / "shards" / "000001.bin"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(
        InputError, match=f"shard shards/000001.bin has {len(data) - 1} bytes instead of {len(data)}"
    ):
        Tokens.open(str(folder))
    shard.unlink()
    with pytest.raises(InputError, match=r"shard shards/000001.bin is missing"):
        Tokens.open(str(folder))
    (folder / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(InputError, match="is of format 99, not 1; prepare the data again"):
        Tokens.open(str(folder))
    (folder / "manifest.json").write_text('{"format": 1, "tokens": 3}')
    with pytest.raises(InputError, match=r"holds a damaged manifest.json"):
        Tokens.open(str(folder))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the system's folder for temporary files."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_remote_shards_are_copied_once_and_checked(prepare_here: Prepare, temporary: Path) -> None:
    uri = f"memory://{uuid.uuid4().hex}/data"
    prepare_here([TEXT], uri=uri)
    tokens = Tokens.open(uri)
    copies = {p: p.stat().st_mtime_ns for p in temporary.rglob("*.bin")}
    assert len(copies) == len(tokens.manifest.sources[0].shards)
    assert np.array_equal(Tokens.open(uri).window(0, 0, 50), tokens.window(0, 0, 50))
    assert {p: p.stat().st_mtime_ns for p in temporary.rglob("*.bin")} == copies

    next(iter(copies)).unlink()
    fs, path = fsspec.core.url_to_fs(uri)
    for name in fs.ls(f"{path}/shards", detail=False):
        fs.pipe_file(name, fs.cat_file(name)[:-2] + b"\x00\x01")
    with pytest.raises(InputError, match="is damaged"):
        Tokens.open(uri)
    fs.rm(f"{path}/shards", recursive=True)
    with pytest.raises(InputError, match="is missing"):
        Tokens.open(uri)


def test_ranks_of_one_node_may_open_remote_data_at_once(prepare_here: Prepare, tmp_path: Path) -> None:
    local = prepare_here([TEXT])
    script = (
        "import sys; from orchestrator.data.tokens import Tokens;"
        "t = Tokens.open(sys.argv[1]); print(t.window(0, 0, t.length(0)).sum())"
    )
    # DirFileSystem is no LocalFileSystem, so its shards are downloaded; every process sees the same files.
    command = [sys.executable, "-c", script, f"dir://prepared::file://{tmp_path}"]
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"TMPDIR": str(tmp_path)})
        for _ in range(3)
    ]
    sums = {rank.communicate()[0] for rank in ranks}
    here = Tokens.open(local)
    assert sums == {f"{here.window(0, 0, here.length(0)).sum()}\n"}
    assert not list(tmp_path.rglob("*.tmp"))
