"""How a run or a command ends, and with which exit code."""

from __future__ import annotations

from enum import StrEnum

INTERRUPTED = 130
"""The exit code of a command that was interrupted, as shells have it: before there was anything to commit, or while it
followed what goes on without it."""


class Outcome(StrEnum):
    """How it ended. The value stands in summary.json, in the rows of events.jsonl and in what commands print.

    WRONG_INPUT is of commands only: a run whose input is wrong does not begin.
    """

    DONE = "done"
    FAILED = "failed"
    WRONG_INPUT = "wrong input"
    STOPPED = "stopped"  # by a limit or by the user, with a commit in place

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ends so."""
        return {Outcome.DONE: 0, Outcome.FAILED: 1, Outcome.WRONG_INPUT: 2, Outcome.STOPPED: 3}[self]

    @classmethod
    def of_exit(cls, code: int) -> Outcome | None:
        """The outcome with that exit code; None for a code that no command of this program gives, as of a signal."""
        return next((outcome for outcome in cls if outcome.exit_code == code), None)


ENDED: frozenset[str] = frozenset({Outcome.DONE, Outcome.FAILED, Outcome.STOPPED})
"""The phases in which a run has ended."""
