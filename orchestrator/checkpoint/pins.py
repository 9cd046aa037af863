"""Holds on commits: what needs one puts a file into its folder, and no removal of old commits takes it away.

Torch-free. The file says who needs the commit; whoever needs the room more may remove it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator

from orchestrator.checkpoint.manifest import FOLDER, commit_folder, published_steps
from orchestrator.checkpoint.store import Store

HOLD = re.compile(r"held-[0-9a-f]{16}\.json(\.[0-9a-f]{32}\.tmp)?")
"""A hold, or the draft of one that a crash leaves."""


def hold(store: Store, step: int, by: str) -> bool:
    """Hold the commit of a step until `release`, and no other by the same; `by` is who needs it, in words. Whether it
    was there to be held. Raises what storage raises, as where nothing may be written."""
    name = _name(by)
    paths = store.retry(store.backend.list)
    for other in _steps(path for path in paths if path.endswith(f"/{name}")) - {step}:
        release(store, other, by)  # what held it was killed
    if step not in published_steps(paths):
        return False
    if f"{commit_folder(step)}/{name}" in paths:
        return True
    told = json.dumps({"by": by}).encode() + b"\n"
    store.retry(store.backend.replace, f"{commit_folder(step)}/{name}", told)
    if step in store.steps():  # else it was removed just before
        return True
    release(store, step, by)
    return False


def release(store: Store, step: int, by: str) -> None:
    """End the hold of `by`, if there is one. Raises what storage raises."""
    store.retry(store.backend.remove, f"{commit_folder(step)}/{_name(by)}")
    store.retry(store.backend.remove_folder, commit_folder(step))  # if nothing is in it any more


def hold_if_allowed(store: Store, step: int, by: str) -> None:
    """As `hold`, where that may be written. Raises FileNotFoundError if the commit is gone."""
    try:
        is_there = hold(store, step, by)
    except OSError:
        return
    if not is_there:
        raise FileNotFoundError(f"{store.location}/{commit_folder(step)}")


@contextlib.contextmanager
def holding(store: Store, step: int, by: str) -> Iterator[None]:
    """Hold the commit of a step within the block, see `hold_if_allowed`."""
    hold_if_allowed(store, step, by)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            release(store, step, by)


def held(paths: Iterable[str]) -> set[int]:
    """The steps of the commits that are held, of a store with these paths."""
    known = list(paths)
    return _steps(filter(_is_hold, known)) & set(published_steps(known))


def holders(store: Store, step: int) -> list[str]:
    """Who holds the commit of a step, in words."""
    found = list[str]()
    for path in sorted(store.retry(store.backend.list, commit_folder(step))):
        if _is_hold(path):
            with contextlib.suppress(ValueError, LookupError, FileNotFoundError):
                found.append(str(json.loads(store.retry(store.backend.read, path))["by"]))
    return found


def _is_hold(path: str) -> bool:
    found = HOLD.fullmatch(path.partition("/")[2])
    return found is not None and found[1] is None


def _steps(paths: Iterable[str]) -> set[int]:
    folders = (path.partition("/")[0] for path in paths)
    return {int(found[1]) for name in folders if (found := FOLDER.fullmatch(name))}


def _name(by: str) -> str:
    return f"held-{hashlib.sha256(by.encode()).hexdigest()[:16]}.json"
