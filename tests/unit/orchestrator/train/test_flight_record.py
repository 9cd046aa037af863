"""The collectives that a rank leaves when its gang hangs."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cluster.workers.hang_report import HangReport
from orchestrator.train.flight_record import (
    HANG,
    KEPT_HANGS,
    MAX_PRINTED,
    MOST_STORED,
    is_computing,
    last_collectives,
    line_of,
    report_hang,
)


def test_the_last_collectives_are_sent_printed_and_all_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[HangReport] = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for _ in range(MAX_PRINTED + 3):
            dist.all_reduce(torch.ones(4))
        report_hang(str(tmp_path / "run"), 2, 0, 1, sent.append)
    finally:
        dist.destroy_process_group()
    record = tmp_path / "run" / "profiles" / "hang-attempt-2" / "rank-0.gloo.json"
    assert len(json.loads(record.read_text())["entries"]) >= MAX_PRINTED + 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == MAX_PRINTED
    assert "gloo:all_reduce [[4]] -> [[4]], completed" in lines[-1]
    (report,) = sent
    assert HangReport.from_json(json.loads(json.dumps(dataclasses.asdict(report)))) == report
    assert report.frame.startswith("main_frame (flight_record.py:")
    assert not report.is_waiting
    last = next(each for each in report.entered if "all_reduce" in each.text)
    assert (last.is_done, last.ranks) == (True, (0,))
    assert last.number >= MAX_PRINTED + 3


def test_of_ranks_with_gpus_those_of_nccl_are_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch keeps them in another recorder, which builds without CUDA do not have."""
    entry = {"profiling_name": "nccl:all_reduce", "collective_seq_id": 7, "state": "started"}
    told = json.dumps({"entries": [entry]}).encode()
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda: told, raising=False)
    report_hang(str(tmp_path / "run"), 1, 3, 4, lambda report: None)
    assert (tmp_path / "run/profiles/hang-attempt-1/rank-3.nccl.json").read_bytes() == told
    assert "collective 7 of group : nccl:all_reduce" in capsys.readouterr().err


def test_of_each_group_the_last_completed_collective_and_the_first_other_are_told() -> None:
    """gloo marks completed collectives as retired, NCCL by their state; messages between two ranks do not count."""

    def entry(group: str, number: int, **more: Any) -> dict[str, Any]:
        kind = {
            "profiling_name": "gloo:all_reduce",
            "input_sizes": [[4]],
            "state": "scheduled",
            "retired": False,
        }
        return {"process_group": [group, "any"], "collective_seq_id": number, **kind, **more}

    entries = [
        entry("0", 1, retired=True),
        entry("0", 2, state="completed"),
        entry("a", 9, retired=True),
        entry("0", 3),
        entry("0", 4),
        entry("0", 99, is_p2p=True),
    ]
    found = last_collectives("gloo", entries, {"0": (0, 1, 2), "b": (0, 1)})
    assert [(each.group, each.number, each.is_done, each.ranks) for each in found] == [
        ("gloo 0", 2, True, (0, 1, 2)),
        ("gloo a", 9, True, ()),
        ("gloo 0", 3, False, (0, 1, 2)),
    ]
    assert found[0].text == "collective 2 of ranks 0, 1, 2, gloo:all_reduce [[4]]"
    assert found[1].text == "collective 9 of group a, gloo:all_reduce [[4]]"
    many = last_collectives("gloo", [entry("0", 1)], {"0": tuple(range(64))})
    assert many[0].text == "collective 1 of 64 ranks, gloo:all_reduce [[4]]"


def test_many_ranks_and_many_hangs_store_a_bounded_number_of_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of torch has 2,000; those of 16,384 ranks would be some 20 GB at each hang."""
    entries = [{"profiling_name": "gloo:all_reduce", "collective_seq_id": n} for n in range(2000)]
    record = json.dumps({"version": "2", "entries": entries}).encode()
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", lambda: record)
    run = tmp_path / "run"
    for attempt in range(1, KEPT_HANGS + 4):
        report_hang(str(run), attempt, 0, 16_384, lambda report: None)
    kept = sorted(int(folder.name.removeprefix(HANG)) for folder in (run / "profiles").iterdir())
    assert kept == list(range(4, KEPT_HANGS + 4))
    stored = json.loads((run / f"profiles/{HANG}{attempt}/rank-0.gloo.json").read_text())
    assert stored == {"version": "2", "entries": entries[-MAX_PRINTED:]}
    report_hang(str(run), attempt, 7, MOST_STORED // 100, lambda report: None)
    few = json.loads((run / f"profiles/{HANG}{attempt}/rank-7.gloo.json").read_text())
    assert len(few["entries"]) == 100
    report_hang(str(run), attempt, 1, 8, lambda report: None)
    assert (run / f"profiles/{HANG}{attempt}/rank-1.gloo.json").read_bytes() == record


@pytest.mark.parametrize("computes", [True, False])
def test_a_main_thread_that_computes_is_told_from_one_that_waits(computes: bool) -> None:
    """It is slow in the first case: in Python, where it stands still while another thread looks at it."""
    seen: list[bool] = []
    looking = threading.Thread(target=lambda: seen.append(is_computing()))
    looking.start()
    while computes and looking.is_alive():
        sum(range(1000))
    looking.join()
    assert seen == [computes]


def test_a_store_that_fails_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    report_hang(str(tmp_path / "run"), 1, 0, 1, lambda report: None)
    assert (tmp_path / "run").is_file()


def test_messages_between_two_ranks_have_their_own_numbers() -> None:
    sent = {
        "is_p2p": True,
        "p2p_seq_id": 5,
        "collective_seq_id": 9,
        "process_group": ["3", "pp"],
        "state": "started",
    }
    found = line_of(
        {**sent, "profiling_name": "nccl:send 0->1", "input_sizes": [[2, 8]], "output_sizes": [[2, 8]]}
    )
    assert found == "collective 5 of group 3 pp: nccl:send 0->1 [[2, 8]] -> [[2, 8]], started"
