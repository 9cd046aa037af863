from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import CorruptCommit, parse_manifest
from orchestrator.checkpoint.pieces import full_piece
from orchestrator.checkpoint.shard import digest
from orchestrator.config.errors import InputError


@pytest.fixture
def store(in_memory: Path) -> Store:
    store = Store(str(in_memory))
    tensors = {"model.w": torch.randn(4, 4), "model.b": torch.randn(4)}
    records = store.write_shard(1, 0, [full_piece(*item) for item in tensors.items()])
    store.publish(1, records, {"position": 1, "receipt": ""})
    return store


def forged(store: Store, change: Any) -> bytes:
    """The manifest with a change, under a checksum that is right: what a stranger could hand us."""
    data = json.loads(store.manifest(1).to_bytes())
    del data["checksum"]
    change(data)
    body = json.dumps(data, separators=(",", ":"), sort_keys=True).encode()
    return body[:-1] + b',"checksum":"' + digest(body).encode() + b'"}\n'


def rename(data: dict[str, Any], name: str) -> None:
    (old,) = data["files"]
    data["files"][name] = data["files"].pop(old)
    for tensor in data["tensors"].values():
        tensor["chunks"][0]["file"] = name


def enlarge(data: dict[str, Any]) -> None:
    tensor = data["tensors"]["model.w"]
    tensor["shape"] = tensor["chunks"][0]["shape"] = [4, 4000]


CASES: dict[str, tuple[Any, str]] = {
    "newer schema": (lambda d: d.update(schema=2), "schema 2 is newer"),
    "outside": (lambda d: rename(d, "../../etc/passwd"), "not a shard of this folder"),
    "absolute": (lambda d: rename(d, "/etc/passwd"), "not a shard of this folder"),
    "unlisted": (
        lambda d: d["tensors"]["model.w"]["chunks"][0].update(file="x"),
        "not a shard of this commit",
    ),
    "too large": (enlarge, "more than shard"),
    "far offset": (lambda d: d["tensors"]["model.w"]["chunks"][0].update(offset=10**15), "more than shard"),
    "negative": (lambda d: d["tensors"]["model.w"]["chunks"][0].update(offset=-8), "not sizes"),
    "no checksum": (lambda d: d["tensors"]["model.w"]["chunks"][0].update(blocks=[]), "0 checksums"),
    "dtype": (lambda d: d["tensors"]["model.w"].update(dtype="PICKLE"), "unknown dtype"),
    "hole": (lambda d: d["tensors"]["model.b"].update(shape=[5]), "4 of 5"),
    "no tensors": (lambda d: d.pop("tensors"), "not a manifest"),
    "text": (lambda d: d.update(tensors="x"), "not a manifest"),
    "older": (lambda d: d.update(schema=0), "not a manifest"),
    "overflow": (lambda d: d["tensors"]["model.b"].update(shape=[0, 1 << 63]), "not sizes"),
    "blocks": (lambda d: d.update(block_bytes=0), "multiple of 16"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_manifest_is_refused_in_one_line(store: Store, case: str) -> None:
    change, words = CASES[case]
    with pytest.raises(InputError) as error:
        parse_manifest(forged(store, change), "x/step-00000001")
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
