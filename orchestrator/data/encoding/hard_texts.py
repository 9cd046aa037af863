"""Texts on which tokenizer engines are known to differ, for the first comparison of an engine with the reference."""

from __future__ import annotations

import random
from collections.abc import Sequence

TEXTS = (
    "",
    " ",
    "\n",
    "\0",
    "a\0b",
    "\ufeffmark",
    "\r\n\r\n\n\r\r",
    "\t\tx = 1\n\n\n  y  \n \n",
    "\u2028\u2029\u0085\u000b\u000c\u00a0\u3000\u200b",
    "I'm you're we'll it's I'D 'S ''''",
    "1234567890 12 3,456.78 1e-9 ½ ٣٤٥ Ⅷ ²",
    "😀😀 👨‍👩‍👧‍👦 family \u200d\u200d 🇩🇪🇫🇷 ✈\ufe0f",
    "مرحبا بالعالم, שלום עולם \u202eright\u202c",
    "日本語のテキスト 中文。한국어 ก็ภาษาไทย हिन्दी",
    "é e\u0301 ﬁ Å A\u030a ß ẞ İ \u0131 Σς \u0344 \U0001d49c\U0001d4eb\U0001d4ec …—“”\u2018\u2019",
    "\U0010ffff\ue000\ufdd0\U000e0001",
    "a" * 1000,
    " " * 1000,
    "\n" * 1000,
    "7" * 1000,
    "😀" * 200,
    "ab" * 500,
    " \n" * 300,
    "'s" * 300,
    "<|endoftext|><|endoftext|> x <|im_start|>system</s><s>[INST] <0x0A> ▁ ## Ġ Ċ",
)
MIXTURES = 150
"""Number of random mixtures of the texts' characters."""


def hard_texts(added: Sequence[str]) -> list[str]:
    """Return the texts, random mixtures of their characters, random Unicode, and each of the `added` tokens in several
    contexts.
    """
    draw = random.Random(0)
    pool = [
        *"".join(text[:80] for text in TEXTS),
        *'the quick brown fox 0123 .,;:!?()[]{}_-+=/\\"',
        *added[:200],
    ]
    mixtures = ["".join(draw.choices(pool, k=draw.randint(1, 60))) for _ in range(MIXTURES)]
    anywhere = [
        "".join(chr(draw.choice((draw.randrange(0x250), draw.randrange(0xD800), draw.randrange(0xE000, 0x110000))))
                for _ in range(40))
        for _ in range(MIXTURES)
    ]  # fmt: skip
    around = [form.format(token) for token in added for form in ("{0}", "a {0} b", "a{0}{0}b", " {0}\n")]
    return [*TEXTS, *mixtures, *anywhere, *around]
