"""What the rows of a long run cost its controller: opening the record, a recovery, the end; seconds and peak memory.

    .venv/bin/python tests/bench/bench_rows.py [--rows 200 200000 2000000] [--s3 200 20000]

Each number is taken in a process of its own, on a run directory of so many steps whose last commit is ten steps back.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paths  # noqa: F401

STEP_SECONDS, BEYOND, TOGETHER = 0.05, 10, 100
PHASES = ("open", "recovery", "end")


def job(steps: int) -> dict[str, Any]:
    """A job of so many steps."""
    return {
        "name": "long",
        "workload": {"model": "gpt-tiny"},
        "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 32},
        "train": {"steps": steps, "global_batch": 8},
        "resources": {"workers": 2},
        "checkpoint": {"every": 10, "export": None},
    }


def row(step: int) -> dict[str, Any]:
    """A row as a rank makes it."""
    return {
        "step": step, "loss": 3.0 + 1.0 / step, "lr": 3e-4, "grad_norm": 0.912345678912345, "tokens": step * 256,
        "tokens_per_second": 5123.123456789, "step_seconds": STEP_SECONDS, "data_seconds": 0.000123456789,
        "commit_seconds": 0.0, "samples": f"{step:032x}", "layout": "dp2 zero0 mb4", "attempt": 1,
        "memory_bytes": 123456789, "time": 1.7e9 + step * STEP_SECONDS, "busy_seconds": [0.0512345, 0.0498765],
        "saves": [],
    }  # fmt: skip


def lines(rows: int) -> Iterator[bytes]:
    """The rows, many a piece."""
    for first in range(1, rows + 1, 10_000):
        numbers = range(first, min(first + 10_000, rows + 1))
        yield "".join(json.dumps(row(n)) + "\n" for n in numbers).encode()


def events(rows: int) -> list[dict[str, Any]]:
    """What a run tells until then."""
    end = {"start": 1.0, "train": 5.0}
    return [
        {"time": 1.7e9 + at, "attempt": 1, "phase": phase, "reason": "", "step": 0, "layout_after": "dp2 zero0 mb4"}
        for phase, at in end.items()
    ]  # fmt: skip


def build(uri: str, rows: int) -> None:
    """A run directory with so many rows, and a commit ten steps back."""
    import torch

    from orchestrator.checkpoint.commit_store import Store
    from orchestrator.checkpoint.pieces import full_piece
    from orchestrator.storage.run_directory import RunDir

    run = RunDir(uri)
    run.create()
    run.append("events.jsonl", events(rows))
    if run.local:
        with open(f"{uri}/metrics.jsonl", "wb") as file:
            file.writelines(lines(rows))
    else:
        for first in range(1, rows + 1, TOGETHER):
            run.append("metrics.jsonl", [row(n) for n in range(first, min(first + TOGETHER, rows + 1))])
    size = run.log("metrics.jsonl").size()
    run.write_json("status.json", {"phase": "train", "time": 1.7e9, "rows": {"step": rows, "bytes": size}})
    store = Store(run.at("checkpoints"))
    step = rows - BEYOND
    meta = {"position": step * 8, "receipt": f"{step:032x}", "rows": [row(step)], "tokens": step * 256}
    store.publish(step, store.write_shard(step, 0, [full_piece("model.w", torch.zeros(4))]), meta)


def measure(phase: str, uri: str, rows: int) -> dict[str, float]:
    """Seconds and bytes of one phase in this process, without its imports."""
    from orchestrator.config.spec import parse
    from orchestrator.controller import finish
    from orchestrator.controller.run_history import RunHistory
    from orchestrator.observe.pages import report
    from orchestrator.observe.totals import totals_of
    from orchestrator.storage.run_directory import RunDir

    assert report.summary
    run, spec = RunDir(uri), parse(job(rows))
    before, began = _peak(), time.perf_counter()
    record = RunHistory(spec, run)
    if phase != "open":
        before, began = _peak(), time.perf_counter()
    if phase == "recovery":
        record.last_commit()
        record.files.after(rows - BEYOND)
        record.roll_back(frozenset(), 2)
    if phase == "end":
        found = totals_of(run)
        record.event(1, rows, "done", "all steps are done")
        finish.finish(
            spec.summarised,
            run,
            record,
            data="",
            exported={},
            rows=found,
            tracked=spec.tracked,
            checkpoint=spec.checkpoint,
            evaluate=spec.evaluate,
            needs_base=spec.needs_base,
        )
    return {"seconds": time.perf_counter() - began, "bytes": _peak() - before}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def table(where: str, uri: str, counts: list[int], limit: float) -> None:
    """Print a row a count."""
    for rows in counts:
        at = f"{uri}/{uuid.uuid4().hex[:8]}"
        _own("build", at, rows, 3600)
        found = [_own(phase, at, rows, limit) for phase in PHASES]
        told = [
            f"{f['seconds']:.2f} s, {f['bytes'] / 2**20:.0f} MiB" if f else f"over {limit:.0f} s"
            for f in found
        ]
        print(f"| {where} | {rows:,} | " + " | ".join(told) + " |", flush=True)


def _own(phase: str, uri: str, rows: int, limit: float) -> dict[str, float] | None:
    command = [sys.executable, __file__, "--phase", phase, "--uri", uri, "--rows", str(rows)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit, check=True)
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """All counts here and, if asked for, in a bucket."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="*", default=[200, 200_000, 2_000_000])
    parser.add_argument("--s3", type=int, nargs="*", default=[200, 20_000])
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--phase", choices=("build", *PHASES))
    parser.add_argument("--uri")
    given = parser.parse_args()
    if given.phase == "build":
        build(given.uri, given.rows[0])
        print("{}")
        return
    if given.phase:
        print(json.dumps(measure(given.phase, given.uri, given.rows[0])))
        return
    print("| where | rows | opening | a recovery | the end |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        table("disk", folder, given.rows, given.limit)
        if given.s3:
            from s3 import KEYS, served

            with served(Path(folder)) as port:
                os.environ |= KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
                import fsspec

                fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bench-rows")
                table("S3", "s3://bench-rows", given.s3, given.limit)


if __name__ == "__main__":
    main()
