"""Checks whether transformers' AutoTokenizer reads a folder as its tokenizer.json says.

For some kinds of models AutoTokenizer uses a class with its own way to split text, and ignores the file. Training and
evaluation read the file. A folder that AutoTokenizer reads differently is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from workloads.hf.files.meaning import tokenizer_of_class

FILE = "tokenizer.json"
BY_FILE = "PreTrainedTokenizerFast"
"""The class of transformers that reads the file, whatever the model is."""
FROM_VOCABULARY = 64
"""Number of probes that are made of a tokenizer's own tokens."""
TEXTS = (
    "", " ", "\n", "a", "Tell me, in 3 words: what is a token?\n", "don't  stop\n\n  it's 1234567 (x_1 + 2.5)...",
    "Ünïcödé 東京 and\tmore!?", "  leading, and trailing  ", "\n\n\nnew\r\nlines\r", "tabs\t\tand \t mixed",
    "I'LL We're they'D it'S", "1 12 123 1234 12345 3.14159 1,000,000", "x=y+1; if (a!=b) { return -1; }",
    "def f(x):\n    return x ** 2\n", "<p class=\"a\">&amp;</p>", "https://example.org/a?b=c&d=%20#e", "a.b_c-d/e\\f|g",
    "naïve café", "nai\u0308ve cafe\u0301", "ﬁne ½ ①", "Ελληνικά και русский текст", "العربية עברית", "हिन्दी ไทย",
    "東京都に行きます。中文没有空格", "한국어 텍스트", "🙂👩‍👩‍👧‍👦🇫🇷",
    "“quoted” — and…", "CamelCaseWords ALLCAPS mIxEd",
    "word" * 40, "=" * 70, "a\u00a0b\u200bc\u2028d", "\x00\x07\x1b[0m", "$5.00 50% #1 @you *bold* ~x~",
    "[MASK] <mask> </s>",
    "The end.</s>Begin", "▁Metaspace and Ġbytes",
)  # fmt: skip
"""Texts on which tokenizers differ: case, spaces, digits, contractions, scripts, composed and strange characters."""


def class_to_read(folder: str) -> str:
    """Return the class of transformers to use instead of AutoTokenizer's choice; empty if that choice is right."""
    return "" if is_read(Tokenizer.from_file(str(Path(folder) / FILE)), folder) else BY_FILE


def is_read(tokenizer: Tokenizer, folder: str) -> bool:
    """Return whether AutoTokenizer reads a folder as a tokenizer that encodes all probes, alone and in pairs, as
    `tokenizer` does.
    """
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    loaded = tokenizer_of_class(folder)
    try:
        texts = list(probes(tokenizer))
        return all(
            _encodes_alike(loaded, tokenizer, text, second)
            for text, second in [*((text, None) for text in texts), (texts[4], texts[5])]
        )
    except Exception:  # every class of transformers raises its own errors
        return False


def _encodes_alike(loaded: Any, tokenizer: Tokenizer, text: str, second: str | None) -> bool:
    pair = (text,) if second is None else (text, second)
    encoding: Encoding = tokenizer.encode(*pair)
    return bool(loaded(*pair)["input_ids"] == encoding.ids)


def probes(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield about a hundred texts: those on which tokenizers differ, and runs of this tokenizer's own tokens."""
    yield from TEXTS
    size = tokenizer.get_vocab_size()
    for number in range(FROM_VOCABULARY):
        # Two large primes spread the ids over the vocabulary, the same ones in every process.
        ids = [(number * 7919 + position * 104729) % size for position in range(12)]
        yield tokenizer.decode(ids, skip_special_tokens=False)
