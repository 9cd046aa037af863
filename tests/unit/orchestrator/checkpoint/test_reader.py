from __future__ import annotations

import errno
import random
import uuid
from pathlib import Path

import pytest
import torch
from flaky_reads import flip_first_read

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import CommitManifest, CorruptCommit
from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.config.errors import InputError
from orchestrator.storage.retry import Retry

META = {"position": 0, "receipt": ""}


def tiles(shape: tuple[int, ...], chance: random.Random, depth: int = 3) -> list[tuple[list[int], list[int]]]:
    """A random tiling by cuts through boxes: (start, extent) each."""
    boxes = [([0] * len(shape), list(shape))]
    for _ in range(chance.randint(0, depth) if shape else 0):
        start, extent = boxes.pop(chance.randrange(len(boxes)))
        dim = chance.randrange(len(shape))
        cut = chance.randint(0, extent[dim])
        left, right = list(extent), list(extent)
        left[dim], right[dim] = cut, extent[dim] - cut
        moved = list(start)
        moved[dim] += cut
        boxes += [box for box in [(start, left), (moved, right)] if 0 not in box[1]] or [(start, extent)]
    return boxes


def cut(tensor: torch.Tensor, start: list[int], extent: list[int]) -> torch.Tensor:
    return tensor[tuple(slice(at, at + n) for at, n in zip(start, extent, strict=True))]


def commit(
    store: Store, tensors: dict[str, torch.Tensor], chance: random.Random, step: int = 1
) -> CommitManifest:
    shards: list[list[TensorPiece]] = [[] for _ in range(4)]
    for name, tensor in tensors.items():
        for start, extent in tiles(tuple(tensor.shape), chance):
            piece = TensorPiece(name, tuple(tensor.shape), tuple(start), cut(tensor, start, extent))
            chance.choice(shards).append(piece)
    records = [
        record for shard, pieces in enumerate(shards) for record in store.write_shard(step, shard, pieces)
    ]
    return store.publish(step, records, META)


@pytest.mark.parametrize("seed", range(12))
def test_any_tiling_is_read_in_any_slices(seed: int, in_memory: Path) -> None:
    chance = random.Random(seed)
    uri = str(in_memory) if seed % 2 else f"memory://{uuid.uuid4().hex}"
    store = Store(uri, block_bytes=chance.choice([16, 64, 4096]), file_bytes=chance.choice([100, 10_000]))
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
    tensors = {
        f"model.{number}": torch.randint(
            0, 99, [chance.randint(1, 9) for _ in range(chance.randint(0, 4))]
        ).to(chance.choice(dtypes))
        for number in range(12)
    }
    reader = store.reader(commit(store, tensors, chance))
    for name, tensor in tensors.items():
        assert torch.equal(reader.read(name), tensor)
        for _ in range(8):
            start = [chance.randint(0, n) for n in tensor.shape]
            extent = [chance.randint(0, n - at) for n, at in zip(tensor.shape, start, strict=True)]
            got = reader.read(name, tuple(start), tuple(extent))
            assert got.dtype == tensor.dtype
            assert torch.equal(got, cut(tensor, start, extent))


