"""Optional libraries of this program, which its extras install."""

from __future__ import annotations


def install(extra: str) -> str:
    """What installs the libraries of an extra of pyproject.toml."""
    return f"pip install -e '.[{extra}]' in the checkout"
