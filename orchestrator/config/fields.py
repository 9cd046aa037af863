"""The `field` of a source: a column, a path into one, or a template over several."""

from __future__ import annotations

import re
from functools import cache
from string import Formatter

_STEP = re.compile(r"[^.\[\]]+|\[\d+\]")


@cache
def keys_of(path: str) -> tuple[str | int, ...]:
    """Return the steps of a path into a row such as `a.b[0].text`: keys of objects and positions in lists.

    Raises ValueError for an invalid path.
    """
    steps = _STEP.findall(path)
    written = "".join(step if step.startswith("[") else f".{step}" for step in steps).removeprefix(".")
    if not steps or written != path:
        raise ValueError(f"{path!r} is not a path such as a.b[0].text")
    return tuple(int(step[1:-1]) if step.startswith("[") else step for step in steps)


@cache
def template_of(field: str) -> tuple[tuple[str, str | None], ...] | None:
    r"""Parse a template such as `"{title}\n\n{body}"` into pairs of the text before a path, and the path (None after
    the last).

    Returns None if `field` has no braces and so names a column. Raises ValueError if braces contain anything but a
    column.
    """
    if "{" not in field and "}" not in field:
        return None
    parts = []
    for before, path, form, conversion in Formatter().parse(field):
        if form or conversion:
            raise ValueError(f"{field!r} has a format after the column in {{{path}}}; remove the format")
        if path is not None:
            keys_of(path)
        parts.append((before, path))
    return tuple(parts)


def columns_of(field: str) -> tuple[str, ...]:
    """Return the columns, or paths into them, that a `field` reads."""
    parts = template_of(field)
    return (field,) if parts is None else tuple(path for _, path in parts if path is not None)
