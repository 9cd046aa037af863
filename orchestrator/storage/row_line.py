"""One line of a row file: a JSON object with required keys, whose last key is a checksum of the others.

Rows of earlier versions have no checksum. Unknown keys are kept.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

Row = dict[str, Any]

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
TRIALS = "trials.jsonl"
EVALS = "evals.jsonl"
NODES = "nodes.jsonl"
"""Readings of the node at an address while a gang ran there. `values` are as in `cluster.workers.node_metrics`,
`number` increases from row to row, and `step` is the last finished step.
"""
SUM = b'"crc32": "'
TAIL = len(SUM) + 10
"""Number of bytes from the checksum's key to the end of the line."""
KEY_TOLERANCE = 2
"""If a line's checksum key differs in at most this many bytes, the line had a checksum and was altered."""
LARGEST = sys.float_info.max
"""The largest magnitude of a number, integers included, because floats hold no larger ones."""
NEEDED: Mapping[str, Mapping[str, type]] = {
    METRICS: {"step": int, "attempt": int, "time": float, "step_seconds": float},
    EVENTS: {"time": float, "attempt": int, "phase": str},
    TRIALS: {"trial": str, "event": str, "time": float},
    EVALS: {"step": int, "attempt": int, "time": float, "sets": dict},
    NODES: {"number": int, "attempt": int, "step": int, "time": float, "node": str, "values": dict},
}
"""Required keys of a row of each file, with their types. An int is accepted as a float."""
TYPES: Mapping[str, Mapping[str, type]] = {
    METRICS: {"samples": str, "layout": str, "tokens": int, "evaluations": list, "layer_statistics": dict},
    EVENTS: {
        "step": int, "reason": str, "first_fault": str, "node": str, "data": str, "lost_steps": int,
        "skipped": dict, "layout": dict, "usd_per_hour": float, "last_seen": float, "missing_rows": list,
        "output": list, "explained": str, "controller_died": int, "number": int, "missing_events": list, "tasks": dict,
        "rollout_workers": list,
    },
    EVALS: {"weights": str, "averaged_steps": list, "samples": list},
    TRIALS: {"config": dict, "state": str, "run": str, "step": int, "steps": int, "cost_usd": float},
}  # fmt: skip
"""Optional keys that the program reads, with the types that they must have unless null."""


def evaluations_in(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of evals.jsonl that rows of metrics.jsonl carry."""
    return [evaluation for row in rows for evaluation in row.get("evaluations") or ()]


OF_LAYERS = ("weight_norm", "gradient_norm", "activation_rms")
"""The numbers among a row's statistics by layer."""


def layers_in(row: Row) -> dict[str, float]:
    """Return the numbers of a row's statistics by layer, named as in gradient_norm/decoder.layers.0.norm.weight."""
    return {
        f"{kind}/{name}": value
        for name, of_layer in (row.get("layer_statistics") or {}).items()
        if isinstance(of_layer, dict)
        for kind, value in of_layer.items()
        if kind in OF_LAYERS and isinstance(value, int | float)
    }


def encode(row: Row) -> bytes:
    """Return the line of a row, with its checksum and a newline."""
    body = json.dumps(row).encode()
    comma = b", " if row else b""
    return b'%s%s%s%08x"}\n' % (body[:-1], comma, SUM, zlib.crc32(body))


def decode(line: bytes, name: str = "") -> Row | None:
    """Return the row in a line of the file `name`; None if the line is torn, altered, or not a row of that file."""
    key = line[-TAIL : len(SUM) - TAIL]
    if key == SUM:
        body = line[:-TAIL].removesuffix(b", ") + b"}"
        if line[-10:-2] != b"%08x" % zlib.crc32(body):
            return None
        line = body
    elif len(key) == len(SUM) and sum(map(int.__ne__, key, SUM)) <= KEY_TOLERANCE:
        return None  # the checksum's key was altered
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and _fits(row, name) else None


def _fits(row: Row, name: str) -> bool:
    needed = NEEDED.get(name, {})
    types = TYPES.get(name, {})
    return all(_is(row.get(key), kind) for key, kind in needed.items()) and all(
        row.get(key) is None or _is(row[key], kind) for key, kind in types.items()
    )


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return type(value) in (int, float) and -LARGEST <= value <= LARGEST
    return type(value) is kind
