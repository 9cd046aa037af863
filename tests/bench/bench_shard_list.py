"""What opening prepared data costs the ranks of a node, by the number of its shards.

    python tests/bench/bench_shard_list.py [--shards 16 4096 125000] [--ranks 8] [--rounds 3]

10^12 tokens are 125,000 shards of 32 MiB. The shards are files of holes and their checksums are random: nothing of them
is read. Each rank is a process that has its imports, and does what a rank of a run does first: it opens the data and
computes its digest. Ranks do it one after the other, and all stay until the last has reported its memory: `alone` is
what a rank alone holds beyond its imports, `shared` its part of what several of them map. Between two rounds the files
that the first rank derived are removed.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from orchestrator.data.prepare.shards import BLOCK_BYTES, shard_name
from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import DataManifest, PreparedSource, TokenShard
from orchestrator.data.store.tokens import Tokens

TOKENS = 8 * 2**20
"""Tokens of a shard, of four bytes each."""


def prepared(folder: Path, shards: int) -> DataFolder:
    """Write the manifest of `shards` shards, and the shards as holes."""
    (folder / "shards").mkdir(parents=True)
    draw = random.Random(shards)
    blocks = 4 * TOKENS // BLOCK_BYTES
    made = []
    for number in range(shards):
        name = shard_name(number)
        with (folder / name).open("wb") as file:
            file.truncate(4 * TOKENS)
        sums = (
            draw.getrandbits(128),
            draw.getrandbits(64 * blocks),
            draw.getrandbits(64),
            draw.getrandbits(64),
        )
        file_sum, block_sums, ends, contents = (
            f"{value:0{digits}x}" for value, digits in zip(sums, (32, 16 * blocks, 16, 16), strict=True)
        )
        made.append(TokenShard(name, TOKENS, 8000, 4 * TOKENS, file_sum, block_sums, ends, contents))
    source = PreparedSource("text.jsonl", tuple(made))
    total = shards * TOKENS
    data = DataManifest(
        f"{draw.getrandbits(128):032x}", "<u4", "tokenizer.json", 128_256, {"eos": 0}, (), (source,), total,
        shards * 8000, 4 * total, 7.0, 4.0, tokenizer_xxh3=32 * "0",
    )  # fmt: skip
    result = DataFolder(str(folder))
    manifest.write(result, data)
    return result


def memory() -> tuple[float, float]:
    """Return the MB of this process alone, and its part of what it shares with others."""
    fields = {}
    with open("/proc/self/smaps_rollup") as file:
        for line in list(file)[1:]:
            name, value = line.split(":")
            fields[name] = int(value.split()[0]) / 1000
    own = fields["Private_Clean"] + fields["Private_Dirty"]
    return own, fields["Pss"] - own


def rank(uri: str, temporary: str, pipe: Connection) -> None:
    """The program of one rank: it answers one message after the other."""
    tempfile.tempdir = temporary
    pipe.recv()
    before = memory()
    pipe.send("measured")
    pipe.recv()
    began, wall = time.process_time(), time.perf_counter()
    tokens = Tokens.open(uri)
    assert tokens.manifest.digest
    pipe.send((time.process_time() - began, time.perf_counter() - wall))
    pipe.recv()
    own, shared = (after - base for after, base in zip(memory(), before, strict=True))
    pipe.send((own, shared))
    pipe.recv()
    os._exit(0)


def node(uri: str, temporary: Path, ranks: int) -> list[tuple[float, ...]]:
    """Return seconds of a processor, seconds, MB alone and MB shared of each rank of a node that has no files yet."""
    temporary.mkdir()
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["orchestrator.data.store.tokens"])
    pipes = []
    for _ in range(ranks):
        ours, theirs = context.Pipe()
        context.Process(target=rank, args=(uri, str(temporary), theirs), daemon=True).start()
        pipes.append(ours)

    def ask() -> list[tuple[float, ...]]:
        found = []
        for pipe in pipes:
            pipe.send("go on")
            found.append(pipe.recv())
        return found

    ask()
    opened, held = ask(), ask()
    for pipe in pipes:
        pipe.send("end")
    return [(*a, *b) for a, b in zip(opened, held, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, nargs="*", default=[16, 4096, 125_000])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    for shards in asked.shards:
        with tempfile.TemporaryDirectory() as root:
            folder = prepared(Path(root) / "data", shards)
            size = (Path(root) / "data" / manifest.NAME).stat().st_size
            rounds = []
            for number in range(asked.rounds):
                shutil.rmtree(Path(root) / "data" / "list", ignore_errors=True)
                rounds.append(node(folder.uri, Path(root) / f"node-{number}", asked.ranks))
            print(f"{shards:,} shards, {shards * TOKENS:.1e} tokens, manifest {size / 1e6:.1f} MB")
            for name, of in (("first rank", slice(0, 1)), ("the others", slice(1, None))):
                rows = [row for each in rounds for row in each[of]]
                seconds, waited, own, shared = (
                    statistics.median(column) for column in zip(*rows, strict=True)
                )
                print(f"  {name}: {seconds:.3f} s of a processor, {waited:.3f} s, "
                      f"{own:.1f} MB alone, {shared:.1f} MB shared", flush=True)  # fmt: skip
            shutil.rmtree(Path(root) / "data")


if __name__ == "__main__":
    main()
