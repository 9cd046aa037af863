from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
from unpublished import plan_of, unpublished

from cluster.workers.error_kind import cause_of
from cluster.workers.gang import Cause
from orchestrator.config.errors import InputError
from orchestrator.data.prepare import shards
from orchestrator.data.prepare.shards import is_complete
from orchestrator.data.samples.sections.published import StoppedWaiting
from orchestrator.data.store import excerpt
from orchestrator.data.store import tokens as tokens_module
from orchestrator.data.store import verified_shard as checked
from orchestrator.data.store.tokens import Tokens, problems
from orchestrator.data.store.verified_shard import DamagedShard, quarantine
from orchestrator.resolve.prepared_data import EXCERPT, data_of
from orchestrator.storage.retry import Retry
from orchestrator.storage.run_directory import RunDir

Prepare = Callable[..., str]
TEXT = "one two three.\n<|endoftext|>\nfour five six seven!\n" * 40


def test_a_source_is_one_stream_over_its_shards(prepare_here: Prepare) -> None:
    tokens = Tokens.open(prepare_here([TEXT, "last words"], ["other"]))
    found = tokens.manifest.shards
    assert len(found) > 3
    raw = np.concatenate([np.fromfile(tokens.folder.at(shard.file), "<u2") for shard in found[:-1]])
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


def test_flipped_bits_are_seen_before_they_are_used(prepare_here: Prepare) -> None:
    folder = Path(prepare_here([TEXT]))
    for shard in sorted((folder / "shards").iterdir()):
        sound, data = shard.read_bytes(), bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 4
        tokens = Tokens.open(str(folder))
        shard.write_bytes(bytes(data))
        with pytest.raises(DamagedShard, match=f"{shard.name}.* not what was written"):
            tokens.check()
        assert not shard.exists()
        assert not is_complete(tokens.folder)
        shard.write_bytes(sound)
        assert is_complete(tokens.folder)
    Tokens.open(str(folder)).check()


