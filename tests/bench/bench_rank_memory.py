"""What a rank holds to read prepared data of any size: anonymous memory, and the time until it has a batch.

    .venv/bin/python tests/bench/bench_rank_memory.py FOLDER [--tokens 1e12] [--documents 1e6]

The data is synthetic: sparse shards of zeros with true checksums and indices of random documents, made in FOLDER,
which must not be there and is removed. Each row is a process of its own: an epoch that is shuffled whole, one by
sections, one of which a share is held out, for the first and for the next process of a node, and samples that are found
by their documents, likewise.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import xxhash

PART = 2**23
"""Tokens of a shard, two bytes each."""

ROWS = ("epoch", "sections", "share, first", "share, next", "documents, first", "documents, next")


def make(place: Path, tokens: int, documents: int) -> None:
    """The prepared data."""
    from orchestrator.data.prepare.contents import ENTRY
    from orchestrator.data.samples.sections.plan import SectionPlan
    from orchestrator.data.store import manifest
    from orchestrator.data.store.data_folder import DataFolder
    from orchestrator.data.store.manifest import DataManifest, PreparedSource, TokenShard

    (place / "shards").mkdir(parents=True)
    count = max(1, tokens // PART)
    each, draw = max(1, documents // count), np.random.default_rng(0)
    block, whole = xxhash.xxh3_64_hexdigest(bytes(2**20)), xxhash.xxh3_128_hexdigest(bytes(2 * PART))
    ends = (np.arange(1, each + 1) * (PART // each)).astype("<u4")
    ends[-1] = PART
    found = []
    for number in range(count):
        name = f"shards/{number:06d}"
        with (place / f"{name}.bin").open("wb") as file:
            file.truncate(2 * PART)
        (place / f"{name}.ends").write_bytes(ends.tobytes())
        contents = np.zeros(each + 1, ENTRY)
        contents["bytes"][:-1], contents["low"][:-1] = 3, draw.integers(0, 2**63, each).astype(np.uint64)
        (place / f"{name}.contents").write_bytes(contents.tobytes())
        sums = [xxhash.xxh3_64_hexdigest(data.tobytes()) for data in (ends, contents)]
        found.append(TokenShard(f"{name}.bin", PART, each, 3 * each, whole, block * 16, *sums))
    sizes = {"tokens": count * PART, "documents": count * each, "bytes": 3 * count * each}
    source = PreparedSource("synthetic", tuple(found))
    data = DataManifest(
        "f" * 32, "<u2", "", 50_000, {"eos": 0}, (), (source,), **sizes, entropy=1.0, bytes_per_token=4.0
    )
    manifest.write(DataFolder(str(place)), data)
    SectionPlan((count,)).write(DataFolder(str(place)))


def anonymous() -> float:
    """Anonymous memory of this process in MiB: without the pages of mapped files."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("the kernel does not tell")


def read(place: Path, how: str) -> None:
    """Open the data and read batches; prints a row."""
    from orchestrator.data.samples.batches import batches_of
    from orchestrator.data.samples.held_out_split import split
    from orchestrator.data.samples.sections.plan import SectionPlan
    from orchestrator.data.samples.windows import windows_of
    from orchestrator.data.store.tokens import Tokens
    from workloads.objectives.causal_lm import CausalLM
    from workloads.workload import Vocabulary, Windowing

    before, began = anonymous(), time.perf_counter()
    tokens = Tokens.open(str(place))
    if "documents" in how:
        windows = windows_of(tokens, 0, Windowing("document", 1024, 1024))
        places, first = np.random.default_rng(1).integers(0, len(windows), 4000), 0.0
        for sample in places.tolist():
            tokens.window(0, *windows.pieces(sample)[0])
            first = first or time.perf_counter() - began
        print(f"| {how} | {anonymous() - before:.0f} MiB | {first:.1f} s |", flush=True)
        return
    plan = SectionPlan.read(tokens.folder) if how == "sections" else None
    streams = split(tokens, 0.01).training if "share" in how else tokens
    objective = CausalLM(vocabulary=Vocabulary(50_000, 0), sequence_length=1024, seed=1)
    batches = batches_of(streams, objective, 1, [1.0], plan=plan)
    batches.batch(0, 4)
    first = time.perf_counter() - began
    for position in range(0, 4000, 64):
        batches.batch(position, 4)
    print(f"| {how} | {anonymous() - before:.0f} MiB | {first:.1f} s |", flush=True)


def main() -> None:
    """Make the data, read it in processes of their own, remove it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=float, default=1e9)
    parser.add_argument("--documents", type=float, default=1e6)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        read(given.folder, given.read)
        return
    make(given.folder, int(given.tokens), int(given.documents))
    try:
        print(json.dumps({"tokens": given.tokens, "documents": given.documents}))
        for how in given.rows:
            subprocess.run([sys.executable, __file__, str(given.folder), "--read", how], check=True)
    finally:
        shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
