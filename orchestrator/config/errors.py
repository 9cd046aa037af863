"""Errors about the user's input: one line with the problem, where it is, and a hint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class InputError(Exception):
    """The user's input is wrong: the command ends with exit code 2 and nothing was written.

    Attributes:
        what: the problem.
        where: its place: a file and key, a path, or an option.
        hint: how to fix it.
        others: further problems.
    """

    kind = "input"

    def __init__(self, what: str, where: str = "", hint: str = "", others: Sequence[InputError] = ()) -> None:
        self.what = what
        self.where = where
        self.hint = hint
        self.others = tuple(others)
        super().__init__(what, where, hint, self.others)

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        line += f" (and {len(self.others)} more)" if self.others else ""
        return " ".join(f"{line}; {self.hint}".split()) if self.hint else " ".join(line.split())

    def each(self) -> list[InputError]:
        """Return all problems, one by one."""
        return [InputError(self.what, self.where, self.hint), *self.others] if self.others else [self]


class Problems:
    """Collects problems, so that a user sees all of them together."""

    def __init__(self) -> None:
        self._found: list[InputError] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Continue after an InputError of the block, and record it."""
        try:
            yield
        except InputError as error:
            self._found += error.each()

    def raise_noted(self) -> None:
        """Raise the recorded problems, if any: the only one unchanged, or the first with all others."""
        if self._found:
            raise self.all()

    def all(self) -> InputError:
        """Return the only problem unchanged, or the first with all others. At least one must be recorded."""
        first, *others = self._found
        return InputError(first.what, first.where, first.hint, others) if others else first


def one_line(error: BaseException) -> str:
    """Return an error as one line for people: its type and its message."""
    return " ".join(f"{type(error).__name__}: {error}".split())


class Absent(InputError):
    """The named thing does not exist, or is not of the expected kind."""


class Unreachable(InputError):
    """A store or server does not answer. Its address may be wrong, or it may be down for a while."""
