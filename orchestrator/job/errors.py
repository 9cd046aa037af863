"""What a user reads of wrong input: one line that says what, where and a hint."""

from __future__ import annotations


class InputError(Exception):
    """The user's input is wrong: the command ends with exit code 2, and nothing was written.

    `what` is wrong, `where` it stands (a file and key, a path, an option), and a `hint` what to do about it.
    """

    kind = "input"

    def __init__(self, what: str, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(what, where, hint)

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        return " ".join(f"{line}; {self.hint}".split()) if self.hint else " ".join(line.split())


def one_line(error: BaseException) -> str:
    """An error as one line for people: its type and its message."""
    return " ".join(f"{type(error).__name__}: {error}".split())


class Absent(InputError):
    """What was named is not there, or not what it was taken for."""


class Unreachable(InputError):
    """A store or server does not answer. Its address may be wrong, or it may be down for a while."""
