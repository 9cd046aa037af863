"""Rows in a bucket of a real S3 server, whose parts are put together and cut under spoiled requests."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from s3 import Proxy

from orchestrator.storage import row_files
from orchestrator.storage.row_line import METRICS
from orchestrator.storage.row_writer import RowWriter
from orchestrator.storage.run_directory import RunDir


def row(step: int, attempt: int) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "time": 1e9, "step_seconds": 0.5, "text": "x" * (step % 50)}


def test_each_row_is_there_once_in_few_objects(
    bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "MERGED_BYTES", 4096)
    run = RunDir(f"{bucket}/runs/small")
    count, kinds = itertools.count(1), itertools.cycle(("busy", "refuse", "deaf", "cut"))
    proxy.spoil = lambda line: "" if next(count) % 7 else next(kinds)
    rows, wanted = RowWriter(run, METRICS), []
    for attempt in range(1, 4):
        for _ in range(40):
            wanted.append(row(wanted[-1]["step"] + 1 if wanted else 1, attempt))
            rows.add(wanted[-1:])
            rows.drain(60.0)
        wanted = [r for r in wanted if r["step"] <= wanted[-1]["step"] - 13]
        rows.cut(wanted[-1]["step"], wanted[-3:])
        rows.drain(60.0)
    assert len(proxy.spoiled) > 20
    proxy.spoil = lambda line: ""
    assert list(RunDir(run.uri).log(METRICS).rows()) == wanted
    rows.add([row(wanted[-1]["step"] + 1, 4)])
    rows.drain(60.0)
    assert rows.mark == {"step": wanted[-1]["step"] + 1, "bytes": run.log(METRICS).size()}
    assert len(run.fs.ls(f"{run.path}/{METRICS}")) < 40
