"""What a user reads of wrong input: one line that says what, where and a hint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class InputError(Exception):
    """The user's input is wrong: the command ends with exit code 2, and nothing was written.

    `what` is wrong, `where` it stands (a file and key, a path, an option), and a `hint` what to do about it; `others`
    are wrong as well.
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
        """All that is wrong, one by one."""
        return [InputError(self.what, self.where, self.hint), *self.others] if self.others else [self]


class Problems:
    """Collects what is wrong, so that a user reads all of it at once."""

    def __init__(self) -> None:
        self._found: list[InputError] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Go on after an InputError of the block, which is noted."""
        try:
            yield
        except InputError as error:
            self._found += error.each()

    def raise_noted(self) -> None:
        """Raise the only problem as it was found, or the first with all others."""
        if self._found:
            raise self.all()

    def all(self) -> InputError:
        """The only problem as it was found, or the first with all others. There is one at least."""
        first, *others = self._found
        return InputError(first.what, first.where, first.hint, others) if others else first


def one_line(error: BaseException) -> str:
    """An error as one line for people: its type and its message."""
    return " ".join(f"{type(error).__name__}: {error}".split())


class Absent(InputError):
    """What was named is not there, or not what it was taken for."""


class Unreachable(InputError):
    """A store or server does not answer. Its address may be wrong, or it may be down for a while."""
