"""The collectives that a rank leaves when its gang hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from orchestrator.train.flight_record import PRINTED, line_of, missing_ranks, write_collectives


def test_the_last_collectives_are_printed_and_all_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for _ in range(PRINTED + 3):
            dist.all_reduce(torch.ones(4))
        write_collectives(str(tmp_path / "run"), 2, 0)
    finally:
        dist.destroy_process_group()
    record = tmp_path / "run" / "profiles" / "hang-attempt-2" / "rank-0.gloo.json"
    assert len(json.loads(record.read_text())["entries"]) >= PRINTED + 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == PRINTED
    assert "gloo:all_reduce [[4]] -> [[4]]" in lines[-1]


def test_of_ranks_with_gpus_those_of_nccl_are_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch keeps them in another recorder, which builds without CUDA do not have."""
    entry = {"profiling_name": "nccl:all_reduce", "collective_seq_id": 7, "state": "started"}
    told = json.dumps({"entries": [entry]}).encode()
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda: told, raising=False)
    write_collectives(str(tmp_path / "run"), 1, 3)
    assert (tmp_path / "run/profiles/hang-attempt-1/rank-3.nccl.json").read_bytes() == told
    assert "collective 7 of group : nccl:all_reduce" in capsys.readouterr().err


def test_the_ranks_that_others_wait_for_are_named(tmp_path: Path) -> None:
    """Rank 2 has not come to the third collective of its group, though it is as far as rank 3 in another group.

    Asked for in ray#58878.
    """
    folder = tmp_path / "profiles" / "hang-attempt-2"
    folder.mkdir(parents=True)
    groups = {0: {"world": 3}, 1: {"world": 3, "tp": 9}, 2: {"world": 2, "pp": 4}, 3: {"world": 3, "pp": 4}}
    for rank, numbers in groups.items():
        entries = [
            {
                "process_group": ["0", group],
                "collective_seq_id": number,
                "profiling_name": "gloo:all_reduce",
                "state": "completed" if rank < 2 else "started",
            }
            for group, last in numbers.items()
            for number in range(1, last + 1)
        ]
        entries.append({"process_group": ["0", "world"], "is_p2p": True, "collective_seq_id": 99})
        (folder / f"rank-{rank}.gloo.json").write_text(json.dumps({"entries": entries}))
    nodes = {rank: f"node-{rank}" for rank in range(5)}
    lines = missing_ranks(str(tmp_path), 2, nodes)
    assert len(lines) == 2
    assert lines[0].startswith("rank 4 on node-4 is missing: others wait in collective 4 of group 0 pp")
    assert lines[1].startswith(
        "rank 2 on node-2 is missing: others wait in collective 3 of group 0 world: gloo:all_"
    )
    assert "its last was collective 2 of group 0 world" in lines[1]
    assert missing_ranks(str(tmp_path), 3, nodes) == []
    (folder / "rank-0.gloo.json").write_text("{")
    assert missing_ranks(str(tmp_path), 2, nodes) == []


def test_a_store_that_fails_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    write_collectives(str(tmp_path / "run"), 1, 0)
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
