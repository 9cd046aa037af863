"""Captions as token ids: by a tokenizer.json, or as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from orchestrator.config.errors import InputError
from orchestrator.data.images.inputs import byte_tokenizer
from orchestrator.data.images.parts import Encoder
from orchestrator.data.store.data_folder import DataFolder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = "bytes"
"""The tokenizer that needs no file: UTF-8 bytes, 256 before and 257 after them."""
FILE = "tokenizer.json"
HINT = "give a tokenizer.json, or bytes"


class Captions:
    """What makes token ids of captions; its file is named by the key `where` of a job."""

    def __init__(self, tokenizer: str, tokens: int, where: str) -> None:
        self._name, self._tokens, self._where = tokenizer, tokens, where

    def file(self) -> bytes | None:
        """The tokenizer's file, None for bytes and without captions. Raises InputError."""
        if self._name == BYTES or not self._tokens:
            return None
        try:
            return Path(self._name).read_bytes()
        except OSError as error:
            raise InputError(f"{self._name} cannot be read ({error.strerror})", self._where, HINT) from None

    def tokenizer(self, prepared: str = "") -> Tokenizer | None:
        """The tokenizer, None without captions; that of what was `prepared`, if it is given. Raises InputError."""
        from tokenizers import Tokenizer

        if not self._tokens:
            return None
        if self._name == BYTES:
            return byte_tokenizer()
        text = (DataFolder(prepared).read(FILE) if prepared else None) or self.file() or b""
        try:
            found = Tokenizer.from_buffer(text)
        except Exception as error:  # tokenizers raises a plain Exception
            raise InputError(f"{self._name} cannot be read ({error})", self._where, HINT) from None
        found.no_padding()
        found.no_truncation()
        return found

    def size(self, prepared: str = "") -> int:
        """What all token ids stay below; 0 without captions. Raises InputError."""
        found = self.tokenizer(prepared)
        return 1 + max(found.get_vocab().values(), default=0) if found else 0

    def encoder(self) -> Encoder | None:
        """What makes token ids: cut so that the last one stays, and filled up with that; None without captions. Raises
        InputError."""
        tokenizer = self.tokenizer()
        if tokenizer is None:
            return None
        if self._name == BYTES:
            return partial(byte_tokens, length=self._tokens)

        def encode(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
            found, cut = np.zeros((len(texts), self._tokens), np.int32), np.zeros(len(texts), bool)
            for number, encoding in enumerate(tokenizer.encode_batch(list(texts))):
                ids = encoding.ids or [0]
                found[number] = ids[-1]
                found[number, : min(len(ids), self._tokens - 1)] = ids[: self._tokens - 1]
                cut[number] = len(ids) > self._tokens
            return found, cut

        return encode


def byte_tokens(texts: Sequence[str], length: int) -> tuple[np.ndarray, np.ndarray]:
    """UTF-8 bytes between 256 and 257, which also fills up what is left: int32 [texts, length]; and which are cut."""
    found, cut = np.full((len(texts), length), 257, np.int32), np.zeros(len(texts), bool)
    for number, text in enumerate(texts):
        ids = [256, *text[:length].encode()]
        cut[number] = len(ids) >= length
        found[number, : min(len(ids), length - 1)] = ids[: length - 1]
    return found, cut
