#!/usr/bin/env bash
# The repetition filter of Gopher's rules in datatrove removes a table of numbers in which nothing repeats.
#
# Guess: a document whose rows are all different, and whose words never come twice in the same order, has no repeated
#   n-grams, so the rules on repetition keep it.
# Behaviour: datatrove compares n-grams of which the words are joined without a space. "12 345 6" and "123 45 6" are then
#   the same, and so are all rows that divide the same digits in other places. The document is removed with the reason
#   duplicated_5_n_grams. With a letter in each word, which tells where it begins, it is kept.
# Packages: datatrove 0.10.1 with regex 2026.11.15 and numpy 2.4.6; its own tokenizer for words is replaced by str.split
#   through the argument that the filter has for it
# Why it matters: tables, logs, sequences of bases and code with short tokens leave a corpus for repetition that they do
#   not have, and the count of removed documents does not show it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check datatrove==0.10.1 regex==2026.11.15 numpy==2.4.6

venv/bin/python - 2>/dev/null <<'PY'
import importlib.metadata
import random

from datatrove.data import Document
from datatrove.pipeline.filters.gopher_repetition_filter import GopherRepetitionFilter
from datatrove.utils.word_tokenizers import WordTokenizer


class Split(WordTokenizer):
    """Words are what spaces divide."""

    def word_tokenize(self, text):
        return text.split()

    def sent_tokenize(self, text):
        return [text]

    def span_tokenize(self, text):
        return [(0, len(text))]


print("version: datatrove", importlib.metadata.version("datatrove"))
print("guess: rows that are all different, without a repeated n-gram, are kept")
draw = random.Random(5)
rows = set()
while len(rows) < 20:
    ends = [0, *sorted(draw.sample(range(1, 10), 4)), 10]
    rows.add(tuple("1234567890"[a:b] for a, b in zip(ends, ends[1:])))
table = sorted(rows)
grams = [tuple(words[at : at + 5]) for words in [[word for row in table for word in row]] for at in range(len(words) - 4)]
judge = GopherRepetitionFilter(language=Split())
plain = judge.filter(Document(text="\n".join(" ".join(row) for row in table), id="table"))
marked = judge.filter(Document(text="\n".join(" ".join(f"n{word}" for word in row) for row in table), id="marked"))
print(f"seen: {len(table)} different rows, {len(grams)} n-grams of 5 words, {len(set(grams))} of them different")
print(f"seen: the table is kept: {plain}")
print(f"seen: with a letter before each number it is kept: {marked}")
assert len(set(grams)) == len(grams)
assert plain == (False, "duplicated_5_n_grams")
assert marked is True
PY
