"""The manifest of large data is parsed once, and mapped by everybody else, with the same result."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from orchestrator.config.errors import InputError
from orchestrator.data.store import manifest, mapped_manifest
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import DataManifest, MappedShards
from orchestrator.data.store.mapped_manifest import read_mapped
from orchestrator.data.store.tokens import Tokens
from orchestrator.data.store.verified_shard import DataGone
from orchestrator.storage import own_folder

Prepare = Callable[..., str]
TEXT = "one two three.\n<|endoftext|>\nfour five six seven!\n" * 40
LISTED = [
    "000000.ends",
    "000000.head",
    "000000.json",
    "000000.lengths",
    "000000.lock",
    "000000.parts",
    "000000.rows",
]


@pytest.fixture(autouse=True)
def every_manifest_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_manifest, "LARGE", 1)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a manifest was parsed, as the length of a list."""
    times: list[int] = []
    read = manifest.read_document

    def counted(folder: DataFolder, name: str = manifest.NAME) -> tuple[dict[str, Any], DataManifest] | None:
        times.append(1)
        return read(folder, name)

    monkeypatch.setattr(manifest, "read_document", counted)
    return times


def both(uri: str) -> tuple[DataManifest, DataManifest]:
    """The manifest as it is parsed, and as it is mapped."""
    plain, mapped = manifest.read(DataFolder(uri)), read_mapped(DataFolder(uri))
    assert plain is not None
    assert mapped is not None
    return plain, mapped


def test_what_is_mapped_is_what_is_parsed(prepare_here: Prepare, parsed: list[int]) -> None:
    uri = prepare_here([TEXT, "last words"], ["other " * 90, "a few"], [TEXT])
    plain, mapped = both(uri)
    parsed.clear()
    again = read_mapped(DataFolder(uri))
    assert again is not None
    assert not parsed
    assert sorted(path.name for path in Path(uri).glob("list/*/*")) == LISTED
    for found in (mapped, again):
        assert found.to_json() == plain.to_json()
        assert found.checksum() == plain.checksum()
        assert found.digest == plain.digest
        assert found.same_tokens(plain)
        assert found.shards == plain.shards
        for source, expected in zip(found.sources, plain.sources, strict=True):
            assert isinstance(source.shards, MappedShards)
            assert len(source.shards) == len(expected.shards) > 1
            assert source.shards[-1] == expected.shards[-1]
            assert source.shards[1:] == expected.shards[1:]
            assert np.array_equal(source.lengths, expected.lengths)
            assert np.array_equal(source.parts, expected.parts)
            with pytest.raises(IndexError):
                source.shards[len(source.shards)]


def test_tokens_are_the_same(prepare_here: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = prepare_here([TEXT], ["other " * 90])
    mapped = Tokens.open(uri)
    mapped.check()
    monkeypatch.setattr(mapped_manifest, "LARGE", 2**20)
    plain = Tokens.open(uri)
    assert isinstance(mapped.manifest.sources[1].shards, MappedShards)
    assert not isinstance(plain.manifest.sources[1].shards, MappedShards)
    for source in range(2):
        length = plain.length(source)
        assert mapped.length(source) == length
        assert np.array_equal(mapped.window(source, 0, length), plain.window(source, 0, length))
        assert np.array_equal(mapped.document_ends(source), plain.document_ends(source))
        assert np.array_equal(mapped.contents(source), plain.contents(source))
        assert mapped.tokens_before(source, 1) == plain.tokens_before(source, 1)


def test_damaged_files_are_made_again(prepare_here: Prepare, parsed: list[int]) -> None:
    uri = prepare_here([TEXT])
    plain, _ = both(uri)
    for name in LISTED:
        (path,) = Path(uri).glob(f"list/*/{name}")
        data = bytearray(path.read_bytes())
        parsed.clear()
        if data:
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        found = read_mapped(DataFolder(uri))
        assert found is not None
        assert found.to_json() == plain.to_json()
        assert len(parsed) == bool(data)


def test_other_data_has_another_list(prepare_here: Prepare) -> None:
    uri = prepare_here([TEXT])
    first, _ = both(uri)
    prepare_here([TEXT + "more"])
    second, mapped = both(uri)
    assert mapped.to_json() == second.to_json() != first.to_json()


def test_a_damaged_manifest_is_refused_and_leaves_no_list(prepare_here: Prepare) -> None:
    path = Path(prepare_here([TEXT])) / manifest.NAME
    path.write_bytes(path.read_bytes().replace(b'"tokens"', b'"tokenz"', 1))
    with pytest.raises(InputError, match=r"holds a damaged manifest.json"):
        read_mapped(DataFolder(str(path.parent)))
    assert [found.name for found in path.parent.glob("list/*/*")] == ["000000.lock"]
    path.unlink()
    assert read_mapped(DataFolder(str(path.parent))) is None


def test_a_manifest_that_is_replaced_while_it_is_read(
    prepare_here: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = prepare_here([TEXT])
    monkeypatch.setattr(mapped_manifest, "_checksum_of_large", lambda folder: "0" * 32)
    with pytest.raises(DataGone, match="was replaced while it was read"):
        read_mapped(DataFolder(uri))


def test_a_full_disk_costs_only_time(prepare_here: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = prepare_here([TEXT])
    (Path(uri) / "list").touch()  # so no folder can be made there
    found = read_mapped(DataFolder(uri))
    assert found is not None
    assert not isinstance(found.sources[0].shards, MappedShards)
    assert found == manifest.read(DataFolder(uri))


def test_remote_data_is_parsed_once_a_node(
    prepare_here: Prepare, tmp_path: Path, parsed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    uri = f"memory://{uuid.uuid4().hex}/data"
    prepare_here([TEXT], uri=uri)
    plain, mapped = both(uri)
    parsed.clear()
    again = read_mapped(DataFolder(uri))
    assert again is not None
    assert again.to_json() == mapped.to_json() == plain.to_json()
    assert not parsed
    assert len(list(own_folder.own_folder("tokens").glob("list/*/000000.rows"))) == 1
    fs, path = fsspec.core.url_to_fs(uri)
    assert not fs.glob(f"{path}/list/*")
    shutil.rmtree(own_folder.own_folder("tokens"))
    assert read_mapped(DataFolder(uri)) is not None
    assert parsed
