"""The last collectives of a rank, as torch's flight recorder has them: of a gang that hangs they tell which rank waits
for which. It records for NCCL and for gloo, always, in memory.
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
"""The folder of all profiles in a run directory; in it are a folder a request, and the last request."""
TIMELINE = f"{PROFILES}/timeline"
"""The folder of the timeline of a pipeline: a file for each rank of one pipeline, of the last attempt that had one."""
DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""By which function of torch each library tells its collectives."""
PRINTED = 12
"""Collectives of a library that are printed, the last ones."""
TIMEOUT = 60.0
"""Seconds for a file to be written to a remote store."""
RETRY = Retry(attempts=3, first=0.2, cap=2.0, deadline=120.0)


def write_collectives(run: str, attempt: int, rank: int) -> None:
    """Print the last collectives, and write all that are recorded to `profiles/hang-attempt-1/rank-0.gloo.json`
    of the run directory at that URI. Nothing is done where none was recorded. Never raises: the gang is lost anyhow."""
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
    except Exception:  # whatever torch and the store raise
        traceback.print_exc()


def records() -> Iterator[tuple[str, bytes]]:
    """The library and what it has recorded: gloo, and NCCL where torch has it, whose recorder is another one."""
    from torch._C import _distributed_c10d as c10d

    for library, name in DUMPS.items():
        if dump := getattr(c10d, name, None):
            yield library, bytes(dump())


def line_of(entry: Mapping[str, Any]) -> str:
    """A collective in a line: its number in its group, what it is, its sizes and how far it has come."""
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
