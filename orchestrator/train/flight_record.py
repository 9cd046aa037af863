"""The last collectives of a rank, from torch's flight recorder. In a hanging worker group they show which rank waits
for which.

The recorder works for NCCL and gloo, always, in memory.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.storage.file_system import open_file_system
from orchestrator.storage.retry import Retry

PROFILES = "profiles"
"""The folder of all profiles in a run directory. It has a folder for each request, and the last request."""
TIMELINE = f"{PROFILES}/timeline"
"""The folder of a pipeline's timeline, with one file for each rank of one pipeline. The last attempt with a timeline
wrote it.
"""
DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""The function of torch that returns the collectives of each library."""
PRINTED = 12
"""Number of a library's last collectives that are printed."""
TIMEOUT = 60.0
"""Seconds to write a file to a remote store."""
RETRY = Retry(attempts=3, first=0.2, cap=2.0, deadline=120.0)


def write_collectives(run: str, attempt: int, rank: int) -> None:
    """Print the last collectives, and write all recorded ones to the run directory at the URI `run`.

    The file is `profiles/hang-attempt-1/rank-0.gloo.json`, for example. Does nothing if no collective was recorded.
    Never raises, because the worker group is lost anyway.
    """
    try:
        files = {}
        for library, record in records():
            entries = json.loads(record).get("entries") or []
            for entry in entries[-PRINTED:]:
                print(line_of(entry), file=sys.stderr)
            if entries:
                files[f"rank-{rank}.{library}.json"] = record
        if files:
            write(f"{run}/{PROFILES}/hang-attempt-{attempt}", files)
    except Exception:  # torch and the store may raise anything
        traceback.print_exc()


def missing_ranks(run: str, attempt: int, nodes: Mapping[int, str]) -> list[str]:
    """Return a line for each rank that the others of a hanging gang wait for, by what `write_collectives` wrote.

    A rank is missing if another has entered a later collective of the same group. Never raises.

    Args:
        run: URI of the run directory.
        attempt: the attempt that hangs.
        nodes: the node of each rank.
    """
    try:
        return _missing(_last_collectives(f"{run}/{PROFILES}/hang-attempt-{attempt}"), nodes)
    except Exception:  # a message for people is not worth a failure
        traceback.print_exc()
        return []


def _last_collectives(folder: str) -> dict[int, dict[str, Mapping[str, Any]]]:
    """Return the last collective that each rank has entered in each group, by rank and group."""
    fs, path = open_file_system(folder, TIMEOUT)
    result: dict[int, dict[str, Mapping[str, Any]]] = {}
    for file in fs.ls(path, detail=False) if fs.exists(path) else ():
        name = str(file).rsplit("/", 1)[-1]
        if (rank := re.fullmatch(r"rank-(\d+)\.\w+\.json", name)) is None:
            continue
        last = result.setdefault(int(rank[1]), {})
        for entry in json.loads(fs.cat_file(file)).get("entries") or ():
            group = " ".join(map(str, entry.get("process_group") or ()))
            if not entry.get("is_p2p") and entry["collective_seq_id"] >= _number(last.get(group)):
                last[group] = entry
    return result


def _number(entry: Mapping[str, Any] | None) -> int:
    return int(entry["collective_seq_id"]) if entry else -1


def _missing(last: Mapping[int, Mapping[str, Mapping[str, Any]]], nodes: Mapping[int, str]) -> list[str]:
    """Return the lines of `missing_ranks`, from the result of `_last_collectives`."""
    lines = []
    silent = [rank for rank in nodes if rank not in last] if last else []
    unfinished = Counter(
        line_of(entry)
        for groups in last.values()
        for entry in groups.values()
        if entry.get("state") != "completed"
    )
    for rank in silent:
        waits = "; ".join(f"others wait in {line}" for line, _ in unfinished.most_common(1))
        why = waits or "it does not tell what it waits for"
        lines.append(f"rank {rank} on {nodes[rank]} is missing: {why}")
    for group in sorted({group for entered in last.values() for group in entered}):
        entered = {rank: groups[group] for rank, groups in last.items() if group in groups}
        furthest = max(entered.values(), key=_number)
        for rank, entry in sorted(entered.items()):
            if _number(entry) < _number(furthest):
                waits = f"others wait in {line_of(furthest)}; its last was {line_of(entry)}"
                lines.append(f"rank {rank} on {nodes.get(rank, 'an unknown node')} is missing: {waits}")
    return lines


def records() -> Iterator[tuple[str, bytes]]:
    """Yield each library and its recorded collectives: gloo, and NCCL if torch has it, each with its own recorder."""
    from torch._C import _distributed_c10d as c10d

    for library, name in DUMPS.items():
        if dump := getattr(c10d, name, None):
            yield library, bytes(dump())


def line_of(entry: Mapping[str, Any]) -> str:
    """Return a collective as a line: its number in its group, its kind, its sizes and its state."""
    number = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
    group = " ".join(map(str, entry.get("process_group") or ()))
    return (
        f"collective {number} of group {group}: {entry.get('profiling_name')} {entry.get('input_sizes')} -> "
        f"{entry.get('output_sizes')}, {entry.get('state')}"
    )


def write(folder: str, files: Mapping[str, bytes]) -> None:
    """Write files into a folder of the run directory."""
    fs, path = open_file_system(folder, TIMEOUT)
    RETRY(fs.makedirs, path, exist_ok=True)
    for name, content in files.items():
        RETRY(fs.pipe_file, f"{path}/{name}", content)
