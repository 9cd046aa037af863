"""Names of special tokens that appear in texts: how often, and whether they were read as tokens or as characters."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.data.encoding.tokenizer import special_names

TEXT, TOKENS = "text", "tokens"
"""How a name was read."""
SHOWN = 4
"""Number of names that a note lists."""
Counts = dict[str, dict[str, int]]
"""How often each name was read as text, and how often as the token."""


class NamedTokens:
    """Counts how often the names of a tokenizer's special tokens appear in texts."""

    def __init__(self, tokenizer: str) -> None:
        """`tokenizer` is the tokenizer's JSON. With an empty one, nothing is counted."""
        names = special_names(tokenizer) if tokenizer else ()
        self._find = re.compile("|".join(map(re.escape, names))) if names else None
        self._counts: dict[str, Counter[str]] = {TEXT: Counter(), TOKENS: Counter()}

    def clear(self) -> None:
        """Reset all counts."""
        for counts in self._counts.values():
            counts.clear()

    def add(self, text: str, parsed: bool) -> None:
        """Count the names in a text. If `parsed`, they were read as tokens."""
        if self._find is not None:
            self._counts[TOKENS if parsed else TEXT].update(self._find.findall(text))

    def add_record(self, record: str, parsed: bool) -> None:
        """Count the names in a record, given as JSON.

        Texts count as `parsed` says. Messages always count as parsed, because a chat template's text is always
        parsed.
        """
        if self._find is None or not self._find.search(record):
            return
        for value in json.loads(record).values():
            is_text = isinstance(value, str) or (
                isinstance(value, list) and all(isinstance(v, str) for v in value)
            )
            for text in _strings(value):
                self.add(text, parsed or not is_text)

    def to_json(self) -> Counts:
        """Return the counts without zeros."""
        return {how: dict(counts) for how, counts in self._counts.items() if counts}


def summed(counts: Iterable[Counts]) -> Counts:
    """Return the sums over all parts, the most frequent name first."""
    sums: dict[str, Counter[str]] = {TEXT: Counter(), TOKENS: Counter()}
    for part_counts in counts:
        for how, names in part_counts.items():
            sums[how].update(names)
    return {how: dict(names.most_common()) for how, names in sums.items() if names}


def notes(named: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return one note for each way in which names of special tokens in the text were read."""
    ends = {
        TEXT: "and are read as characters; data.special_tokens: parse reads them as the tokens",
        TOKENS: "and are read as these tokens",
    }
    return [
        f"the text contains names of special tokens {sum(names.values())} times ({_shown(names)}), {ends[how]}"
        for how, names in named.items()
    ]


def _shown(names: Mapping[str, int]) -> str:
    shown = [f"{name} {count}" for name, count in list(names.items())[:SHOWN]]
    return ", ".join([*shown, "..."] if len(names) > SHOWN else shown)


def _strings(value: Any) -> Iterable[str]:
    """Yield all texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
