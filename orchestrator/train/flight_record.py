"""The last collectives of a rank, from torch's flight recorder. In a hanging worker group they show which rank waits
for which.

The recorder works for NCCL and gloo, always, in memory.
"""

from __future__ import annotations

import itertools
import json
import linecache
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from cluster.workers.hang_report import Entered, HangReport
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
DISTRIBUTED = os.path.join("torch", "distributed", "")
"""The folder of the functions of torch in which a rank waits for others."""
MAX_NAMED_RANKS = 8
"""The largest group whose ranks a line names."""
MAX_PRINTED = 12
"""Number of a library's last collectives that are printed."""
LOOK = 0.3
"""Seconds for which a rank looks whether its main thread computes."""
COMPUTING = 0.01
"""The share of a processor beyond which it does."""
MOST_STORED = 100_000
"""Number of collectives that all ranks together store of each library, if there are many ranks."""
HANG = "hang-attempt-"
KEPT_HANGS = 10
"""Number of attempts whose collectives are kept: the newest ones that hung."""
TIMEOUT = 60.0
"""Seconds to write a file to a remote store."""
RETRY = Retry(attempts=3, first=0.2, cap=2.0, deadline=120.0)


def report_hang(run: str, attempt: int, rank: int, world: int, send: Callable[[HangReport], None]) -> None:
    """Send what this rank does, print its last collectives, and write the recorded ones to the run directory.

    The file is `profiles/hang-attempt-1/rank-0.gloo.json`, for example. Nothing is written if no collective was
    recorded. Rank 0 removes the files of old attempts. Never raises, because the worker group is lost anyway.

    Args:
        run: URI of the run directory.
        attempt: the attempt that hangs.
        rank: this rank.
        world: number of ranks. Of many, each stores only its last collectives.
        send: sends the report to the controller, which names the ranks that are missing.
    """
    try:
        recorded = dict(records())
        entries = {library: json.loads(record).get("entries") or [] for library, record in recorded.items()}
        members = members_of_groups()
        entered = [
            last_collectives(library, collectives, members) for library, collectives in entries.items()
        ]
        frame, is_waiting = main_frame()
        send(
            HangReport(
                tuple(itertools.chain(*entered)),
                frame=frame,
                is_waiting=is_waiting,
                is_computing=not is_waiting and is_computing(),
            )
        )
        files = {}
        for library, collectives in entries.items():
            for entry in collectives[-MAX_PRINTED:]:
                print(line_of(entry), file=sys.stderr)
            if collectives:
                files[f"rank-{rank}.{library}.json"] = _last_of(recorded[library], world)
        if files:
            write(f"{run}/{PROFILES}/{HANG}{attempt}", files)
        if not rank:
            _remove_old(f"{run}/{PROFILES}")
    except Exception:  # torch and the store may raise anything
        traceback.print_exc()


def _last_of(record: bytes, world: int) -> bytes:
    """Return a record with the last collectives only, so that all ranks together store MOST_STORED."""
    document = json.loads(record)
    most = max(MOST_STORED // world, MAX_PRINTED)
    if len(document["entries"]) <= most:
        return record
    return json.dumps({**document, "entries": document["entries"][-most:]}).encode()


def _remove_old(folder: str) -> None:
    """Remove the records of all attempts but the newest KEPT_HANGS."""
    fs, path = open_file_system(folder, TIMEOUT)
    try:
        names = [name.rstrip("/").rpartition("/")[2] for name in RETRY(fs.ls, path, detail=False)]
    except FileNotFoundError:
        return
    attempts = sorted(int(name[len(HANG) :]) for name in names if re.fullmatch(f"{HANG}[0-9]+", name))
    for attempt in attempts[:-KEPT_HANGS]:
        RETRY(fs.rm, f"{path}/{HANG}{attempt}", recursive=True)


def members_of_groups() -> dict[str, tuple[int, ...]]:
    """Return the ranks of each process group of this rank by torch's name of it. The recorder of gloo has none."""
    from torch.distributed import distributed_c10d

    groups = distributed_c10d._world.pg_group_ranks
    return {str(group.group_name): tuple(sorted(ranks)) for group, ranks in list(groups.items())}


def last_collectives(
    library: str, entries: Iterable[Mapping[str, Any]], members: Mapping[str, tuple[int, ...]]
) -> list[Entered]:
    """Return the last completed collective of each group, and the first that is not completed, the newest at the end.

    Args:
        library: the library, each of which counts the collectives of a group for itself.
        entries: its recorded collectives, in order.
        members: the ranks of each process group.
    """
    last_by_group: dict[tuple[str, bool], Entered] = {}
    for entry in entries:
        name = str((entry.get("process_group") or [""])[0])
        is_done = _is_done(entry)
        if entry.get("is_p2p") or (not is_done and (name, False) in last_by_group):
            continue
        ranks = members.get(name, ())
        number = int(entry["collective_seq_id"])
        members_text = (
            f"ranks {', '.join(map(str, ranks[:MAX_NAMED_RANKS]))}"
            if len(ranks) <= MAX_NAMED_RANKS
            else f"{len(ranks)} ranks"
        )
        operation = f"{entry.get('profiling_name')} {entry.get('input_sizes')}"
        text = f"collective {number} of {members_text if ranks else f'group {name}'}, {operation}"
        last_by_group.pop((name, is_done), None)
        last_by_group[name, is_done] = Entered(
            f"{library} {name}", number, text, is_done=is_done, ranks=ranks
        )
    return list(last_by_group.values())


def _is_done(entry: Mapping[str, Any]) -> bool:
    """Whether a recorded collective is completed. gloo retires it then, and never changes its state."""
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def main_frame() -> tuple[str, bool]:
    """Return the function in which the main thread is, for people, and whether it waits for other ranks.

    It waits if it is in torch's distributed package, or calls `wait`: gloo records no messages between two ranks. Then
    the function is the one that called torch.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "", False
    code, line = frame.f_code, linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    is_waiting = DISTRIBUTED in code.co_filename or ".wait()" in line
    while DISTRIBUTED in frame.f_code.co_filename and frame.f_back is not None:
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})", is_waiting


def is_computing() -> bool:
    """Whether the main thread uses the processor; False where the system does not say.

    Its time counts, not its state: a thread that computes in Python stands still while this one looks at it. On a busy
    machine it gets little, but more than a thread that sleeps and looks again.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return False
    clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    before = time.clock_gettime(clock)
    time.sleep(LOOK)
    return time.clock_gettime(clock) - before > COMPUTING * LOOK


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
        f"{entry.get('output_sizes')}, {'completed' if _is_done(entry) else entry.get('state')}"
    )


def write(folder: str, files: Mapping[str, bytes]) -> None:
    """Write files into a folder of the run directory.

    Args:
        folder: path or URI.
        files: content by name.
    """
    fs, path = open_file_system(folder, TIMEOUT)
    RETRY(fs.makedirs, path, exist_ok=True)
    for name, content in files.items():
        RETRY(fs.pipe_file, f"{path}/{name}", content)
