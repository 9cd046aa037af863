"""`prepare` against `datasets.map(num_proc)`: the same JSONL, tokenizer, cores and processes; time and peak memory.

    .venv/bin/python tests/bench/bench_prepare.py [--mb 200] [--processes 4] [--rounds 3] [--json]

The text is that of the installed packages, a file a document. Every run is a process of its own with an empty cache, on
the same cores, each of its workers with one thread (`command` has as many workers as there are cores); its time is
from the first line of the program to its end, with all imports and Ray's start and end (`work` is without those).
Memory is the peak of the PSS of all its processes, `cpu` the processor time of all of them as it was last seen, which
what else the machine does changes less. Rows:

    command        `orchestrator data prepare` of a job file, with the engine that it proves: all of the command
    reference      prepare in a Python program, with `tokenizers`
    prepare        prepare in a Python program, with the engine that it proves
    map            datasets.map, with `tokenizers`
    map-engine     datasets.map, with fastokens, unproven

All must give the same tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROWS = ("command", "reference", "prepare", "map", "map-engine")
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp")
ENTRIES = 32_000
LONGEST = 250_000
"""Characters of a document: a longer one is cut by `prepare`, with other tokens at the cut."""


def texts(limit: int) -> Iterator[str]:
    """Text files of the installed packages, each content once, in the order of a hash of their paths."""
    root = Path(sysconfig.get_paths()["purelib"])
    files = [path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    files.sort(key=lambda path: hashlib.blake2b(str(path.relative_to(root)).encode()).digest())
    seen, size = set(), 0
    for path in files:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip() and text not in seen and len(text) < LONGEST:
            seen.add(text)
            yield text
            size += len(text)
        if size >= limit:
            return


def build(folder: Path, megabytes: float) -> None:
    """The text and a tokenizer that was trained on a part of it."""
    from orchestrator.data.encoding.training import train_bytes

    limit = int(megabytes * 10**6)
    with open(folder / "text.jsonl", "w") as file:
        for text in texts(limit):
            file.write(json.dumps({"text": text}) + "\n")
    (folder / "tokenizer").mkdir()
    trained = train_bytes(texts(min(limit, 2 * 10**7)), ENTRIES, ())
    (folder / "tokenizer" / "tokenizer.json").write_text(trained)


def ours(folder: Path, processes: int, engine: str) -> dict[str, Any]:
    """Prepare the text; its tokens, and a hash of them."""
    from cluster.local.ray_session import connected_ray
    from orchestrator.config.packages import PACKAGES
    from orchestrator.data.config import DataSpec
    from orchestrator.data.prepare.prepare import prepare

    with connected_ray(None, processes, packages=PACKAGES):
        began = time.perf_counter()
        data = DataSpec(
            sources=[{"uri": str(folder / "text.jsonl")}],
            tokenizer=str(folder / "tokenizer"),
            sequence_length=1024,
            **({"encode_with": engine} if engine else {}),
        )
        uri = prepare(data, (), str(folder / "cache"))
        work = time.perf_counter() - began
    return {"work": work, "done": time.perf_counter(), **tokens_of(uri)}


def command(folder: Path) -> dict[str, Any]:
    """Prepare the text by the command; its tokens, and a hash of them."""
    job = {
        "name": "bench",
        "workload": {"model": "gpt-tiny", "objective": "causal_lm"},
        "data": {
            "sources": [{"uri": str(folder / "text.jsonl")}],
            "tokenizer": str(folder / "tokenizer"),
            "sequence_length": 512,
            "cache": str(folder / "cache"),
        },
        "train": {"steps": 10, "global_batch": 8},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    began = time.perf_counter()
    line = [sys.executable, "-m", "orchestrator", "data", "prepare", str(folder / "job.yaml"), "--json"]
    told = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, cwd=folder)
    done = time.perf_counter()
    return {"work": done - began, "done": done, **tokens_of(json.loads(told.stdout)["data"])}


def tokens_of(uri: str) -> dict[str, Any]:
    """The number of tokens that were prepared, and their hash."""
    from orchestrator.data.store.tokens import Tokens

    tokens, step = Tokens.open(uri), 2**20
    starts = range(0, tokens.length(0), step)
    blocks = (tokens.window(0, at, min(step, tokens.length(0) - at)) for at in starts)
    return digest(block.astype("<u4").tobytes() for block in blocks)


def theirs(folder: Path, processes: int, engine: str) -> dict[str, Any]:
    """Map the text; its tokens, and a hash of them."""
    os.environ |= {"HF_HOME": str(folder / "home"), "HF_DATASETS_OFFLINE": "1"}
    import datasets
    import numpy as np
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    began = time.perf_counter()
    text = (folder / "tokenizer" / "tokenizer.json").read_text()
    eos = Tokenizer.from_str(text).token_to_id("<|endoftext|>")
    held: list[Any] = []

    def encode(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        if not held:
            held.append(load(text, engine))
        return {"ids": [np.append(ids, eos).astype(np.uint16) for ids in held[0](batch["text"])]}

    rows = datasets.load_dataset("json", data_files=str(folder / "text.jsonl"), split="train")
    made = rows.map(encode, batched=True, num_proc=processes, remove_columns=rows.column_names)
    work = time.perf_counter() - began
    done = time.perf_counter()
    made = made.with_format("arrow")
    blocks = (
        chunk.flatten().to_numpy().astype("<u4").tobytes()
        for at in range(0, len(made), 1000)
        for chunk in made[at : at + 1000].column("ids").chunks
    )
    return {"work": work, "done": done, **digest(blocks)}


def load(text: str, engine: str) -> Any:
    """A function from texts to their ids."""
    if engine:
        import fastokens
        import numpy as np

        fast = fastokens.Tokenizer.from_json_str(text)

        def encode(found: list[str]) -> list[Any]:
            ids, ends = fast.encode_batch_flat(found, False, True)
            return np.split(np.frombuffer(ids, "<u4"), np.frombuffer(ends, "<u8")[1:-1].astype(np.int64))

        return encode
    from tokenizers import Tokenizer

    reference = Tokenizer.from_str(text)
    reference.encode_special_tokens = True
    return lambda found: [e.ids for e in reference.encode_batch_fast(found, add_special_tokens=False)]


def digest(blocks: Any) -> dict[str, Any]:
    """Number of tokens, and their hash."""
    state, size = hashlib.blake2b(digest_size=16), 0
    for block in blocks:
        state.update(block)
        size += len(block)
    return {"tokens": size // 4, "hash": state.hexdigest()}


def measured(folder: Path, row: str, processes: int) -> dict[str, Any]:
    """One run in a process of its own, with the peak of its memory."""
    for name in ("cache", "home"):
        shutil.rmtree(folder / name, ignore_errors=True)
    environment = {
        **os.environ,
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process of Ray compiles all that it imports
    command = [sys.executable, __file__, "--one", row, "--folder", str(folder), "--processes", str(processes)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    peak, used = 0, dict[int, float]()
    while run.poll() is None:
        peak = max(peak, memory(run.pid, used))
        time.sleep(0.05)
    told = run.communicate()[0]
    if run.returncode:
        raise SystemExit(f"{row} failed")
    return {**json.loads(told.splitlines()[-1]), "peak": peak, "cpu": sum(used.values())}


def memory(pid: int, used: dict[int, float]) -> int:
    """PSS of a process and all below it, bytes; keeps the processor time of each, in seconds, in `used`."""
    import psutil

    total = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return 0
    for process in processes:
        try:
            times = process.cpu_times()
            used[process.pid] = times.user + times.system
            with open(f"/proc/{process.pid}/smaps_rollup") as file:
                total += next(int(line.split()[1]) for line in file if line.startswith("Pss:")) * 1024
        except (OSError, StopIteration, psutil.Error):
            continue
    return total


def one(row: str, folder: Path, processes: int) -> dict[str, Any]:
    """What a process of a run does."""
    began = time.perf_counter()
    if row == "command":
        found = command(folder)
    elif row in ("reference", "prepare"):
        engine = "tokenizers" if row == "reference" else ""
        found = ours(folder, processes, engine)
    else:
        found = theirs(folder, processes, "fastokens" if row == "map-engine" else "")
    return {"seconds": found.pop("done") - began, **found}


def main() -> None:
    """Run the rows in turn."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--mb", type=float, default=200)
    arguments.add_argument("--processes", type=int, default=4)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--one")
    arguments.add_argument("--folder", type=Path)
    given = arguments.parse_args()
    if given.one:
        print(json.dumps(one(given.one, given.folder, given.processes)))
        return
    folder = given.folder or Path(tempfile.mkdtemp())
    if not (folder / "tokenizer").exists():
        folder.mkdir(exist_ok=True)
        build(folder, given.mb)
    found: dict[str, list[dict[str, Any]]] = {row: [] for row in given.rows}
    for _ in range(given.rounds):
        for row in given.rows:
            found[row].append(measured(folder, row, given.processes))
            print(f"{row}: {found[row][-1]}", file=sys.stderr, flush=True)
    hashes = {run["hash"] for runs in found.values() for run in runs}
    if len(hashes) > 1:
        raise SystemExit("the tokens differ")
    if not given.folder:
        shutil.rmtree(folder)
    report(found, given.json)


def report(found: dict[str, list[dict[str, Any]]], as_json: bool) -> None:
    """The medians, one line a row."""
    for row, runs in found.items():
        middle = {
            key: statistics.median(run[key] for run in runs)
            for key in ("seconds", "work", "peak", "tokens", "cpu")
        }
        if as_json:
            print(json.dumps({"row": row, **middle}))
        else:
            rate = middle["tokens"] / middle["seconds"] / 10**6
            print(
                f"{row:12} {middle['seconds']:7.1f} s (work {middle['work']:.1f}, cpu {middle['cpu']:.1f}) "
                f"{rate:7.2f} M tokens/s {middle['peak'] / 2**30:6.2f} GiB"
            )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
