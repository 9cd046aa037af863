"""Repair of text: invalid UTF-8 becomes U+FFFD; NULs and byte order marks are removed."""

from __future__ import annotations

from typing import Any

from orchestrator.data.sources.rejected import Unfit

BOM = "\ufeff"
REPLACEMENT = "\ufffd"
MOST = 0.1
"""Up to this share of wrong characters a text is repaired; beyond it, it is not text."""


def replaced(data: bytes) -> str:
    """Decode bytes with U+FFFD for invalid UTF-8. Raises Unfit if hardly anything is text."""
    text = data.decode(errors="replace")
    _check_share(text, text.count(REPLACEMENT) + text.count("\0"))
    return text


def sound(text: str, on_error: str) -> tuple[str, Unfit | None]:
    """Return a text without unpaired surrogates, NULs and a leading byte order mark, and what was repaired, if
    anything.

    Raises Unfit if the policy is not to repair; then a byte order mark remains.
    """
    result = None
    if not is_unicode(text):
        result = Unfit("surrogate", "has an unpaired surrogate")
        text = text if on_error != "repair" else joined(text)
    if "\0" in text:
        result = result or Unfit("nul", "has NUL characters")
        if on_error == "repair":
            _check_share(text, text.count("\0"))
            text = text.replace("\0", "")
    if result and on_error != "repair":
        raise result
    if on_error == "repair" and text.startswith(BOM):
        result = result or Unfit("bom", "begins with a byte order mark")
        text = text.lstrip(BOM)
    return text, result


def sound_value(value: Any, on_error: str) -> tuple[Any, Unfit | None]:
    """Like `sound`, for all texts within a JSON value. Raises Unfit."""
    if isinstance(value, str):
        return sound(value, on_error)
    if isinstance(value, bytes):
        if on_error != "repair":
            raise Unfit("utf-8", "is not UTF-8")
        text, _ = sound(replaced(value), on_error)
        return text, Unfit("utf-8", "is not UTF-8")
    if isinstance(value, list):
        result = [sound_value(item, on_error) for item in value]
        return [item for item, _ in result], next((unfit for _, unfit in result if unfit), None)
    if isinstance(value, dict):
        items = {key: sound_value(item, on_error) for key, item in value.items()}
        first = next((unfit for _, unfit in items.values() if unfit), None)
        return {key: item for key, (item, _) in items.items()}, first
    return value, None


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8, which requires that it has no unpaired surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def joined(text: str) -> str:
    """Return a text with split surrogate pairs joined, and U+FFFD for unpaired ones."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _check_share(text: str, wrong: int) -> None:
    if wrong > MOST * len(text) + 1:
        raise Unfit("binary", f"is not text: {wrong} of {len(text)} characters are invalid", "remove it")
