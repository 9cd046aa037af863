"""The built-in rewards, each a function from (reward, answer) to a number. Standard library only, except for math."""

from __future__ import annotations

import importlib
import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.config.extras import install

Rule = Callable[[Mapping[str, Any]], float]
EXTRA = "rl"
"""The extra of pyproject.toml that brings math-verify."""


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
        names = ", ".join(sorted(columns)) or "none"
        raise Refused(
            f"the prompts have no column {column} (they have: {names})",
            "name it in data.sources.field, or set the reward's column",
        )
    if columns[column] is None:
        raise NoAnswer(f"column {column} is empty")
    return columns[column]


def extracted(reward: Mapping[str, Any], text: str) -> str | None:
    """Return the part of the text that is compared: the group of the pattern's last match; None without a match."""
    if reward["pattern"] is None:
        return text
    result = [match[1] for match in re.finditer(reward["pattern"], text)]
    return result[-1] if result else None


def exact_match(reward: Mapping[str, Any], answer: Mapping[str, Any]) -> float:
    """1.0 if the answer, or the part that the pattern extracts, equals the column; a list of columns has several."""
    result = extracted(reward, answer["text"])
    right = expected(reward, answer)
    if result is None:
        return 0.0
    plain = _plain(reward)
    return float(
        any(plain(str(item)) == plain(result) for item in (right if isinstance(right, list) else [right]))
    )


def _plain(reward: Mapping[str, Any]) -> Callable[[str], str]:
    def plain(text: str) -> str:
        text = text.strip() if reward["strip"] else text
        return text.casefold() if reward["ignore_case"] else text

    return plain


def regex(reward: Mapping[str, Any], answer: Mapping[str, Any]) -> float:
    """1.0 if the pattern is found anywhere in the answer."""
    flags = re.IGNORECASE if reward["ignore_case"] else 0
    return float(re.search(reward["pattern"], answer["text"], flags) is not None)


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

    def score(answer: Mapping[str, Any]) -> float:
        right = str(expected(reward, answer))
        # Its own time limits are off: they need signals, and the process has a limit already.
        gold = next(
            (
                parsed
                for text in (right, f"\\boxed{{{right}}}")
                if (parsed := library.parse(text, parsing_timeout=None))
            ),
            None,
        )
        if gold is None:
            raise NoAnswer(f"math-verify finds no value in column {reward['column']}: {right[:80]!r}")
        text = extracted(reward, answer["text"])
        if text is None:
            return 0.0
        if reward["pattern"] is not None:
            text = f"\\boxed{{{text}}}"
        value = library.parse(text, parsing_timeout=None)
        return float(bool(value) and library.verify(gold, value, timeout_seconds=None))

    return score


def rule_of(reward: Mapping[str, Any]) -> Rule:
    """Return the function that scores an answer by a kind. Raises Refused."""
    if reward["kind"] == "math":
        return same_value(reward)
    rule = {"exact_match": exact_match, "regex": regex, "length": length}[reward["kind"]]
    return lambda answer: rule(reward, answer)


def is_instant(reward: Mapping[str, Any]) -> bool:
    """Return whether a rule takes a moment for any answer and column, so that no limit has to stop it."""
    return reward["kind"] == "length" or (reward["kind"] == "exact_match" and reward["pattern"] is None)