def blocks_of(tensor: torch.Tensor, start: list[int], extent: list[int], block: int) -> int:
    """Bytes of the blocks that hold a slice of a tensor that is one chunk, counted element by element."""
    place = torch.arange(tensor.numel()).reshape(tensor.shape)
    numbers = {int(at) * tensor.element_size() // block for at in cut(place, start, extent).flatten()}
    size = tensor.numel() * tensor.element_size()
    return sum(min(block, size - number * block) for number in numbers)


def test_only_the_blocks_of_a_slice_are_read(in_memory: Path) -> None:
    chance = random.Random(1)
    store = Store(str(in_memory), block_bytes=64)
    tensor = torch.randn(12, 10, 16)
    manifest = store.publish(1, store.write_shard(1, 0, [full_piece("model.w", tensor)]), META)
    assert len(manifest.tensors["model.w"].chunks) == 1
    for _ in range(200):
        start = [chance.randint(0, n - 1) for n in tensor.shape]
        extent = [chance.randint(1, n - at) for n, at in zip(tensor.shape, start, strict=True)]
        reader = store.reader(manifest)
        assert torch.equal(reader.read("model.w", tuple(start), tuple(extent)), cut(tensor, start, extent))
        assert reader.bytes_read == blocks_of(tensor, start, extent, 64)


@pytest.mark.parametrize("columns", [1024, 1000, 64])
def test_columns_of_a_large_matrix_do_not_cost_all_of_it(in_memory: Path, columns: int) -> None:
    store = Store(str(in_memory), block_bytes=1024)
    tensor = torch.randn(2, 64, columns).bfloat16()
    manifest = store.publish(1, store.write_shard(1, 0, [full_piece("model.w", tensor)]), META)
    assert store.verify(1) == []
    for ranks in (1, 2, 4, 8):
        width = columns // ranks
        readers = [store.reader(manifest) for _ in range(ranks)]
        parts = [readers[i].read("model.w", (0, 0, width * i), (2, 64, width)) for i in range(ranks)]
        assert torch.equal(torch.cat(parts, -1), tensor)
        if columns == 1024:
            assert [reader.bytes_read for reader in readers] == [tensor.nbytes // ranks] * ranks


def test_a_rank_reads_its_part_and_no_more(in_memory: Path) -> None:
    store = Store(str(in_memory), block_bytes=1024)
    tensor = torch.randn(64, 256)
    pieces = [TensorPiece("model.w", (64, 256), (16 * i, 0), tensor[16 * i : 16 * i + 16]) for i in range(4)]
    records = [record for i, piece in enumerate(pieces) for record in store.write_shard(1, i, [piece])]
    manifest = store.publish(1, records, META)
    for ranks in (1, 2, 8, 16):
        rows = 64 // ranks
        readers = [store.reader(manifest) for _ in range(ranks)]
        parts = [readers[i].read("model.w", (rows * i, 0), (rows, 256)) for i in range(ranks)]
        assert torch.equal(torch.cat(parts), tensor)
        assert [reader.bytes_read for reader in readers] == [rows * 256 * 4] * ranks


def test_wrong_names_and_slices_are_refused(in_memory: Path) -> None:
    store = Store(str(in_memory))
    reader = store.reader(
        store.publish(1, store.write_shard(1, 0, [full_piece("model.w", torch.ones(4, 2))]), META)
    )
    with pytest.raises(InputError, match=r"no tensor 'model\.x'"):
        reader.read("model.x")
    with pytest.raises(InputError, match="no slice"):
        reader.read("model.w", (1,))
    for start, shape in [
        ((0, 0), (5, 2)),
        ((-1, 0), (1, 1)),
        ((3, 0), (2, 2)),
        ((0,), (4,)),
        ((0, 0), (4, -1)),
    ]:
        with pytest.raises(InputError, match="no slice"):
            reader.read("model.w", start, shape)


def test_a_passing_read_error_is_read_again(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(in_memory))
    manifest = store.publish(1, store.write_shard(1, 0, [full_piece("model.w", torch.ones(4, 2))]), META)
    calls = flip_first_read(store, monkeypatch)
    assert torch.equal(store.reader(manifest).read("model.w"), torch.ones(4, 2))
    assert len(calls) == 2


def test_a_commit_that_its_medium_has_lost_is_damaged(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk's refusal is played: no disk here can be broken."""
    store = Store(str(in_memory), retry=Retry(attempts=2, first=0.001))
    for step in (1, 2, 3):
        store.publish(step, store.write_shard(step, 0, [full_piece("model.w", torch.ones(4, 2))]), META)
    newest = store.manifest(2)
    real_read, real_into = store.backend.read, store.backend.read_into

    def read(path: str) -> bytes:
        if "step-00000003" in path:
            raise OSError(errno.EIO, "Input/output error")
        return real_read(path)

    def read_into(path: str, offset: int, target: memoryview) -> int:
        if "step-00000002" in path:
            raise OSError(errno.EIO, "Input/output error")
        return real_into(path, offset, target)

    monkeypatch.setattr(store.backend, "read", read)
    monkeypatch.setattr(store.backend, "read_into", read_into)
    with pytest.raises(CorruptCommit, match=r"step 2: .*: model.w: the file cannot be read: Input/output"):
        store.reader(newest).read("model.w")
    (line,) = store.verify(2)
    assert line.endswith("the header at byte 0 cannot be read: Input/output error")
    assert store.verify(3)[0].endswith("the manifest cannot be read: Input/output error")
    found = store.latest()
    assert found is not None
    assert (found.step, [step for step, _ in store.skipped]) == (1, [3, 2])