def test_a_sound_part_of_a_damaged_shard_is_read(
    prepare_here: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (shards, checked):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    folder = Path(prepare_here([TEXT], part_bytes=10**6))
    whole = Tokens.open(str(folder)).window(0, 0, 400)
    (shard,) = (folder / "shards").glob("*.bin")
    data = bytearray(shard.read_bytes())
    data[200] ^= 1
    shard.write_bytes(bytes(data))
    tokens = Tokens.open(str(folder))
    assert np.array_equal(tokens.window(0, 0, 96), whole[:96])
    assert np.array_equal(tokens.window(0, 128, 200), whole[128:328])
    with pytest.raises(DamagedShard, match="block 3 of"):
        tokens.window(0, 95, 2)


def says_the_same(one: bytes, other: bytes) -> bool:
    """Whether both are JSON of the same value."""
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json"])
def test_every_flipped_byte_beside_the_shards_is_seen(prepare_here: Prepare, name: str) -> None:
    file = Path(prepare_here(["one two"])) / name
    sound = file.read_bytes()
    for place in range(0, len(sound), max(1, len(sound) // 60)):
        damaged = sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :]
        if says_the_same(damaged, sound):  # the last digit of a number that is no other number
            continue
        file.write_bytes(damaged)
        with pytest.raises((DamagedShard, InputError)):
            Tokens.open(str(file.parent)).check()
    file.write_bytes(sound)
    Tokens.open(str(file.parent)).check()


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
    with pytest.raises(
        InputError, match="is of format 99, not 1, 2, 3, 4, 5, 6 or 7; prepare the data again"
    ):
        Tokens.open(str(folder))
    (folder / "manifest.json").write_text('{"format": 1, "tokens": 3}')
    with pytest.raises(InputError, match=r"holds a damaged manifest.json"):
        Tokens.open(str(folder))


def test_a_rank_that_finds_no_data_does_not_call_the_input_wrong(
    prepare_here: Prepare, tmp_path: Path
) -> None:
    """Another rank of its gang may just have put the damaged file aside: the controller makes it again, and goes on."""
    folder = Path(prepare_here([TEXT]))
    quarantine(folder / "shards" / "000001.bin")
    for gone in (str(folder), str(tmp_path / "nothing")):
        with pytest.raises(InputError) as raised:
            Tokens.open(gone)
        assert cause_of(raised.value) == Cause("raised", name="DataGone")


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
        "import sys; from orchestrator.data.store.tokens import Tokens;"
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


def test_data_that_is_damaged_has_problems_and_data_that_is_gone_has_none(prepare_here: Prepare) -> None:
    folder = Path(prepare_here([TEXT]))
    assert problems(str(folder)) == problems(str(folder / "nowhere")) == []
    shard = next((folder / "shards").glob("*.bin"))
    shard.write_bytes(shard.read_bytes()[::-1])
    (line,) = problems(str(folder))
    assert f"{shard}: block 0 of 1 is not what was written" in line


def test_an_excerpt_stands_for_data_that_is_gone(prepare_here: Prepare, tmp_path: Path) -> None:
    folder, kept = prepare_here([TEXT], ["other " * 9]), str(tmp_path / "excerpt")
    whole = Tokens.open(folder)
    excerpt.write_excerpt(folder, kept)
    found = Tokens.open(kept)
    found.check()
    assert found.tokenizer().to_str() == whole.tokenizer().to_str()
    assert found.manifest.entropy == whole.manifest.entropy
    assert found.manifest.roles == whole.manifest.roles
    assert np.array_equal(found.window(0, 0, found.length(0)), whole.window(0, 0, whole.length(0)))
    assert np.array_equal(found.document_ends(0), whole.document_ends(0))
    run = RunDir(str(tmp_path / "run"))
    excerpt.write_excerpt(folder, run.at(EXCERPT))
    assert data_of(run, folder).folder.uri == folder
    shutil.rmtree(folder)
    assert data_of(run, folder).folder.uri == run.at(EXCERPT)


def test_data_that_is_still_prepared_grows_section_by_section(prepare_here: Prepare, tmp_path: Path) -> None:
    whole = Tokens.open(prepare_here([TEXT] * 4, ["other " * 200]))
    folder, found = whole.folder, whole.manifest
    plan, publish = plan_of(folder.uri), unpublished(folder.uri)
    assert plan.sections > 2
    with pytest.raises(InputError, match="there is no prepared data"):
        Tokens.open(folder.uri)
    publish(0)
    growing = Tokens.open(folder.uri, Retry(give_up=lambda: True))
    before = growing.length(0)
    assert 0 < before < whole.length(0)
    with pytest.raises(StoppedWaiting, match="section 1 is not prepared yet"):
        growing.await_section(1)
    for section in range(1, plan.sections):
        publish(section)
    growing.await_section(plan.sections - 1)
    again = Tokens.open(folder.uri)
    for tokens in (growing, again):
        for source in range(2):
            length = whole.length(source)
            assert np.array_equal(tokens.window(source, 0, length), whole.window(source, 0, length))
            assert np.array_equal(tokens.document_ends(source), whole.document_ends(source))
        assert tokens.tokens_before(0, 2) == sum(shard.tokens for shard in found.sources[0].shards[:2])
        assert tokens.manifest.digest == found.digest


def test_more_shards_than_may_be_mapped_are_mapped_in_turn(
    prepare_here: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare_here([TEXT], ["other " * 90])
    whole = Tokens.open(folder)
    monkeypatch.setattr(tokens_module, "MAPPED", 2)
    few = Tokens.open(folder)
    assert len(whole.manifest.shards) > 4
    for source in (0, 1, 0):
        for start in range(0, whole.length(source) - 90, 40):
            assert np.array_equal(few.window(source, start, 90), whole.window(source, start, 90))
            assert len(few._opened) == 2
