"""The rules of C4 (Raffel et al., 2020, section 2.2) and of FineWeb (Penedo et al., 2024), as datatrove 0.10 has them.

Different on purpose: sentences are counted by `words.sentences`, and words are those of `words`.
"""

from __future__ import annotations

import re

from orchestrator.config.clean import C4, FineWeb
from orchestrator.data.clean.gopher import repeated
from orchestrator.data.clean.removed import Removed
from orchestrator.data.clean.words import TERMINAL, sentences, words

CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
ENDS = (".", "?", "!", '"', "'")
POLICIES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)


def c4(text: str, rule: C4) -> str | Removed:
    """The lines of a text that are kept, or why the document is not."""
    number, kept = 0, []
    for line in map(str.strip, text.splitlines()):
        found = line.split()
        if rule.max_word_length and any(len(word) > rule.max_word_length for word in found):
            continue
        if rule.citations:
            line = CITATION.sub("", line)
        if rule.terminal_punctuation and (not line.endswith(ENDS) or line.endswith("...")):
            continue
        if len(found) < rule.min_words_per_line:
            continue
        lower = line.lower()
        if rule.lorem_ipsum and "lorem ipsum" in lower:
            return Removed("lorem ipsum")
        if rule.javascript and "javascript" in lower:
            continue
        if rule.curly_bracket and "{" in line:
            return Removed("a curly bracket")
        if rule.policy and any(policy in lower for policy in POLICIES):
            continue
        number += sentences(line)
        kept.append(line)
    if number < rule.min_sentences:
        return Removed("too few sentences")
    return "\n".join(kept).strip()


def fineweb(text: str, rule: FineWeb) -> str:
    """Why the rules remove a text; empty if they do not."""
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return "empty"
    if sum(line[-1] in TERMINAL for line in lines) / len(lines) < rule.min_punctuated_lines:
        return "too few lines end a sentence"
    if sum(len(line) <= rule.short_line for line in lines) / len(lines) > rule.max_short_lines:
        return "too many short lines"
    if repeated(lines)[1] / len(text.replace("\n", "")) > rule.max_repeated:
        return "repeated lines"
    if text.count("\n") / len(words(text)) > rule.max_line_ends:
        return "too many line ends"
    return ""
