"""The text of a part as it is tokenised: what is read, or what cleaning leaves of it."""

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
    """The text of a part, or what cleaning leaves of it."""
    if cleaned is not None:
        return cleaned.pieces(part, rejected)
    return (piece for span in part for piece in pieces(span, data_format, rejected))


def goes_on(part: Part, cleaned: CleanedText | None) -> bool:
    """Whether the text of a part goes on with a document of the part before; of cleaned text all are whole."""
    span = part[0]
    if cleaned is not None or span.file.kind != ".txt" or not span.start:
        return False
    with opened(span) as file:
        return text_rows.goes_on(span, file)


def sample(
    parts: Sequence[Part], limit: int, data_format: int = FORMAT, cleaned: CleanedText | None = None
) -> Iterator[str]:
    """About `limit` bytes of text: the beginning of each part, in proportion to its size."""
    share = limit / max(1, sum(span.bytes for part in parts for span in part))
    for part in parts:
        held, due = 0, share * sum(span.bytes for span in part)
        for piece in part_pieces(part, data_format, cleaned):
            yield piece.text
            held += piece.bytes
            if held >= due:
                break
