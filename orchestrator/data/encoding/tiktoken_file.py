"""tiktoken's files: one line for each token, with its bytes in base64 and its rank, which is its id.

A file has neither the pattern that splits text nor the special tokens. For OpenAI's encodings the file's name gives
both. For others a JSON file beside it, `<name>.tiktoken.json`, gives `pat_str` and `special_tokens`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from orchestrator.config.errors import InputError
from orchestrator.data.encoding.patterns import ENCODINGS
from orchestrator.data.store.data_folder import DataFolder

SUFFIX = ".tiktoken"
MOST_UNUSED = 100_000
"""Maximum number of unused ids that get a placeholder token."""


def tokenizer_of(folder: DataFolder, name: str, where: str) -> Tokenizer | None:
    """Return the tokenizer of the file `name` in a folder; None if the file is missing. Raises InputError."""
    data = folder.read(name)
    if data is None:
        return None
    pattern, special = _settings(folder, name, where)
    try:
        return convert(ranks_of(data), pattern, special)
    except ValueError as error:
        raise InputError(f"is not a file of tiktoken ({error})", where, "download it again") from None


def _settings(folder: DataFolder, name: str, where: str) -> tuple[str, dict[str, int]]:
    """Return the pattern and the special tokens. Raises InputError."""
    try:
        stored: Any = folder.read_json(f"{name}.json")
        if stored is not None:
            return str(stored["pat_str"]), {str(k): int(v) for k, v in stored["special_tokens"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{name}.json in the same folder lacks pat_str or special_tokens ({error!r})"
        raise InputError(
            problem, where, "give the pattern as text and the special tokens with their ids"
        ) from None
    encoding = ENCODINGS.get(name.removesuffix(SUFFIX))
    if encoding is None:
        hint = f"write both into {name}.json next to it, or name it as one of {', '.join(ENCODINGS)}"
        raise InputError("has a pattern and special tokens that are unknown", where, hint)
    return encoding


def ranks_of(data: bytes) -> dict[bytes, int]:
    """Return the rank of each token of a file. Raises ValueError."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        fields = line.split()
        try:
            if fields:
                ranks[base64.b64decode(fields[0], validate=True)] = int(fields[1])
        except (binascii.Error, ValueError, IndexError):
            raise ValueError(f"line {number}") from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or len(set(ranks.values())) != len(ranks):
        raise ValueError("a rank appears twice" if not missing else f"byte {missing[0]} has no rank")
    return ranks


def convert(ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int]) -> Tokenizer:
    """Return a tokenizer with these ranks as ids.

    BPE merges two tokens whenever their concatenated bytes are a token, the lowest rank first, as tiktoken does. All
    such pairs become merges. Raises ValueError if a special token clashes with a token, or if ordinary text could be
    encoded as one.
    """
    spelled = {data: _spelling(data) for data in ranks}
    merges = []
    for data, rank in ranks.items():
        for cut in range(1, len(data)):
            left = data[:cut]
            right = data[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], left, right))
    merges.sort()
    vocabulary = {spelled[data]: rank for data, rank in ranks.items()}
    if set(special.values()) & set(ranks.values()) or set(special) & set(vocabulary):
        raise ValueError("a special token has the id or the spelling of a token")
    used = {*ranks.values(), *special.values()}
    # no spelling of bytes contains a space, so no text has these tokens; engines need every id
    unused = {f"unused {number}": number for number in range(max(used)) if number not in used}
    model = models.BPE(
        vocab=vocabulary | dict(special) | (unused if len(unused) < MOST_UNUSED else {}),
        merges=[(spelled[left], spelled[right]) for *_, left, right in merges],
        ignore_merges=True,
    )
    tokenizer = Tokenizer(model)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.encode_special_tokens = True
    for token, number in special.items():
        if number in tokenizer.encode(token, add_special_tokens=False).ids:
            raise ValueError(
                f"the pattern does not split {token}, so ordinary text could be encoded as that special token"
            )
    return Tokenizer.from_str(tokenizer.to_str())


def _byte_letters() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary (Radford et al., 2019)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


_LETTERS = _byte_letters()


def _spelling(data: bytes) -> str:
    return "".join(_LETTERS[byte] for byte in data)
