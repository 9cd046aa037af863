from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.checkpoint import compact
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.copying import copy_commit
from orchestrator.checkpoint.manifest import CorruptCommit, parse_manifest
from orchestrator.checkpoint.pieces import full_piece
from orchestrator.checkpoint.retention import Retention, prune, rewind
from orchestrator.checkpoint.shard import digest
from orchestrator.config.errors import InputError


@pytest.fixture
def store(in_memory: Path) -> Store:
    store = Store(str(in_memory))
    tensors = {"model.w": torch.randn(4, 4), "model.b": torch.randn(4)}
    records = store.write_shard(1, 0, [full_piece(*item) for item in tensors.items()])
    store.publish(1, records, {"position": 1, "receipt": ""})
    return store


EARLIER = Path(__file__).parent / "of_schema_1"
"""Commits that version 1 of the format wrote: one writer at step 1, two at step 2."""


def forged(store: Store, change: Any) -> bytes:
    """The manifest with a change, under a checksum that is right: what a stranger could hand us."""
    data = json.loads(store.manifest(1).to_bytes())
    del data["checksum"]
    change(data)
    body = json.dumps(data, separators=(",", ":"), sort_keys=True).encode()
    return body[:-1] + b',"checksum":"' + digest(body).encode() + b'"}\n'


def rename(data: dict[str, Any], name: str) -> None:
    data["files"][0][0] = name


def with_table(data: dict[str, Any], change: Callable[[Any], Any], sums: bytes | None = None) -> None:
    """Change the columns of the only table: tensor, file, offset, two starts and two extents of b and w."""
    (entry,) = data["tables"]
    columns, checksums = compact.unpack(entry, compact.inline(entry))
    packed, content = compact.pack(change(columns.copy()), checksums.tobytes() if sums is None else sums)
    data["tables"] = [compact.with_data(packed | {"tensors": entry["tensors"]}, content)]


def put(row: int, chunk: int, value: int) -> Callable[[Any], Any]:
    def change(columns: Any) -> Any:
        columns[row, chunk] = value
        return columns

    return change


def resize(data: dict[str, Any], **sizes: int) -> None:
    data["tables"][0].update(sizes)


