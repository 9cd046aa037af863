"""Verify commits again that a rank reported as damaged.

The rank itself may read wrongly, and a commit that is passed over is removed, so another process decides.
"""

from __future__ import annotations

from collections.abc import Set

from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.errors import InputError


def passed_over(why: str) -> str:
    """Return the line for a commit that is passed over."""
    return f"a commit is passed over: {why}"


class Doubted:
    """Verifies doubted commits of a store. Each is read in full, once for as long as callers ask for it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sound: dict[int, bool] = {}

    def damaged(self, steps: Set[int]) -> tuple[frozenset[int], list[str]]:
        """Return which of these commits are damaged or gone, and a line for each of `steps`."""
        self._sound = {step: sound for step, sound in self._sound.items() if step in steps}
        damaged: set[int] = set()
        notes: list[str] = []
        for step in sorted(steps):
            if self._is_sound(step):
                notes.append(f"the commit at step {step} is kept: a rank found it damaged, and it is sound")
            else:
                damaged.add(step)
                notes.append(passed_over(f"step {step}: a rank found it damaged or gone"))
        return frozenset(damaged), notes

    def _is_sound(self, step: int) -> bool:
        if step not in self._sound:
            try:
                self._sound[step] = not self._store.verify(step)
            except InputError:  # the commit does not exist
                self._sound[step] = False
        return self._sound[step]
