"""Self-contained HTML pages: the templates, and how numbers are written in them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.observe.formatting import count, duration, short, value_text

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, content: Mapping[str, Any]) -> str:
    """Render a template of this folder, given its name without the ending.

    Values are escaped. Raises jinja2.UndefinedError for a name that `content` lacks.
    """
    return _environment().get_template(f"{template}.html.j2").render(content)


@cache
def _environment() -> Environment:
    """Return the environment of the templates. Cached, because compiling takes longer than rendering."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": duration,
        "count": count,
        "size": size,
        "moment": moment,
        "short": short,
        "value": value_text,
    }
    return environment


def size(value: float | None) -> str:
    """Format bytes in readable units: 512 B, 3.2 MiB; "unknown" for None."""
    if value is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.3g} {unit}" if unit != "B" and abs(value) < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def moment(seconds: float | None) -> str:
    """Format unix seconds as a date and time."""
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