CASES: dict[str, tuple[Any, str]] = {
    "newer schema": (lambda d: d.update(schema=3), "schema 3 is newer"),
    "outside": (lambda d: rename(d, "../../etc/passwd"), "not a shard of this folder"),
    "absolute": (lambda d: rename(d, "/etc/passwd"), "not a shard of this folder"),
    "unlisted": (lambda d: with_table(d, put(1, 0, 1)), "not a shard of this commit"),
    "far offset": (lambda d: with_table(d, put(2, 1, 10**15)), "more than shard"),
    "negative": (lambda d: with_table(d, put(2, 0, -8)), "not sizes"),
    "huge": (lambda d: with_table(d, put(3, 0, 1 << 62)), "not sizes"),
    "no checksum": (lambda d: with_table(d, lambda c: c, b""), "0 checksums for 2 blocks"),
    "dtype": (lambda d: d["tensors"][0].__setitem__(1, "PICKLE"), "unknown dtype"),
    "hole": (lambda d: d["tensors"][0].__setitem__(2, [5]), "4 of 5"),
    "beyond": (lambda d: with_table(d, put(5, 0, 5)), "a chunk of [5] at [0] reaches outside [4]"),
    "padding": (lambda d: with_table(d, put(6, 0, 2)), "reaches outside [4]"),
    "other tensor": (lambda d: with_table(d, put(0, 0, 1)), "1 tensors and should have 2"),
    "order": (lambda d: with_table(d, lambda c: c[:, ::-1]), "not in order"),
    "fewer dimensions": (lambda d: with_table(d, lambda c: c[[0, 1, 2, 3, 5]]), "fewer dimensions"),
    "more chunks": (lambda d: resize(d, chunks=3), "are not those of 3 chunks"),
    "more blocks": (lambda d: resize(d, blocks=10**9), "cannot hold"),
    "dimensions": (lambda d: resize(d, dimensions=10**6), "more than a tensor has"),
    "count": (lambda d: resize(d, chunks=-1), "not sizes"),
    "altered": (lambda d: resize(d, sum="0" * 16), "a table of chunks is damaged"),
    "tensor without a table": (lambda d: resize(d, tensors=1), "tables have 1 of 2 tensors"),
    "no place": (lambda d: d["tables"][0].pop("data"), "without bytes"),
    "index outside": (lambda d: d.update(index=["../index", 9]), "not the index"),
    "twice": (lambda d: d["tensors"].append(d["tensors"][0]), "listed twice"),
    "no tensors": (lambda d: d.pop("tensors"), "not a manifest"),
    "text": (lambda d: d.update(tensors="x"), "not a manifest"),
    "older": (lambda d: d.update(schema=0), "not a manifest"),
    "overflow": (lambda d: d["tensors"][0].__setitem__(2, [0, 1 << 63]), "not sizes"),
    "too large": (lambda d: d["tensors"][0].__setitem__(2, [1 << 59, 4]), "not sizes"),
    "blocks": (lambda d: d.update(block_bytes=0), "multiple of 16"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_manifest_is_refused_in_one_line(store: Store, case: str) -> None:
    change, words = CASES[case]
    with pytest.raises(InputError) as error:
        [table.columns for table in parse_manifest(forged(store, change), "x/step-00000001").tables]
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("x/step-00000001")


def rename_earlier(data: dict[str, Any], name: str) -> None:
    (old,) = data["files"]
    data["files"][name] = data["files"].pop(old)
    for tensor in data["tensors"].values():
        tensor["chunks"][0]["file"] = name


def enlarge(data: dict[str, Any]) -> None:
    tensor = data["tensors"]["model.w"]
    tensor["shape"] = tensor["chunks"][0]["shape"] = [4, 4000]


EARLIER_CASES: dict[str, tuple[Any, str]] = {
    "outside": (lambda d: rename_earlier(d, "../../etc/passwd"), "not a shard of this folder"),
    "unlisted": (
        lambda d: d["tensors"]["model.w"]["chunks"][0].update(file="x"),
        "not a shard of this commit",
    ),
    "too large": (enlarge, "1 checksums for 64000 bytes"),
    "far offset": (lambda d: d["tensors"]["model.w"]["chunks"][0].update(offset=10**15), "more than shard"),
    "negative": (lambda d: d["tensors"]["model.w"]["chunks"][0].update(offset=-8), "not sizes"),
    "no checksum": (lambda d: d["tensors"]["model.w"]["chunks"][0].update(blocks=[]), "0 checksums"),
    "dtype": (lambda d: d["tensors"]["model.w"].update(dtype="PICKLE"), "unknown dtype"),
    "hole": (lambda d: d["tensors"]["model.b"].update(shape=[5]), "4 of 5"),
    "overflow": (lambda d: d["tensors"]["model.b"].update(shape=[0, 1 << 63]), "not sizes"),
}


@pytest.mark.parametrize("case", EARLIER_CASES)
def test_a_hostile_manifest_of_an_earlier_version_is_refused_in_one_line(case: str) -> None:
    change, words = EARLIER_CASES[case]
    with pytest.raises(InputError) as error:
        parse_manifest(forged(Store(str(EARLIER)), change), "x/step-00000001")
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("x/step-00000001")


def test_latest_refuses_instead_of_going_back_in_time(store: Store, in_memory: Path) -> None:
    (in_memory / "step-00000001" / "manifest.json").write_bytes(forged(store, lambda d: d.update(schema=9)))
    with pytest.raises(InputError, match="newer"):
        store.latest()


def test_a_link_out_of_the_folder_is_not_followed(store: Store, in_memory: Path) -> None:
    (shard,) = (in_memory / "step-00000001").glob("*.safetensors")
    outside = in_memory / "outside"
    shard.rename(outside)
    shard.symlink_to(outside)
    assert store.verify(1)
    with pytest.raises(CorruptCommit, match="missing"):
        store.reader(store.manifest(1)).read("model.w")


def test_another_models_commit_is_named(store: Store) -> None:
    manifest = store.manifest(1)
    manifest.check_shapes({"model.w": (4, 4), "model.b": (4,)})
    with pytest.raises(InputError) as error:
        manifest.check_shapes({"model.w": (4, 8), "model.c": (1,)})
    assert "model.w is [4, 4] and should be [4, 8]" in str(error.value)
    assert "model.b is [4] and should be absent" in str(error.value)
    assert "model.c is missing and should be [1]" in str(error.value)


def test_a_commit_of_an_earlier_version_is_read_verified_copied_and_pruned(in_memory: Path) -> None:
    shutil.copytree(EARLIER, in_memory / "run")
    store = Store(str(in_memory / "run"))
    found = store.latest()
    assert found is not None
    assert (found.step, found.position, found.receipt, found.meta) == (2, 2, "two", {"layout": {"tp": 2}})
    reader = store.reader(found)
    assert torch.equal(reader.read("model.w"), torch.arange(48.0).reshape(8, 6))
    assert torch.equal(reader.read("model.w", (2, 1), (3, 4)), torch.arange(48.0).reshape(8, 6)[2:5, 1:5])
    assert torch.equal(reader.read("model.b"), torch.arange(6.0).bfloat16())
    assert float(reader.read("optim.w.step")) == 2.0
    assert reader.read("model.none").shape == (0, 4)
    # Runs that begin with a commit remember the digest of these bytes.
    assert found.to_bytes() == (in_memory / "run/step-00000002/manifest.json").read_bytes()
    other = Store(str(in_memory / "copy"))
    copy_commit(store, 2, other, {"from": "run"})
    assert (other.verify(2), other.manifest(2).meta["from"]) == ([], "run")
    store.publish(
        3, store.write_shard(3, 0, [full_piece("model.w", torch.ones(2))]), {"position": 3, "receipt": ""}
    )
    assert prune(store, Retention(keep=2)) == [1]
    (shard,) = (in_memory / "run/step-00000002").glob("shard-00007*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (line,) = store.verify(2)
    assert "model.w block 1 at byte" in line
    assert rewind(store, 0) == [2, 3]
    assert list((in_memory / "run").iterdir()) == [in_memory / "run/LATEST"]


def test_every_bit_of_a_manifest_of_an_earlier_version_counts() -> None:
    raw = (EARLIER / "step-00000001/manifest.json").read_bytes()
    for at in range(0, len(raw) * 8, 7):
        data = bytearray(raw)
        data[at // 8] ^= 1 << at % 8
        with pytest.raises(CorruptCommit):
            parse_manifest(bytes(data), "")
