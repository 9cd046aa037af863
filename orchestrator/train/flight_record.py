"""The last collectives of a rank, from torch's flight recorder. In a hanging worker group they show which rank waits
for which.

The recorder works for NCCL and gloo, always, in memory.
"""

from __future__ import annotations

import json
import sys
import traceback
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
