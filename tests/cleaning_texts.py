"""Real documents, and planted bad ones, on which rules are compared with those of others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pydoc_data.topics import topics

import pytest

from orchestrator.data.corpus import PACKAGES, _docstrings

PROSE = (
    "The river is wide here, and the people of the town have always lived with it. In spring it floods the fields "
    "that lie to the west of the bridge. They say that the water brings good soil. Nobody builds there, and nobody "
    "has to be told why! Would you have asked? The old mill is the last house to the north of it."
)


def planted() -> Iterator[str]:
    """Documents at the borders of the rules."""
    draw = random.Random(7)
    words = PROSE.split()
    for size in (1, 5, 10, 49, 50, 51, 60, 100, 400):
        yield " ".join(draw.choice(words) for _ in range(size))
    for share in (0.1, 0.3, 0.31, 0.5, 0.9):
        lines = [f"{' '.join(draw.sample(words, 12))}." for _ in range(40)]
        yield "\n".join(line if draw.random() > share else lines[0] for line in lines)
        yield "\n".join(line if draw.random() > share else f"- {line}" for line in lines)
        yield "\n".join(line if draw.random() > share else f"{line}.." for line in lines)
        yield "\n\n".join(line if draw.random() > share else lines[1] for line in lines)
        yield "\n".join(line if draw.random() > share else line[:20] for line in lines)
        yield " ".join(
            word if draw.random() > share else draw.choice(["#", "...", "42", "\u2026", "a"])
            for word in words * 3
        )
        yield " ".join([*words, *(draw.choice(words[:6]) for _ in range(int(200 * share)))])
    yield "\n".join(
        [PROSE, "We use cookies.", "Enable JavaScript to read this.", "Menu", "Read more [edit].", PROSE]
    )
    yield PROSE + " lorem ipsum dolor."
    yield PROSE + "\nfunction() { return 1.0; }."
    yield "x" * 1200 + f" is long.\n{PROSE}"
    yield "\n".join(f"electroencephalographically {chr(97 + n)}nticonstitutionnellement." for n in range(20))
    yield "\n\n\n"
    yield " "
    yield "..."
    yield "\u4f60\u597d\uff0c\u4e16\u754c\u3002" * 30
    yield "\u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439, \u043c\u0438\u0440! " * 20
    yield "na\u00efve caf\u00e9 \u2014 it\u2019s d\u00e9j\u00e0 vu. " * 10


@cache
def texts(package: str = "") -> tuple[str, ...]:
    """The documentation strings of a package; without one, Python's help topics and planted documents."""
    if package:
        return tuple(text for text in _docstrings(package) if text)
    return (*(text for _, text in sorted(topics.items())), *planted())


EACH = pytest.mark.parametrize(
    "package", ["", *(pytest.param(name, marks=pytest.mark.slow) for name in PACKAGES)]
)
"""The planted documents, and when slow those of each package."""
