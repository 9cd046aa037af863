"""Commits that a rank found damaged, read again by another process: it may be the rank that reads wrongly, and what is
passed over is removed."""

from __future__ import annotations

from collections.abc import Set

from orchestrator.checkpoint.store import Store
from orchestrator.config.errors import InputError


def passed_over(why: str) -> str:
    """A line for a commit that is not restored."""
    return f"a commit is passed over: {why}"


class Doubted:
    """Which commits of a store are damaged indeed, each of which is read whole, once while it is asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sound: dict[int, bool] = {}

    def damaged(self, steps: Set[int]) -> tuple[frozenset[int], list[str]]:
        """Those of the commits of these steps that are damaged or gone, and a line for each of them all."""
        self._sound = {step: sound for step, sound in self._sound.items() if step in steps}
        found, notes = set[int](), []
        for step in sorted(steps):
            if self._is_sound(step):
                notes.append(f"the commit at step {step} is kept: a rank found it damaged, and it is sound")
            else:
                found.add(step)
                notes.append(passed_over(f"step {step}: a rank found it damaged or gone"))
        return frozenset(found), notes

    def _is_sound(self, step: int) -> bool:
        if step not in self._sound:
            try:
                self._sound[step] = not self._store.verify(step)
            except InputError:  # there is none
                self._sound[step] = False
        return self._sound[step]
