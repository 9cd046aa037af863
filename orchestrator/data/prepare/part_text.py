"""The text of a part for tokenisation: as read, or after cleaning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from orchestrator.data.sources import Part, opened, text_rows
from orchestrator.data.sources.documents import TextPiece, pieces
from orchestrator.data.sources.rejected import Rejected
from orchestrator.data.store.manifest import FORMAT

if TYPE_CHECKING:
    from orchestrator.data.clean.cleaned_text import CleanedText


def part_pieces(
    part: Part, data_format: int, cleaned: CleanedText | None, rejected: Rejected | None = None
) -> Iterator[TextPiece]:
    """Yield the text of a part as read, or as cleaning leaves it."""
    if cleaned is not None:
        return cleaned.pieces(part, rejected)
    return (piece for span in part for piece in pieces(span, data_format, rejected))


def goes_on(part: Part, cleaned: CleanedText | None) -> bool:
    """Return whether a part begins within a document of the part before. Cleaned text never does."""
    span = part[0]
    if cleaned is not None or span.file.kind != ".txt" or not span.start:
        return False
    with opened(span) as file:
        return text_rows.goes_on(span, file)


def sample(
    parts: Sequence[Part], limit: int, data_format: int = FORMAT, cleaned: CleanedText | None = None
) -> Iterator[str]:
    """Yield about `limit` bytes of text: the beginning of each part, in proportion to its size."""
    share = limit / max(1, sum(span.bytes for part in parts for span in part))
    for part in parts:
        size = 0
        wanted = share * sum(span.bytes for span in part)
        for piece in part_pieces(part, data_format, cleaned):
            yield piece.text
            size += piece.bytes
            if size >= wanted:
                break
