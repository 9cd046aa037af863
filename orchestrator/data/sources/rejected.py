"""Handling of unusable input by `data.on_error`: the command fails, or the input is left out or repaired and counted
by file and kind, with first examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.redact import without_credentials
from orchestrator.data.sources.files import SourceFile
from orchestrator.data.sources.kinds import NUMBERED
from orchestrator.data.sources.lines import line_number
from orchestrator.data.sources.plain import opened_plain

EXAMPLES = 3
"""Number of examples kept for one kind in one file and part."""
SHOWN = 200
"""Maximum characters of an example's text, and of its description."""
COUNTED_BYTES = 2**30
"""Bytes within which lines are counted for a message."""
LEFT_OUT = "left out"
REPAIRED = "repaired"
READ = "read by number"


class Unfit(Exception):
    """Why input is unusable: its kind in one word, the problem, and a hint."""

    def __init__(self, kind: str, problem: str, hint: str = "fix or remove it") -> None:
        super().__init__(problem)
        self.kind = kind
        self.what = problem
        self.hint = hint


@dataclass
class Finding:
    """How often input of one `kind` in one file was left out or repaired (the `action`).

    `count` counts documents. A file that ends too early, or cannot be read at all, counts as one.
    """

    source: int
    file: str
    kind: str
    action: str
    count: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)


class Rejected:
    """The input of a part that was left out or repaired, by the policy of a key of the job file."""

    def __init__(self, key: str = "data.on_error") -> None:
        self._findings: dict[tuple[str, str, str], Finding] = {}
        self._key = key

    def refuse(
        self, file: SourceFile, error: Unfit, at: int | None = None, sample: object = "", count: int = 1
    ) -> None:
        """Count `count` documents that are left out. Raises InputError if the policy of the file is to fail.

        `at` is the byte of a line or the number of a row; None for the whole file.
        """
        if file.on_error == "fail":
            prefix = "" if at is None else f"{place_of(file, at)}: "
            raise InputError(f"{prefix}{error.what}", file.uri, f"{error.hint}, or set {self._key}") from None
        self._count(file, LEFT_OUT, error=error, at=at, sample=sample, count=count)

    def repair(self, file: SourceFile, error: Unfit, at: int | None = None, sample: object = "") -> None:
        """Count a document that was repaired."""
        self._count(file, REPAIRED, error=error, at=at, sample=sample, count=1)

    def note(
        self, file: SourceFile, kind: str, problem: str, at: int | None = None, sample: object = ""
    ) -> None:
        """Count a document that was read in a way that the user should know about."""
        self._count(file, READ, error=Unfit(kind, problem), at=at, sample=sample, count=1)

    def pass_over(self, file: SourceFile, error: Unfit, at: int | None = None) -> None:
        """Count a document that is left out under every policy."""
        self._count(file, LEFT_OUT, error=error, at=at, sample="", count=1)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the findings in a fixed order, as plain data."""
        return [asdict(finding) for _, finding in sorted(self._findings.items())]

    def _count(
        self, file: SourceFile, action: str, error: Unfit, at: int | None, sample: object, count: int
    ) -> None:
        key = (file.uri, error.kind, action)
        where = without_credentials(file.uri)  # it is stored beside the data
        finding = self._findings.setdefault(key, Finding(file.source, where, error.kind, action))
        finding.count += count
        if len(finding.examples) < EXAMPLES:
            position = {} if at is None else {("row" if file.kind in NUMBERED else "byte"): at}
            finding.examples.append({**position, "what": error.what[:SHOWN], "text": shown(sample)})


def shown(sample: object) -> str:
    """Return the beginning of a value, as text that JSON and a terminal can hold."""
    if isinstance(sample, bytes):
        return sample[: 4 * SHOWN].decode(errors="backslashreplace")[:SHOWN]
    if isinstance(sample, Mapping):
        sample = str({key: str(value)[:SHOWN] for key, value in list(sample.items())[:8]})
    return str(sample)[:SHOWN].encode(errors="backslashreplace").decode()


def place_of(file: SourceFile, at: int) -> str:
    """Return a position in a file for people. A line-based file is read once more to count lines, if that is quick."""
    if file.kind in NUMBERED:
        return f"row {at + 1}"
    if at > COUNTED_BYTES:
        return f"at byte {at}"
    with opened_plain(file) as plain:
        return f"line {line_number(plain, at)}, at byte {at}"
