"""A commit whose tables of chunks are in a file of their own, as those of large states are."""

from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flaky_reads import flip_first_read

from orchestrator.checkpoint import merging
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.copying import copy_commit
from orchestrator.checkpoint.manifest import CorruptCommit, parse_manifest
from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.retention import Retention, discard, prune
from orchestrator.config.errors import InputError
from orchestrator.models import commit_weights
from orchestrator.models.named_commit import commit_at
from orchestrator.storage.file_names import ATTEMPT_FILE, COMMITS

META = {"position": 1, "receipt": ""}
NAMES = ["model.layers.2.w", "model.layers.10.w", "optim.layers.2.w.exp_avg"]
"""In the order of their layers, not of their letters."""


@pytest.fixture
def store(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Two commits of four writers. Each tensor has a table."""
    monkeypatch.setattr(merging, "INLINE_BYTES", 0)
    monkeypatch.setattr(merging, "TABLE_CHUNKS", 1)
    store = Store(str(in_memory / "run" / COMMITS))
    for step in (1, 2):
        commit(store, step)
    return store


def value(step: int, number: int) -> torch.Tensor:
    return torch.arange(32.0).reshape(8, 4) + 100 * step + number


def commit(store: Store, step: int) -> None:
    records = []
    for writer in range(4):
        pieces = [
            TensorPiece(name, (8, 4), (2 * writer, 0), value(step, number)[2 * writer : 2 * writer + 2])
            for number, name in enumerate(NAMES)
        ]
        records += store.write_shard(step, writer, pieces[::-1])
    store.publish(step, records, META)


def index_of(store: Store, step: int) -> Path:
    (path,) = (Path(store.uri) / f"step-{step:08d}").glob("index-*.bin")
    return path


def test_it_is_written_read_copied_and_removed(store: Store, in_memory: Path) -> None:
    assert store.verify(2) == []
    found = store.latest()
    assert found is not None
    assert list(found.tensors) == NAMES
    for number, name in enumerate(NAMES):
        assert torch.equal(store.reader(found).read(name), value(2, number))
        assert torch.equal(store.reader(found).read(name, (3, 1), (2, 2)), value(2, number)[3:5, 1:3])
    other = Store(str(in_memory / "copy"))
    copy_commit(store, 2, other, {"from": "run"})
    assert other.verify(2) == []
    assert index_of(other, 2).name == index_of(store, 2).name
    assert prune(store, Retention(keep=1)) == [1]
    assert store.verify(2) == []
    assert not (Path(store.uri) / "step-00000001").exists()


def test_a_rank_reads_the_tables_of_its_tensors(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[str, int]] = []
    real = store.backend.read_into

    def read_into(path: str, offset: int, target: memoryview) -> int:
        if "index-" in path:
            reads.append((path, len(target)))
        return real(path, offset, target)

    monkeypatch.setattr(store.backend, "read_into", read_into)
    manifest = store.manifest(2)
    assert {name: entry.shape for name, entry in manifest.tensors.items()} == dict.fromkeys(NAMES, (8, 4))
    manifest.check_shapes(dict.fromkeys(NAMES[:2], (8, 4)))
    assert reads == []
    reader = store.reader(manifest)
    for _ in range(2):
        reader.read(NAMES[1])
    assert len(reads) == 1
    assert reads[0][1] < index_of(store, 2).stat().st_size / 2


def test_every_byte_of_it_counts(store: Store) -> None:
    path = index_of(store, 2)
    whole = path.read_bytes()
    named = set()
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        (line,) = store.verify(2)
        assert line.startswith(f"{store.location}/step-00000002: the chunks of ")
        assert line.endswith(f"in {path.name} are damaged")
        named |= {name for name in NAMES if name in line}
    assert named == set(NAMES)
    found = store.latest()
    assert found is not None
    assert (found.step, [step for step, _ in store.skipped]) == (1, [2])


def exchange(store: Store) -> None:
    """The parts of two commits under each other's names."""
    one, other = index_of(store, 1), index_of(store, 2)
    first, second = one.read_bytes(), other.read_bytes()
    assert len(first) == len(second)
    one.write_bytes(second)
    other.write_bytes(first)


def exchange_tables(store: Store) -> None:
    """Two tables of one commit in each other's places."""
    path = index_of(store, 2)
    data = path.read_bytes()
    sizes = [entry["bytes"] for entry in store.manifest(2).document["tables"]]
    path.write_bytes(data[sizes[0] : sizes[0] + sizes[1]] + data[: sizes[0]] + data[sizes[0] + sizes[1] :])


HARMS: dict[str, Callable[[Store], object]] = {
    "cut": lambda store: index_of(store, 2).write_bytes(index_of(store, 2).read_bytes()[:-1]),
    "longer": lambda store: index_of(store, 2).write_bytes(index_of(store, 2).read_bytes() + b"\0"),
    "empty": lambda store: index_of(store, 2).write_bytes(b""),
    "deleted": lambda store: index_of(store, 2).unlink(),
    "of another commit": exchange,
    "in another order": exchange_tables,
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_torn_or_swapped_is_found_and_named(store: Store, harm: str) -> None:
    name = index_of(store, 2).name
    HARMS[harm](store)
    assert any(name in line for line in store.verify(2))
    found = store.latest()
    assert (found.step if found else None) == (None if harm == "of another commit" else 1)
    manifest = store.manifest(2)
    if harm != "longer":
        with pytest.raises(CorruptCommit, match=name):
            [store.reader(manifest).read(tensor) for tensor in NAMES]
    # A commit whose sizes are wrong gives way to another of the same step.
    commit(store, 2)
    assert store.verify(2) == []


def test_one_wrong_table_leaves_the_others_readable(store: Store) -> None:
    path = index_of(store, 2)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    shard = next((Path(store.uri) / "step-00000002").glob("shard-00002*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # of the first tensor, which is written last
    shard.write_bytes(content)
    table, block = store.verify(2)
    assert NAMES[2] in table
    assert f"{NAMES[0]} block 0" in block
    assert torch.equal(store.reader(store.manifest(2)).read(NAMES[1]), value(2, 1))


def test_a_read_that_fails_once_is_repeated(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_first_read(store, monkeypatch)
    assert torch.equal(store.reader(store.manifest(2)).read(NAMES[0]), value(2, 0))


def test_a_manifest_without_its_store_has_shapes_and_no_chunks(store: Store) -> None:
    raw = (Path(store.uri) / "step-00000002/manifest.json").read_bytes()
    manifest = parse_manifest(raw, "x")
    assert manifest.tensors[NAMES[0]].shape == (8, 4)
    with pytest.raises(CorruptCommit, match="are not at hand"):
        len(manifest.tensors[NAMES[0]].chunks)


def test_what_a_writer_left_of_an_unpublished_step_is_removed(store: Store) -> None:
    old = Store(store.uri, attempt=store.attempt)
    old.write_shard(3, 0, [TensorPiece("model.w", (1,), (0,), torch.ones(1))])
    old._write_index(3, b"table")
    discard(store, 3)
    assert store.backend.list("step-00000003") == {}
    store._write_index(2, b"table of a publication that lost")
    prune(store, Retention(keep=2))
    assert len(list((Path(store.uri) / "step-00000002").glob("index-*"))) == 1
    assert store.verify(2) == []


def test_a_table_beyond_its_file_is_refused(store: Store) -> None:
    manifest = store.manifest(2)
    shutil.rmtree(Path(store.uri) / "step-00000001")
    name, size = manifest.index
    raw = replace(manifest, document=manifest.document | {"index": [name, size - 1]}).to_bytes()
    (Path(store.uri) / "step-00000002/manifest.json").write_bytes(raw)
    with pytest.raises(InputError, match=f"beyond the {size - 1} bytes of {name}"):
        store.latest()


def test_a_commit_with_a_damaged_index_is_not_sound(store: Store) -> None:
    path = index_of(store, 2)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert prune(store, Retention(keep=1)) == []
    found = store.latest(deep=False)
    assert found is not None
    assert found.step == 1
    assert "is damaged" in store.skipped[0][1]
    assert store.latest(1, deep=False) is not None
    with pytest.raises(InputError, match="is damaged"):
        commit_at(str(Path(store.uri).parent), 2, "init")


def test_a_right_index_is_read_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real, reads = store.backend.read_into, []

    def read_into(path: str, offset: int, target: memoryview) -> int:
        reads.append(path)
        return real(path, offset, target)

    monkeypatch.setattr(store.backend, "read_into", read_into)
    for _ in range(2):
        assert store.latest(deep=False) is not None
        assert prune(store, Retention(keep=2)) == []
    assert sorted(reads) == [f"step-{step:08d}/{index_of(store, step).name}" for step in (1, 2)]


def test_a_listing_before_the_index_was_there_is_repeated(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = store.backend.list

    def early(folder: str = "") -> dict[str, int]:
        return {path: size for path, size in real(folder).items() if folder or "index-" not in path}

    monkeypatch.setattr(store.backend, "list", early)
    found = store.latest(deep=False)
    assert found is not None
    assert found.step == 2
    assert prune(store, Retention(keep=1)) == [1]


def test_it_is_written_before_the_fence_and_the_files_are_checked(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("write", "list", "read", "publish"):
        real = getattr(store.backend, name)

        def noted(path: str, *rest: object, name: str = name, real: Any = real) -> Any:
            calls.append(f"{name} {path}")
            return real(path, *rest)

        monkeypatch.setattr(store.backend, name, noted)
    records = store.write_shard(3, 0, [TensorPiece("model.w", (1,), (0,), torch.ones(1))])
    calls.clear()
    store.publish(3, records, META)
    index = f"step-00000003/{index_of(store, 3).name}"
    assert calls == [
        f"write {index}",
        f"read {index}",
        "list step-00000003",
        f"read {ATTEMPT_FILE}",
        "publish step-00000003/manifest.json",
    ]


def test_an_index_that_is_stored_wrongly_is_written_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, writes = store.backend.write, []

    def write(path: str, buffers: Any) -> None:
        if "index-" in path:
            writes.append(path)
            buffers = [bytes(len(buffers[0]))] if len(writes) == 1 else buffers
        real(path, buffers)

    monkeypatch.setattr(store.backend, "write", write)
    commit(store, 3)
    assert len(writes) == 2
    assert store.verify(3) == []


def rewritten(store: Store, step: int, **changes: Any) -> None:
    """A manifest with these entries changed, and the right checksum."""
    manifest = store.manifest(step)
    raw = replace(manifest, document=manifest.document | changes).to_bytes()
    (Path(store.uri) / f"step-{step:08d}/manifest.json").write_bytes(raw)


def test_a_table_that_contradicts_the_manifest_is_one_line_and_a_corrupt_commit(store: Store) -> None:
    kinds = [[name, "F32", [8, 4]] for name in NAMES]
    assert store.manifest(2).document["tensors"] == kinds
    rewritten(store, 2, tensors=[[NAMES[0], "F32", [9, 4]], *kinds[1:]])
    (line,) = store.verify(2)
    assert "chunks hold 32 of 36 elements" in line
    reader = store.reader(store.manifest(2))
    assert torch.equal(reader.read(NAMES[1]), value(2, 1))
    with pytest.raises(CorruptCommit, match="chunks hold 32 of 36 elements"):
        reader.read(NAMES[0])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"chunks": 1 << 50}, "cannot hold"),
        ({"blocks": 1 << 40}, "cannot hold"),
        ({"bytes": 1 << 50}, "beyond the"),
        ({"bytes": 1 << 50, "chunks": 1 << 50, "blocks": 1 << 40}, "are cut short"),
    ],
)
def test_a_forged_table_takes_no_memory(store: Store, changes: dict[str, int], problem: str) -> None:
    manifest = store.manifest(2)
    first, *others = manifest.document["tables"]
    index = [manifest.index[0], 1 << 51] if problem == "are cut short" else [*manifest.index]
    rewritten(store, 2, tables=[first | changes, *others], index=index)
    with pytest.raises((InputError, CorruptCommit), match=problem):
        store.reader(store.manifest(2)).read(NAMES[0])


def test_threads_load_a_table_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real, reads = store.backend.read_into, []
    met = threading.Barrier(4)

    def read_into(path: str, offset: int, target: memoryview) -> int:
        reads.append(path)
        return real(path, offset, target)

    monkeypatch.setattr(store.backend, "read_into", read_into)
    table = store.manifest(2).tables[0]

    def columns(_: int) -> object:
        met.wait(60)
        return table.columns

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(columns, range(4))
    assert all(each is first for each in others)
    assert len(reads) == 1


def test_names_are_handed_on_in_the_order_of_their_letters(store: Store) -> None:
    names = [f"{commit_weights._network_prefix()}layers.{number}.w" for number in (2, 10)]
    store.publish(3, store.write_shard(3, 0, [full_piece(name, torch.ones(2)) for name in names]), META)
    manifest = store.manifest(3)
    assert list(manifest.tensors) == names
    assert commit_weights.TransformersTensors(store.reader(manifest)).names == ["layers.10.w", "layers.2.w"]


def test_another_process_gets_what_the_file_says(store: Store) -> None:
    """Resolving a continued run sends its commit to a process of its own. That process reads no tensor."""
    found = store.manifest(2)
    assert len(found.tensors[NAMES[0]].chunks) == 4
    sent = pickle.loads(pickle.dumps(found))
    assert sent.to_bytes() == found.to_bytes()
    assert {name: entry.shape for name, entry in sent.tensors.items()} == dict.fromkeys(NAMES, (8, 4))
    with pytest.raises(CorruptCommit, match="not at hand"):
        len(sent.tensors[NAMES[0]].chunks)
