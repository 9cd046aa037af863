"""What the manifest of a large state costs: Llama 3 405B under tp 8, pp 16 and ZeRO 1, beside DCP's own metadata.

    python tests/bench/bench_manifests.py [--dp 8 32 128]
    python tests/bench/bench_manifests.py --calls 4096

The writers' records, the merge, the root, the tables and a rank's part are the product's own code. Only the weights are
missing: a record has random checksums. Each measurement has a process of its own, which reports its seconds of a
processor and the memory that it needed beyond its start. DCP's metadata has the same tensors and chunks, as its planner
makes them and its file-system writer stores them (`torch.distributed.checkpoint`, one pickle that every rank reads).
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

TP, PP, LAYERS = 8, 16, 126
WIDTH, INNER, KEYS, WORDS = 16_384, 53_248, 1_024, 128_256
BLOCK = 1 << 20
FILE = 256 << 20
SLOTS = ("model.{}", "optim.{}.exp_avg", "optim.{}.exp_avg_sq")
OF_LAYER = {
    "attention.query.weight": ((WIDTH, WIDTH), 0),
    "attention.key.weight": ((KEYS, WIDTH), 0),
    "attention.value.weight": ((KEYS, WIDTH), 0),
    "attention.output.weight": ((WIDTH, WIDTH), 1),
    "mlp.gate.weight": ((INNER, WIDTH), 0),
    "mlp.up.weight": ((INNER, WIDTH), 0),
    "mlp.down.weight": ((WIDTH, INNER), 1),
    "attention_norm.weight": ((WIDTH,), None),
    "mlp_norm.weight": ((WIDTH,), None),
}
"""The tensors of a layer: their shapes, and the dimension that tensor parallelism cuts."""

Piece = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Name, shape, start and extent."""


