"""Engines that encode texts: the library `tokenizers`, and the faster `fastokens` where it gives the same ids.

`tokenizers` is the reference: prepared data has its ids, whichever engine made them. A faster engine is compared with
it, first on hard texts (`hard_texts`), then on a share of the text that it encodes. After a difference the engine is no
longer used, and the reference encodes its texts again.

fastokens (Apache-2.0) supports byte-level BPE and refuses everything else. tokie (MIT or Apache-2.0) was tried and is
not used: for byte-level BPE 42 of 3,748 documents got other ids, and for WordPiece most characters that Unicode has not
assigned did.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Any, NamedTuple, Protocol

import numpy as np
from tokenizers import Tokenizer

from orchestrator.data.encoding import tokenizer

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


REFERENCE = "tokenizers"
FAST = "fastokens"
RENEWED = 2**27
"""Number of characters after which fastokens is loaded again, which takes 0.2 s. It caches the words that it has seen,
up to about 260 MiB.
"""


class Encoded(NamedTuple):
    """The ids of several texts.

    Attributes:
        ids: of all texts, concatenated, uint32 [tokens].
        ends: index after each text's last id, int64 [texts].
    """

    ids: np.ndarray
    ends: np.ndarray

    def of(self, number: int) -> np.ndarray:
        """Return the ids of one text."""
        return self.ids[self.ends[number - 1] if number else 0 : self.ends[number]]


class Engine(Protocol):
    """Encodes texts; `name` is the engine's name and version."""

    name: str

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of texts, without special tokens around them.

        The name of a special token in a text is ordinary text, unless the engine parses names; then it is that token.
        """


class ReferenceEngine:
    """The library `tokenizers`, on one thread."""

    def __init__(self, text: str, parse: bool = False) -> None:
        self.name = f"{REFERENCE} {version(REFERENCE)}"
        self._tokenizer: Tokenizer = tokenizer.encoder(text, parse)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """See `Engine`."""
        result = [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        ids = np.fromiter(
            (i for ids_of_text in result for i in ids_of_text), np.uint32, sum(map(len, result))
        )
        return Encoded(ids, np.cumsum([len(ids_of_text) for ids_of_text in result], dtype=np.int64))

    def added_tokens(self) -> list[str]:
        """Return the tokens that were added to the vocabulary."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]


class FastEngine:
    """fastokens on one thread; the reference encodes a text on which it fails.

    Raises ValueError for an unsupported tokenizer, and ImportError if it is not installed.
    """

    def __init__(self, text: str, parse: bool = False) -> None:
        os.environ["RAYON_NUM_THREADS"] = "1"  # a task has one CPU
        self.name = f"{FAST} {version(FAST)}"
        self._text = text
        self._parse = parse
        self._tokenizer: Any = None
        self._renew()

    def encode(self, texts: Sequence[str]) -> Encoded:
        """See `Engine`."""
        self._characters += sum(map(len, texts))
        if self._characters > RENEWED:
            self._renew()
        result = self._try(texts)
        if result is not None:
            return result
        slow = reference(self._text, self._parse)
        singly = [self._try([text]) or slow.encode([text]) for text in texts]
        return Encoded(
            np.concatenate([encoded.ids for encoded in singly]),
            np.cumsum([len(encoded.ids) for encoded in singly]),
        )

    def _renew(self) -> None:
        import fastokens

        self._tokenizer = None  # freed first, so that only one is in memory
        self._tokenizer = fastokens.Tokenizer.from_json_str(self._text)
        self._characters = 0

    def _try(self, texts: Sequence[str]) -> Encoded | None:
        """Return the ids; None if the engine fails."""
        try:
            ids, offsets = self._tokenizer.encode_batch_flat(list(texts), False, not self._parse)
        except BaseException as error:  # a panic in Rust is a BaseException
            if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
                raise
            return None
        return Encoded(np.frombuffer(ids, np.uint32), np.frombuffer(offsets, "<u8")[1:].astype(np.int64))


LONG_ENTRY = 512
"""Maximum length of a vocabulary entry for the faster engine, in characters. It reads longer ones in quadratic time."""


@lru_cache(maxsize=2)
def reference(text: str, parse: bool = False) -> ReferenceEngine:
    """Return the reference for a tokenizer's JSON. Cached, because a process encodes many parts."""
    return ReferenceEngine(text, parse)


@lru_cache(maxsize=2)
def fast(text: str, parse: bool = False) -> Engine | None:
    """Return the faster engine for a tokenizer's JSON; None if it does not support it, or differs on hard texts."""
    vocabulary = json.loads(text)["model"].get("vocab", {})
    entries = vocabulary if isinstance(vocabulary, dict) else [entry[0] for entry in vocabulary]
    if max(map(len, entries), default=0) > LONG_ENTRY:
        return None
    try:
        result = FastEngine(text, parse)
    except ImportError:
        return None
    except Exception:  # it raises its own errors for unsupported tokenizers
        return None
    standard = reference(text, parse)
    texts = hard_texts(standard.added_tokens())
    return result if same(result.encode(texts), standard.encode(texts)) else None


def same(first: Encoded, second: Encoded) -> bool:
    """Return whether the ids of all texts are equal."""
    return np.array_equal(first.ends, second.ends) and np.array_equal(first.ids, second.ids)


class Compared(NamedTuple):
    """The engine of a part, and how much of the part's text was compared with the reference.

    `documents` counts documents, or pieces of long ones; `bytes` is their size.
    """

    name: str
    documents: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return self._asdict()


def add_engine(engines: dict[str, dict[str, int]], record: Mapping[str, Any] | None) -> None:
    """Add a part's `record` to `engines`: by the engine's name, the number of parts, and of compared documents and
    bytes.
    """
    if record is not None:
        totals = engines.setdefault(
            str(record["name"]), {"parts": 0, "compared_documents": 0, "compared_bytes": 0}
        )
        totals["parts"] += 1
        totals["compared_documents"] += int(record["documents"])
        totals["compared_bytes"] += int(record["bytes"])
