"""How a run or a command ends, and its exit code."""

from __future__ import annotations

from enum import StrEnum

INTERRUPTED = 130
"""The exit code of a command that was interrupted, as in shells: before there was anything to commit, or while it
followed something that continues without it.
"""


class Outcome(StrEnum):
    """How a run or command ended. The value is stored in summary.json and in events.jsonl, and printed by commands.

    WRONG_INPUT occurs for commands only: a run with wrong input does not begin.
    """

    DONE = "done"
    FAILED = "failed"
    WRONG_INPUT = "wrong input"
    STOPPED = "stopped"  # stopped by a limit or by the user, after a commit

    @property
    def exit_code(self) -> int:
        """Return the exit code of a command that ends this way."""
        return {Outcome.DONE: 0, Outcome.FAILED: 1, Outcome.WRONG_INPUT: 2, Outcome.STOPPED: 3}[self]

    @classmethod
    def of_exit(cls, code: int) -> Outcome | None:
        """Return the outcome with that exit code; None for a code that this program never returns, such as that of a
        signal.
        """
        return next((outcome for outcome in cls if outcome.exit_code == code), None)


ENDED: frozenset[str] = frozenset({Outcome.DONE, Outcome.FAILED, Outcome.STOPPED})
"""The phases of a run that has ended."""
