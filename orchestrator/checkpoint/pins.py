"""Holds on commits: a file in a commit's folder that protects the commit from the removal of old commits.

The file names the holder, so a person who needs the room can decide to remove it. The hold of a process that reads a
commit ends with the process: it releases the commit. If it was killed, the next removal of old commits on its machine
does so. Elsewhere nobody can see that it was killed, but it renews its hold while it lives: a removal of old commits
marks the hold, a renewal takes the mark away, and a mark that stays for LEASE ends the hold. Both times of a mark are
from the clocks of those who remove, so a reader's clock may be wrong. The module does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import FOLDER, commit_folder, published_steps
from orchestrator.storage.process_identity import has_ended, process_identity

HOLD = re.compile(r"held-[0-9a-f]{16}\.json(\.[0-9a-f]{32}\.tmp)?")
"""The name of a hold, or of a draft of one that a crash left behind."""


PROCESS = "process"
"""The key of a hold with the identity of the process that it ends with."""
RENEWED, MARKED = "renewed", "marked"
"""Keys of a hold: the number of its renewals, if it is renewed at all, and when it was marked, in unix seconds."""
RENEWAL = 60.0
"""Seconds between two renewals of a hold."""
ANSWER = 5.0
"""Seconds that the end of a hold waits for a renewal on its way."""
LEASE = 3600.0
"""Seconds after which a hold ends that was marked and not renewed. Its process is dead, or cannot reach the store."""


def hold(store: Store, step: int, by: str, process: Mapping[str, Any] | None = None) -> bool:
    """Hold the commit of a step until `release`. A holder holds one commit at a time, so its other holds end.

    Args:
        store: the store that has the commit.
        step: the step of the commit.
        by: the holder, for people.
        process: the identity of the process with which the hold ends; None if it lasts until `release`.

    Returns:
        Whether the checkpoint exists and is pinned.

    Raises:
        OSError: storage refuses the file, for example because it is read-only.
    """
    name = _name(by)
    content = {"by": by} | ({PROCESS: dict(process), RENEWED: 0} if process else {})
    paths = without_dead_readers(store, store.retry(store.backend.list))
    for other in _steps(path for path in paths if path.endswith(f"/{name}")) - {step}:
        release(store, other, by)  # left by a process that was killed
    if step not in published_steps(paths):
        return False
    path = f"{commit_folder(step)}/{name}"
    if path in paths and PROCESS not in _content(store, path):
        return True
    _write(store, path, content)
    if step in store.steps():  # otherwise it was removed just before the hold
        return True
    release(store, step, by)
    return False


def release(store: Store, step: int, by: str) -> None:
    """Remove a pin, if it exists. Raises what storage raises.

    Args:
        store: the store of the pinned commit.
        step: the step of the commit.
        by: the holder of the pin.
    """
    store.retry(store.backend.remove, f"{commit_folder(step)}/{_name(by)}")
    store.retry(store.backend.remove_folder, commit_folder(step))  # only if it is empty


def hold_if_allowed(store: Store, step: int, by: str, process: Mapping[str, Any] | None = None) -> None:
    """Hold a commit if storage allows it, see `hold`. Raises FileNotFoundError if the commit is gone.

    Args:
        store: the store that has the commit.
        step: the step of the commit.
        by: the holder, for people.
        process: the identity of the process with which the hold ends; None if it lasts until `release`.
    """
    try:
        is_there = hold(store, step, by, process)
    except OSError:
        return
    if not is_there:
        raise FileNotFoundError(f"{store.location}/{commit_folder(step)}")


@contextlib.contextmanager
def holding(store: Store, step: int, by: str) -> Iterator[None]:
    """Hold the commit of a step for the length of the block, see `hold_if_allowed`. The hold ends with this process.

    Args:
        store: the store that has the commit.
        step: the step of the commit.
        by: the holder, for people.
    """
    hold_if_allowed(store, step, by, process_identity(os.getpid()))
    is_over = threading.Event()
    path = f"{commit_folder(step)}/{_name(by)}"
    renewing = threading.Thread(target=_renew, args=(store, path, is_over), name="hold", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        is_over.set()
        renewing.join(ANSWER)  # a renewal that came after the release would hold it again
        with contextlib.suppress(OSError):
            release(store, step, by)


def _renew(store: Store, path: str, is_over: threading.Event) -> None:
    """Renew a hold until it `is_over`, or is gone."""
    renewals = 0
    while not is_over.wait(RENEWAL):
        with contextlib.suppress(Exception):  # the store may be down: the next renewal may reach it
            content = _content(store, path)
            if PROCESS not in content:
                return
            renewals += 1
            unmarked = {key: value for key, value in content.items() if key != MARKED}
            _write(store, path, {**unmarked, RENEWED: renewals})


def without_dead_readers(store: Store, paths: Iterable[str]) -> list[str]:
    """Remove the holds of processes that have ended, and mark those that cannot be seen from here. Return the other
    `paths`.

    Args:
        store: the store of the run's commits.
        paths: of all its files.
    """
    left = []
    for path in paths:
        if _is_hold(path) and _reader_has_ended(store, path):
            store.retry(store.backend.remove, path)
        else:
            left.append(path)
    return left


def pinned_steps(paths: Iterable[str]) -> set[int]:
    """Return the steps of the pinned checkpoints, in a store with these paths."""
    known = list(paths)
    return _steps(filter(_is_hold, known)) & set(published_steps(known))


def holders(store: Store, step: int) -> list[str]:
    """Return the holders of pins of a commit.

    Args:
        store: the store of the run's commits.
        step: the step of the commit.
    """
    names: list[str] = []
    for path in sorted(store.retry(store.backend.list, commit_folder(step))):
        if _is_hold(path) and (by := _content(store, path).get("by")):
            names.append(str(by))
    return names


def _content(store: Store, path: str) -> dict[str, Any]:
    """Return the content of a hold; empty if it is gone or was changed by hand."""
    with contextlib.suppress(ValueError, FileNotFoundError):
        content = json.loads(store.retry(store.backend.read, path))
        return content if isinstance(content, dict) else {}
    return {}


def _reader_has_ended(store: Store, path: str) -> bool:
    """Return whether a hold belongs to a process that has ended. False if it names none.

    The hold of a process elsewhere is marked, and has ended if the mark is older than LEASE.
    """
    content = _content(store, path)
    try:
        ended = has_ended(content[PROCESS])
        if ended is not None or RENEWED not in content:
            return ended is True
        since = time.time() - float(content.get(MARKED, -1.0))
    except (KeyError, TypeError, ValueError):
        return False
    # A mark from the future comes from a clock that was set back: it is written anew, and its hour begins again.
    if MARKED in content and since >= 0.0:
        return since > LEASE
    with contextlib.suppress(OSError):
        _write(store, path, {**content, MARKED: time.time()})
    return False


def _write(store: Store, path: str, content: Mapping[str, Any]) -> None:
    store.retry(store.backend.replace, path, json.dumps(content).encode() + b"\n")


def _is_hold(path: str) -> bool:
    match = HOLD.fullmatch(path.partition("/")[2])
    return match is not None and match[1] is None


def _steps(paths: Iterable[str]) -> set[int]:
    folders = (path.partition("/")[0] for path in paths)
    return {int(match[1]) for name in folders if (match := FOLDER.fullmatch(name))}


def _name(by: str) -> str:
    return f"held-{hashlib.sha256(by.encode()).hexdigest()[:16]}.json"