def tensors_of_stage(stage: int) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
    edges = [LAYERS * number // PP for number in (stage, stage + 1)]
    if stage == 0:
        yield "embedding.weight", (WORDS, WIDTH), 0
    for layer in range(*edges):
        for name, (shape, cut) in OF_LAYER.items():
            yield f"layers.{layer}.{name}", shape, cut
    if stage == PP - 1:
        yield "norm.weight", (WIDTH,), None
        yield "head.weight", (WORDS, WIDTH), 0


def pieces_of(stage: int, tp: int, dp: int, width: int) -> Iterator[Piece]:
    """The fp32 pieces of one writer: a part of the rows of its tensor-parallel shard, in panels as they are stored."""
    for name, shape, cut in tensors_of_stage(stage):
        start, extent = [0] * len(shape), list(shape)
        if cut is not None:
            extent[cut] //= TP
            start[cut] = tp * extent[cut]
        elif tp:
            continue
        low, high = (extent[0] * number // width for number in (dp, dp + 1))
        start[0], extent[0] = start[0] + low, high - low
        if not extent[0]:
            continue
        size, last = 4 * extent[0] * (extent[1] if len(extent) > 1 else 1), extent[-1]
        panels = max(
            n for n in (1, 2, 4, 8) if n == 1 or (len(extent) > 1 and n <= size // BLOCK and n * 64 <= last)
        )
        for slot in SLOTS:
            for panel in range(panels):
                edges = [last * number // panels for number in (panel, panel + 1)]
                yield (
                    slot.format(name), shape, (*start[:-1], start[-1] + edges[0]),
                    (*extent[:-1], edges[1] - edges[0]),
                )  # fmt: skip


def files_of(pieces: Iterator[Piece]) -> Iterator[list[tuple[Piece, int]]]:
    """Group the pieces of a writer into files, with their offsets."""
    group: list[tuple[Piece, int]] = []
    size = 0
    for piece in pieces:
        count = 4 * piece[3][0] * (piece[3][1] if len(piece[3]) > 1 else 1)
        if group and size + count > FILE:
            yield group
            group, size = [], 0
        group.append((piece, size))
        size += count
    yield group


def writers(width: int) -> Iterator[tuple[int, list[list[tuple[Piece, int]]]]]:
    """The files of every writer, by its number."""
    for writer in range(PP * width * TP):
        stage, rest = divmod(writer, width * TP)
        dp, tp = divmod(rest, TP)
        yield writer, list(files_of(pieces_of(stage, tp, dp, width)))


def size_of(piece: Piece) -> int:
    return 4 * piece[3][0] * (piece[3][1] if len(piece[3]) > 1 else 1)


def ours(width: int, folder: Path) -> dict[str, Any]:
    """Make the records, merge them, and write the root and the index."""
    from orchestrator.checkpoint.compact import PieceTable
    from orchestrator.checkpoint.merging import merge_records

    notes, chunks, notes_bytes = [], 0, 0
    began = time.process_time()
    for writer, files in writers(width):
        records = []
        for number, group in enumerate(files):
            header = b"h" * 64 * len(group)
            places = [((p[0], "F32", p[1]), p[2], p[3], len(header) + at) for p, at in group]
            blocks = sum(-(-size_of(piece) // BLOCK) for piece, _ in group)
            size = len(header) + sum(size_of(piece) for piece, _ in group)
            name = f"shard-{writer:05d}-{'a' * 12}-{number:08x}.safetensors"
            records.append(PieceTable(places).record(name, size, header, BLOCK, os.urandom(8 * blocks)))
            chunks += len(group)
        notes.append(json.dumps({"records": records}))
        notes_bytes += len(notes[-1])
    noted = time.process_time() - began
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    records = [record for note in notes for record in json.loads(note)["records"]]
    notes.clear()
    read = time.process_time() - began
    began = time.process_time()
    commit, index = merge_records(1, records, {"position": 0, "receipt": ""}, "bench")
    root = commit.to_bytes()
    merged = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (folder / "root").write_bytes(root)
    (folder / "index").write_bytes(index)
    return {
        "writers": PP * width * TP, "chunks": chunks, "note_ms": noted * 1e3 / (PP * width * TP),
        "note_bytes": notes_bytes / (PP * width * TP), "read_notes_s": read, "merge_s": merged,
        "merge_mb": (peak - base) / 1e3, "root_mb": len(root) / 1e6, "index_mb": len(index) / 1e6,
    }  # fmt: skip


def our_part(width: int, folder: Path) -> dict[str, Any]:
    """Read what a rank of the middle stage needs: the root, and the tables of its tensors."""
    import_module("numpy")  # a rank has it already
    from orchestrator.checkpoint.manifest import parse_manifest

    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    bytes_read = 0
    with open(folder / "index", "rb") as file:

        def read(name: str, offset: int, target: memoryview) -> int:
            nonlocal bytes_read
            bytes_read += len(target)
            file.seek(offset)
            return file.readinto(target)

        commit = parse_manifest((folder / "root").read_bytes(), "bench", read)
        found = 0
        wanted = {piece[0]: piece for piece in pieces_of(PP // 2, 3, width // 2, width)}
        for name, (_, _, start, extent) in wanted.items():
            found += len(list(commit.tensors[name].chunks.overlapping((start, extent))))
    assert found >= len(wanted)
    return {
        "part_s": time.process_time() - began,
        "part_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1e3,
        "part_read_mb": (bytes_read + (folder / "root").stat().st_size) / 1e6,
    }


def dcp(width: int, folder: Path) -> dict[str, Any]:
    """DCP's metadata of the same state, pickled as its writer does."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    entries: dict[str, TensorStorageMetadata] = {}
    stored = {}
    chunks = 0
    for writer, files in writers(width):
        for number, group in enumerate(files):
            for (name, shape, start, extent), at in group:
                entry = entries.setdefault(
                    name, TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), [])
                )
                entry.chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(extent)))
                index = MetadataIndex(name, torch.Size(start), len(entry.chunks) - 1)
                stored[index] = _StorageInfo(f"__{writer}_{number}.distcp", at, size_of(("", (), (), extent)))
                chunks += 1
    raw = pickle.dumps(Metadata(dict(entries), storage_data=stored))
    made = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (folder / "metadata").write_bytes(raw)
    return {"chunks": chunks, "made_s": made, "made_mb": (peak - base) / 1e3, "mb": len(raw) / 1e6}


def dcp_part(width: int, folder: Path) -> dict[str, Any]:
    """What every rank of DCP does before it loads: read all of it."""
    import_module("torch.distributed.checkpoint.filesystem")  # its classes are in the pickle
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    found = pickle.loads((folder / "metadata").read_bytes())
    assert found.storage_data
    return {
        "part_s": time.process_time() - began,
        "part_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1e3,
    }


class Slow:
    """A backend whose calls take as long as a store's answer."""

    def __init__(self, backend: Any, seconds: float) -> None:
        self._backend, self._seconds = backend, seconds

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._backend, name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(self._seconds)
            return call(*args, **kwargs)

        return slow


def calls(count: int, answer: float) -> None:
    """Gather the notes of `count` writers, and remove a commit and the notes of another, at a store that is slow."""
    from orchestrator.checkpoint.commit_store import Store
    from orchestrator.checkpoint.committer import Committer
    from orchestrator.checkpoint.retention import Retention, prune

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = Store(folder, attempt="a")
        for step in (1, 2):
            for writer in range(1, count):
                path = Path(folder, f"step-{step:08d}", f"records-{writer:05d}-a.json")
                path.parent.mkdir(exist_ok=True)
                path.write_text('{"records":[]}')
            if step == 1:
                store.publish(step, [], {"position": 0, "receipt": ""})
        store.backend = Slow(store.backend, answer)
        began = time.perf_counter()
        Committer(store, 0, count)._gather(2, 60.0)
        gathered = time.perf_counter() - began
        store.publish(2, [], {"position": 0, "receipt": ""})
        began = time.perf_counter()
        prune(store, Retention(keep=1))
        removed = time.perf_counter() - began
        left = len(store.backend.list())
    print(json.dumps({"writers": count, "gather_s": gathered, "remove_s": removed, "left": left}))


MEASURED = {"ours": ours, "our_part": our_part, "dcp": dcp, "dcp_part": dcp_part}


def measured(what: str, width: int, folder: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--only", what, "--dp", str(width), "--folder", folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dp", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument(
        "--dcp-up-to", type=int, default=32, help="the largest width of which DCP's fits in memory"
    )
    parser.add_argument(
        "--calls", type=int, default=0, help="writers whose notes are gathered and removed instead"
    )
    parser.add_argument("--answer", type=float, default=0.005, help="seconds of each call then")
    parser.add_argument("--only", choices=MEASURED)
    parser.add_argument("--folder", default="")
    options = parser.parse_args()
    if options.calls:
        calls(options.calls, options.answer)
        return
    if options.only:
        print(json.dumps(MEASURED[options.only](options.dp[0], Path(options.folder))))
        return
    for width in options.dp:
        with tempfile.TemporaryDirectory() as folder:
            kinds = [kind for kind in MEASURED if "dcp" not in kind or width <= options.dcp_up_to]
            for kind in kinds:
                print(width * TP * PP, kind, json.dumps(measured(kind, width, folder)), flush=True)


if __name__ == "__main__":
    main()
