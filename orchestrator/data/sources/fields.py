"""The values of a row that its source's `field` selects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from orchestrator.config.fields import keys_of, template_of
from orchestrator.data.sources.rejected import Unfit
from orchestrator.data.sources.repair import is_unicode


def value_of(values: Mapping[str, Any], field: str) -> Any:
    """Return the value of a column, a path into one or a template; None if the row lacks it.

    A column whose name looks like a path takes precedence. Raises Unfit for a template over values that are not text.
    """
    if field in values:
        return values[field]
    parts = template_of(field)
    if parts is None:
        return _at(values, field)
    text = ""
    for before, path in parts:
        text += before
        if path is None:
            continue
        value = values[path] if path in values else _at(values, path)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise Unfit("type", f"has no text '{path}' but {type(value).__name__}", "name a column of texts")
        text += str(value)
    return text


def _at(values: Mapping[str, Any], path: str) -> Any:
    try:
        keys = keys_of(path)
    except ValueError:  # the row lacks a column of this name
        return None
    result: Any = values
    for key in keys:
        if isinstance(result, Mapping) and key in result:
            result = result[key]
        elif (
            isinstance(result, list | tuple)
            and (isinstance(key, int) or key.isdecimal())
            and int(key) < len(result)
        ):
            result = result[int(key)]
        else:
            return None
    return result


def texts_of(values: Mapping[str, Any], fields: Sequence[str]) -> list[str]:
    """Return the text of a row, or both texts of a pair. Raises Unfit."""
    texts = []
    for field in fields:
        text = value_of(values, field)
        if not isinstance(text, str):
            if isinstance(text, bytes):
                raise Unfit("utf-8", f"is not UTF-8 in '{field}'", "convert it to UTF-8")
            kind, but = ("field", "") if text is None else ("type", f" but {type(text).__name__}")
            near = get_close_matches(field, map(str, values), 1) if field not in values else []
            hint = f"set field to '{near[0]}'" if near else "set field to the text's key"
            raise Unfit(kind, f"has no text '{field}'{but}", hint)
        if not is_unicode(text):
            raise Unfit("surrogate", f"has an unpaired surrogate in '{field}'")
        texts.append(text)
    return texts
