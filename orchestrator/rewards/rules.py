"""The built-in rewards, each a function from (reward, answer) to a number. Standard library only, except for math."""

from __future__ import annotations

import importlib
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

from orchestrator.config.extras import install

Rule = Callable[[Mapping[str, Any]], float]
EXTRA = "rl"
"""The extra of pyproject.toml that brings math-verify."""


MARKED = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")
"""What begins mathematics within a text."""
WORDS = re.compile(r"(?:^|\s)[A-Za-z]{3,}(?![A-Za-z(])|\d\s+[A-Za-z]{2}")
"""A word, or a number with its unit: text that is not mathematics as a whole."""
EXPONENT = re.compile(r"[+-]?\d+(?:\.\d+)?[eE][+-]?\d{1,3}")


class Refused(Exception):
    """A reward can score nothing with these options; arguments: the problem, and what to do."""


class NoAnswer(Exception):
    """A row cannot be scored; the message says why."""


def as_reply(error: Refused | NoAnswer) -> dict[str, Any]:
    """Return what a worker replies instead of a value."""
    if isinstance(error, Refused):
        return {"refused": error.args[0], "hint": error.args[-1]}
    return {"problem": str(error)}


def expected(reward: Mapping[str, Any], answer: Mapping[str, Any]) -> Any:
    """Return the column of a reward. Raises Refused if no row has it, and NoAnswer if it is empty in this one."""
    column = reward["column"]
    columns = answer["columns"]
    if column not in columns:
        known = ", ".join(sorted(columns)) or "none"
        raise Refused(
            f"the prompts have no column {column} (they have: {known})",
            "name it in data.sources.field, or set the reward's column",
        )
    if columns[column] is None:
        raise NoAnswer(f"column {column} is empty")
    return columns[column]


def extracted(reward: Mapping[str, Any], text: str) -> str | None:
    """Return the part of the text that is compared: the group of the pattern's last match; None without a match."""
    if reward["pattern"] is None:
        return text
    result = [match[1] for match in re.finditer(reward["pattern"], text, _flags(reward))]
    return result[-1] if result else None


def exact_match(reward: Mapping[str, Any], answer: Mapping[str, Any]) -> float:
    """1.0 if the answer, or the part that the pattern extracts, equals the column; a list of columns has several."""
    result = extracted(reward, answer["text"])
    right = expected(reward, answer)
    if result is None:
        return 0.0
    plain = _plain(reward)
    return float(
        any(plain(str(each)) == plain(result) for each in (right if isinstance(right, list) else [right]))
    )


def _plain(reward: Mapping[str, Any]) -> Callable[[str], str]:
    def plain(text: str) -> str:
        text = text.strip() if reward["strip"] else text
        return text.casefold() if reward["ignore_case"] else text

    return plain


def regex(reward: Mapping[str, Any], answer: Mapping[str, Any]) -> float:
    """1.0 if the pattern is found anywhere in the answer."""
    return float(re.search(reward["pattern"], answer["text"], _flags(reward)) is not None)


def _flags(reward: Mapping[str, Any]) -> int:
    return int(re.IGNORECASE if reward["ignore_case"] else 0)


def length(reward: Mapping[str, Any], answer: Mapping[str, Any]) -> float:
    """1.0 from `least` to `most` tokens, falling linearly to 0.0 at `margin` tokens outside."""
    wanted = reward["length"]
    tokens = answer["tokens"]
    most = math.inf if wanted["most"] is None else wanted["most"]
    outside = max(wanted["least"] - tokens, tokens - most, 0)
    if not outside:
        return 1.0
    return max(0.0, 1.0 - outside / wanted["margin"]) if wanted["margin"] else 0.0


def same_value(reward: Mapping[str, Any]) -> Rule:
    """Return the rule of kind math: 1.0 if the answer has the value of the column, by math-verify.

    Raises Refused if that is not installed.
    """
    try:
        library = importlib.import_module("math_verify")
    except ImportError as error:
        raise Refused(f"needs math-verify ({error})", install(EXTRA)) from None
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(
            logging.CRITICAL
        )  # it warns for each answer that its time limit is off

    def parsed(text: str) -> Any:
        # Its own time limits are off: they need signals, and the process has a limit already.
        return library.parse(text, parsing_timeout=None)

    def verified(gold: Any, given: Any) -> bool:
        return bool(gold and given and library.verify(gold, given, timeout_seconds=None))

    @lru_cache(1024)  # all answers of a group are compared with the same
    def value(right: str) -> Any:
        text = _without_exponent(right)
        read = parsed(text)
        if read and (MARKED.search(text) or WORDS.search(text)):
            return read
        whole = parsed(f"\\boxed{{{text}}}")
        # Text without marks is searched for its last number, which is 10 in 10\sqrt{2}.
        is_part = read and whole and not isinstance(whole[0], str) and _is_more(text, read)
        return whole if not read or (is_part and not verified(read, whole)) else read

    def score(answer: Mapping[str, Any]) -> float:
        right = expected(reward, answer)
        golds = [value(str(each)) for each in (right if isinstance(right, list) else [right])]
        if not golds or not all(golds):
            raise NoAnswer(f"math-verify finds no value in column {reward['column']}: {str(right)[:80]!r}")
        text = extracted(reward, answer["text"])
        if text is None:
            return 0.0
        given = parsed(text if reward["pattern"] is None else f"\\boxed{{{text}}}")
        return float(any(verified(gold, given) for gold in golds))

    return score


def _without_exponent(text: str) -> str:
    """Return a number such as 1e-05, as floats of a column are written, in plain digits; other text as it is."""
    if not EXPONENT.fullmatch(text.strip()):
        return text
    return format(Decimal(text.strip()), "f")


def _is_more(text: str, read: Sequence[Any]) -> bool:
    """Return whether text has more than what math-verify has read of it."""
    return "".join(str(read[-1]).split()) != "".join(text.split())


def rule_of(reward: Mapping[str, Any]) -> Rule:
    """Return the function that scores an answer by a kind. Raises Refused."""
    if reward["kind"] == "math":
        return same_value(reward)
    rule = {"exact_match": exact_match, "regex": regex, "length": length}[reward["kind"]]
    return lambda answer: rule(reward, answer)


def is_instant(reward: Mapping[str, Any]) -> bool:
    """Return whether a rule takes a moment for any answer and column, so that no limit has to stop it."""
    return reward["kind"] == "length" or (reward["kind"] == "exact_match" and reward["pattern"] is None)
