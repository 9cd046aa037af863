"""Readings of nodes on their way to nodes.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.controller.node_rows import NodeRows
from orchestrator.storage.run_directory import RunDir


def reading(node: str, share: float) -> dict[str, Any]:
    return {"time": 1_700_000_000.0, "node": node, "step": 3, "values": {"cpu_utilization_percentage": share}}


def test_numbers_go_on_in_the_next_controller_and_the_latest_are_those_of_the_attempt(tmp_path: Path) -> None:
    run, stored = RunDir(str(tmp_path)), []
    rows = NodeRows(run, stored.append)
    rows.add([reading("a", 1.0), reading("b", 2.0)], 1)
    rows.add([reading("a", 3.0)], 1)
    assert {node: of["cpu_utilization_percentage"] for node, of in rows.latest.items()} == {
        "a": 3.0,
        "b": 2.0,
    }
    rows.add([reading("b", 4.0)], 2)
    assert list(rows.latest) == ["b"], "the other is not in the gang any more"
    rows.rows.flush()
    again = NodeRows(run, stored.append)
    again.add([reading("c", 5.0) | {"time": 1_700_000_001.0}], 3)
    again.rows.flush()
    found = run.rows("nodes.jsonl")
    assert [(row["attempt"], row["node"]) for row in found] == [
        (1, "a"),
        (1, "b"),
        (1, "a"),
        (2, "b"),
        (3, "c"),
    ]
    numbers = [row["number"] for row in found]
    assert numbers == sorted(set(numbers))
    assert len(stored) == 2
