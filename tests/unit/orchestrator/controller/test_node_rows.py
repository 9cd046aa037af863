"""Readings of nodes on their way to nodes.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.workers.node_metrics import CPU_JOULES, SECONDS
from orchestrator.controller.run_files import MOST_NODES, NodeRows
from orchestrator.observe.energy import measured
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


def test_many_nodes_have_as_many_rows_as_a_few_and_their_energy_adds_up(tmp_path: Path) -> None:
    """So that a day of 2,048 nodes has the rows of one of MOST_NODES."""
    minutes, stored = 64, {}
    for nodes in (MOST_NODES, 4 * MOST_NODES):
        (tmp_path / str(nodes)).mkdir()
        run = RunDir(str(tmp_path / str(nodes)))
        rows = NodeRows(run, lambda rows: None)
        for minute in range(minutes):
            values = {"cpu_utilization_percentage": float(minute), SECONDS: 60.0, CPU_JOULES: 10.0}
            at = {"time": 1_700_000_000.0 + 60 * minute, "step": minute, "values": values}
            rows.add([at | {"node": f"n{node}"} for node in range(nodes)], 1)
        assert rows.latest["n0"]["cpu_utilization_percentage"] == minutes - 1
        rows.rows.flush()
        assert len(run.rows("nodes.jsonl")) <= minutes * MOST_NODES
        rows.wait_until_stored()
        stored[nodes] = run.rows("nodes.jsonl")
        found = measured(stored[nodes])
        assert (found.seconds, found.joules) == (60.0 * minutes, {CPU_JOULES: 10.0 * minutes * nodes})
    few, many = stored.values()
    assert len(many) <= len(few) + 4 * MOST_NODES
    assert {row["values"]["cpu_utilization_percentage"] for row in many if row["node"] == "n0"} <= set(
        map(float, range(minutes))
    )


def test_what_is_held_of_an_attempt_is_stored_with_it_and_a_reading_without_joules_leaves_no_sum(
    tmp_path: Path,
) -> None:
    run = RunDir(str(tmp_path))
    rows, many = NodeRows(run, lambda rows: None), [f"n{node}" for node in range(2 * MOST_NODES)]
    of = {"time": 1_700_000_000.0, "step": 1}
    rows.add([of | {"node": node, "values": {SECONDS: 60.0, CPU_JOULES: 1.0}} for node in many], 1)
    rows.add([of | {"node": "n0", "values": {SECONDS: 61.0}}], 1)
    rows.add([of | {"node": "n1", "values": {SECONDS: 5.0, CPU_JOULES: 2.0}}], 2)
    rows.wait_until_stored()
    found = {(row["attempt"], row["node"]): row["values"] for row in run.rows("nodes.jsonl")}
    assert len(found) == len(many) + 1
    assert found[1, "n0"] == {SECONDS: 121.0}
    assert found[1, "n1"] == {SECONDS: 60.0, CPU_JOULES: 1.0}
    assert found[2, "n1"] == {SECONDS: 5.0, CPU_JOULES: 2.0}
