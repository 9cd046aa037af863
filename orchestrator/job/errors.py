"""What a user is told: one line that says what, where and the mend."""

from __future__ import annotations


class InputError(Exception):
    """The input is wrong: the command ends with exit code 2 and nothing was written.

    `what` is wrong, `where` it stands (a file and key, a path, an option) and how to `mend` it.
    """

    def __init__(self, what: str, where: str = "", mend: str = "") -> None:
        self.what, self.where, self.mend = what, where, mend
        super().__init__(what, where, mend)

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        return " ".join(f"{line}; {self.mend}".split()) if self.mend else " ".join(line.split())


class Unreachable(InputError):
    """A place that does not answer: its address may be wrong, or it may be back in a while."""
