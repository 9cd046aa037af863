"""Optional libraries of this program, installed by its extras."""

from __future__ import annotations


def install(extra: str) -> str:
    """Return the command that installs the libraries of an extra of pyproject.toml."""
    return f"pip install -e '.[{extra}]' in the checkout"
