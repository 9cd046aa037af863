"""Holds on commits: a file in a commit's folder that protects the commit from the removal of old commits.

The file names the holder, so a person who needs the room can decide to remove it. The hold of a process that reads a
commit ends with the process: it releases the commit, or the next removal of old commits on its machine does so, if it
was killed. The module does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import FOLDER, commit_folder, published_steps
from orchestrator.storage.process_identity import has_ended

HOLD = re.compile(r"held-[0-9a-f]{16}\.json(\.[0-9a-f]{32}\.tmp)?")
"""The name of a hold, or of a draft of one that a crash left behind."""


PROCESS = "process"
"""The key of a hold with the identity of the process that it ends with."""


def hold(store: Store, step: int, by: str, process: Mapping[str, Any] | None = None) -> bool:
    """Hold the commit of a step until `release`. A holder holds one commit at a time, so its other holds end.

    Args:
        store: the store that has the commit.
        step: the step of the commit.
        by: the holder, for people.
        process: the identity of the process with which the hold ends; None if it lasts until `release`.

    Returns:
        Whether the commit exists and is held.

    Raises:
        OSError: storage refuses the file, for example because it is read-only.
    """
    name = _name(by)
    paths = without_dead_readers(store, store.retry(store.backend.list))
    for other in _steps(path for path in paths if path.endswith(f"/{name}")) - {step}:
        release(store, other, by)  # left by a process that was killed
    if step not in published_steps(paths):
        return False
    if f"{commit_folder(step)}/{name}" in paths:
        return True
    content = json.dumps({"by": by} | ({PROCESS: dict(process)} if process else {})).encode() + b"\n"
    store.retry(store.backend.replace, f"{commit_folder(step)}/{name}", content)
    if step in store.steps():  # otherwise it was removed just before the hold
        return True
    release(store, step, by)
    return False


def release(store: Store, step: int, by: str) -> None:
    """End the hold of `by`, if it exists. Raises what storage raises."""
    store.retry(store.backend.remove, f"{commit_folder(step)}/{_name(by)}")
    store.retry(store.backend.remove_folder, commit_folder(step))  # only if it is empty


def hold_if_allowed(store: Store, step: int, by: str, process: Mapping[str, Any] | None = None) -> None:
    """Hold a commit if storage allows it, see `hold`. Raises FileNotFoundError if the commit is gone."""
    try:
        is_there = hold(store, step, by, process)
    except OSError:
        return
    if not is_there:
        raise FileNotFoundError(f"{store.location}/{commit_folder(step)}")


@contextlib.contextmanager
def holding(store: Store, step: int, by: str, process: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Hold the commit of a step for the length of the block, see `hold_if_allowed`."""
    hold_if_allowed(store, step, by, process)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            release(store, step, by)


def without_dead_readers(store: Store, paths: Iterable[str]) -> list[str]:
    """Remove the holds of processes of this machine that have ended. Return the other `paths`."""
    left = []
    for path in paths:
        if _is_hold(path) and _reader_has_ended(_content(store, path)):
            store.retry(store.backend.remove, path)
        else:
            left.append(path)
    return left


def held(paths: Iterable[str]) -> set[int]:
    """Return the steps of the commits that are held, in a store with these paths."""
    known = list(paths)
    return _steps(filter(_is_hold, known)) & set(published_steps(known))


def holders(store: Store, step: int) -> list[str]:
    """Return the holders of the commit of a step."""
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


def _reader_has_ended(content: Mapping[str, Any]) -> bool:
    """Return whether a hold belongs to a process that has ended. False if it names none, or one elsewhere."""
    try:
        return has_ended(content[PROCESS]) is True
    except (KeyError, TypeError, ValueError):
        return False


def _is_hold(path: str) -> bool:
    match = HOLD.fullmatch(path.partition("/")[2])
    return match is not None and match[1] is None


def _steps(paths: Iterable[str]) -> set[int]:
    folders = (path.partition("/")[0] for path in paths)
    return {int(found[1]) for name in folders if (found := FOLDER.fullmatch(name))}


def _name(by: str) -> str:
    return f"held-{hashlib.sha256(by.encode()).hexdigest()[:16]}.json"
