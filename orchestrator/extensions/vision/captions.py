"""Captions as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from orchestrator.config.errors import InputError
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.extensions.vision.inputs import byte_tokenizer
from orchestrator.extensions.vision.parts import Encoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = "bytes"
"""The tokenizer that needs no file: UTF-8 bytes, with 256 before and 257 after them."""


FILE = "tokenizer.json"


HINT = "give a tokenizer.json, or bytes"


class Captions:
    """Encodes captions as token ids; the job's key `where` names its tokenizer."""

    def __init__(self, tokenizer: str, tokens: int, where: str) -> None:
        self._name = tokenizer
        self._tokens = tokens
        self._where = where

    def file(self) -> bytes | None:
        """Return the tokenizer's file; None for bytes, and without captions. Raises InputError."""
        if self._name == BYTES or not self._tokens:
            return None
        try:
            return Path(self._name).read_bytes()
        except OSError as error:
            raise InputError(f"{self._name} cannot be read ({error.strerror})", self._where, HINT) from None

    def tokenizer(self, prepared: str = "") -> Tokenizer | None:
        """Return the tokenizer, the one in the folder `prepared` if given; None without captions. Raises InputError."""
        from tokenizers import Tokenizer

        if not self._tokens:
            return None
        if self._name == BYTES:
            return byte_tokenizer()
        text = (DataFolder(prepared).read(FILE) if prepared else None) or self.file() or b""
        try:
            result = Tokenizer.from_buffer(text)
        except Exception as error:  # tokenizers raises a plain Exception
            raise InputError(f"{self._name} cannot be read ({error})", self._where, HINT) from None
        result.no_padding()
        result.no_truncation()
        return result

    def size(self, prepared: str = "") -> int:
        """Return an exclusive upper bound of the token ids; 0 without captions. Raises InputError."""
        result = self.tokenizer(prepared)
        return 1 + max(result.get_vocab().values(), default=0) if result else 0

    def encoder(self) -> Encoder | None:
        """Return the encoder; None without captions. A long caption is cut but keeps its last token, which also pads.

        Raises InputError.
        """
        tokenizer = self.tokenizer()
        if tokenizer is None:
            return None
        if self._name == BYTES:
            return partial(byte_tokens, length=self._tokens)

        def encode(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
            result = np.zeros((len(texts), self._tokens), np.int32)
            cut = np.zeros(len(texts), bool)
            for number, encoding in enumerate(tokenizer.encode_batch(list(texts))):
                ids = encoding.ids or [0]
                result[number] = ids[-1]
                result[number, : min(len(ids), self._tokens - 1)] = ids[: self._tokens - 1]
                cut[number] = len(ids) > self._tokens
            return result, cut

        return encode


def byte_tokens(texts: Sequence[str], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Encode texts as UTF-8 bytes between 256 and 257, padded with 257.

    Returns:
        The ids, int32 [texts, length], and whether each text was cut, bool [texts].
    """
    result = np.full((len(texts), length), 257, np.int32)
    cut = np.zeros(len(texts), bool)
    for number, text in enumerate(texts):
        ids = [256, *text[:length].encode()]
        cut[number] = len(ids) >= length
        result[number, : min(len(ids), length - 1)] = ids[: length - 1]
    return result, cut
