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
        self._problems: dict[int, list[str]] = {}
        """The problems of each verified checkpoint; empty for a sound one."""

    def damaged(self, steps: Set[int]) -> tuple[dict[int, str], list[str]]:
        """Return why each of these commits that is damaged or gone cannot be used, and a line for each of `steps`."""
        self._problems = {step: problems for step, problems in self._problems.items() if step in steps}
        damaged: dict[int, str] = {}
        notes: list[str] = []
        for step in sorted(steps):
            if problems := self._problems_of(step):
                damaged[step] = f"a rank found it damaged: {problems[0]}"
                notes.append(passed_over(f"step {step}: a rank found it damaged or gone"))
            else:
                notes.append(
                    f"the commit at step {step} is kept: a rank reported damage, but a full check found none"
                )
        return damaged, notes

    def _problems_of(self, step: int) -> list[str]:
        if step not in self._problems:
            try:
                self._problems[step] = self._store.verify(step)
            except InputError as error:  # the commit does not exist
                self._problems[step] = [str(error)]
        return self._problems[step]
