"""The quality rules of Gopher (Rae et al., 2021, appendix A1.1).

datatrove's filter comes to the same decisions, in more than twice the time: it looks at each character of each word in
Python, where a word that recurs is looked at once here. It divides by zero for a text without words.
"""

from __future__ import annotations

import numpy as np

from orchestrator.data.clean.config import GopherQuality
from orchestrator.data.clean.words import counted, words

ELLIPSES = ("...", "\u2026")
BULLETS = ("\u2022", "-")


def quality(text: str, rule: GopherQuality) -> str:
    """Return why the quality rules remove a text; empty if they keep it."""
    counts = counted(text)
    total = len(counts.numbers)
    lengths = counts.lengths[~counts.symbols]
    number = len(lengths)
    if rule.min_words and number < rule.min_words:
        return "too few words"
    if rule.max_words and number > rule.max_words:
        return "too many words"
    if not number:
        return "no words"
    mean = int(lengths.sum()) / number
    if rule.min_word_length and mean < rule.min_word_length:
        return "words too short"
    if rule.max_word_length and mean > rule.max_word_length:
        return "words too long"
    if rule.max_symbols and text.count("#") / total > rule.max_symbols:
        return "too many hashes"
    if rule.max_symbols and sum(map(text.count, ELLIPSES)) / total > rule.max_symbols:
        return "too many ellipses"
    if reason := _line_quality(text, rule):
        return reason
    if rule.min_alphabetic and np.count_nonzero(counts.letters) / total < rule.min_alphabetic:
        return "too few words with a letter"
    if rule.min_stop_words and len(set(rule.stop_words).intersection(words(text))) < rule.min_stop_words:
        return "too few stop words"
    return ""


def _line_quality(text: str, rule: GopherQuality) -> str:
    """Return which rule about the share of certain lines removes a text; empty if none does."""
    lines = text.splitlines()
    # Counting the marks in the whole text is cheap, and each line that a rule looks for has at least one.
    if rule.max_bullet_lines and sum(map(text.count, BULLETS)) >= rule.max_bullet_lines * len(lines):
        bullets = sum(line.lstrip().startswith(BULLETS) for line in lines)
        if bullets / len(lines) > rule.max_bullet_lines:
            return "too many bullets"
    if rule.max_ellipsis_lines and sum(map(text.count, ELLIPSES)) >= rule.max_ellipsis_lines * len(lines):
        cut = sum(line.rstrip().endswith(ELLIPSES) for line in lines)
        if cut / len(lines) > rule.max_ellipsis_lines:
            return "too many lines end with an ellipsis"
    return ""
