"""One file of 100 GB that no disk holds: how long it takes to plan, what its boundaries give, and when training starts.

    .venv/bin/python tests/bench/bench_huge_file.py [--gb 100] [--boundaries 40] [--json]

The file is of `tests/virtual_file.py`. Rows:

    plan        listing, dividing into parts and describing all of them for tasks, in this process
    boundaries  the last row of a part and the first of the next have numbers that follow each other, at so many
                boundaries; the last part ends with the last line of the file
    start       `orchestrator run` with `streaming: true`: seconds until the first step and peak memory (PSS of all
                processes) until then; the run is ended after it

The run's cache is in a temporary folder and needs about 2.5 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import paths  # noqa: F401
from bench_prepare import memory
from fsspec import register_implementation
from virtual_file import BASE_BYTES, PROTOCOL, CountedFileSystem, lines_in, read, written

START_SECONDS = 600.0
"""How long the first step may take."""


def plan(uri: str, lines: int, boundaries: int) -> list[dict[str, Any]]:
    """The rows `plan` and `boundaries`."""
    from orchestrator.data import sources
    from orchestrator.data.config import Source
    from orchestrator.data.sources.rows import rows

    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    files = sources.resolve([Source(uri=uri)])
    parts = sources.cut(files, sources.part_size(files))
    described = [sources.to_json(part, 2**26) for part in parts]
    took = time.perf_counter() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    found = [
        {
            "row": "plan",
            "seconds": took,
            "mib": grown / 1024,
            "parts": len(parts),
            "described": sum(map(len, described)),
        }
    ]

    def ends(number: int) -> tuple[int, int]:
        counted = [int(row.values["text"].split(" ", 1)[0]) for row in rows(parts[number][0])]
        if counted != list(range(counted[0], counted[-1] + 1)):
            raise SystemExit(f"part {number} has lost or doubled a line")
        return counted[0], counted[-1]

    began = time.perf_counter()
    drawn = random.Random(0).sample(range(len(parts) - 1), min(boundaries, len(parts) - 1))
    for number in drawn:
        if ends(number)[1] + 1 != ends(number + 1)[0]:
            raise SystemExit(f"parts {number} and {number + 1} do not follow each other")
    if ends(0)[0] or ends(len(parts) - 1)[1] != lines - 1:
        raise SystemExit("the file does not begin or end with its first or last line")
    return [*found, {"row": "boundaries", "seconds": time.perf_counter() - began, "checked": len(drawn)}]


def start(uri: str, folder: Path) -> dict[str, Any]:
    """The row `start`."""
    from orchestrator.data.encoding.training import train_bytes

    (folder / "tokenizer").mkdir()
    some = [json.loads(line)["text"] for line in read(0, BASE_BYTES).splitlines()[:-1]]
    (folder / "tokenizer" / "tokenizer.json").write_text(train_bytes(some, 8000, ()))
    job = {
        "name": "huge",
        "workload": {"model": "gpt-tiny", "objective": "causal_lm"},
        "data": {
            "sources": [{"uri": uri}],
            "tokenizer": str(folder / "tokenizer"),
            "sequence_length": 128,
            "cache": str(folder / "cache"),
            "streaming": True,
        },
        "resources": {"workers": 1},
        "train": {"steps": 1000, "global_batch": 4},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    written(folder / "packages")
    environment = {**os.environ, "PYTHONPATH": str(folder / "packages"), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    line = [sys.executable, "-m", "orchestrator", "run", "job.yaml", "--run-dir", "run"]
    began, peak = time.perf_counter(), 0
    with open(folder / "told", "w") as told:
        run = subprocess.Popen(line, cwd=folder, env=environment, stdout=told, stderr=told)
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        if run.poll() is not None or time.perf_counter() - began > START_SECONDS:
            raise SystemExit((folder / "told").read_text()[-3000:])
        peak = max(peak, memory(run.pid, {}))
        time.sleep(0.2)
    took = time.perf_counter() - began
    run.send_signal(signal.SIGINT)
    run.wait(120)
    return {"row": "start", "seconds": took, "mib": peak / 2**20}


def main() -> None:
    """Run the rows."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--gb", type=float, default=100)
    arguments.add_argument("--boundaries", type=int, default=40)
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    folder = Path(tempfile.mkdtemp())
    register_implementation(PROTOCOL, CountedFileSystem)
    lines = lines_in(int(given.gb * 10**9))
    uri = f"counted://lines/{lines}.jsonl"
    try:
        for row in [*plan(uri, lines, given.boundaries), start(uri, folder)]:
            print(json.dumps(row) if given.json else row, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
