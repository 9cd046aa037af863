"""A tokenizer with fewer entries that encodes given texts to the same tokens, renumbered."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from orchestrator.config.errors import InputError

KINDS = ("BPE", "WordPiece", "Unigram", "WordLevel")
MARKS = ("##", "▁", "</w>")
"""Prefixes and suffixes of pieces, besides their text."""


@dataclass(frozen=True)
class Reduced:
    """A reduced tokenizer.

    Attributes:
        text: its JSON.
        kept: the ids that are kept of the whole tokenizer, ascending; entry n becomes id n.
    """

    text: str
    kept: tuple[int, ...]

    @property
    def numbers(self) -> dict[int, int]:
        """The new ids by the old ones."""
        return {old: new for new, old in enumerate(self.kept)}


def reduced(text: str, used: Collection[int], where: str, rare: Collection[int] = ()) -> Reduced:
    """Return the tokenizer `text` (a tokenizer.json) with the entries that are needed to encode texts whose tokens are
    `used`, as the whole tokenizer does.

    Texts may have `rare` tokens too. Those are removed, and their characters are kept, so that shorter tokens encode
    them.

    Kept are, besides the used ones, added tokens, those that a post-processor or padding names, bytes, the characters
    that occur in kept pieces, and for BPE everything that merges into a kept piece.

    BPE applies, in each step, the applicable merge of the lowest rank. Every merge of a text whose tokens are used has
    a result within the derivation of one of them. All of these are kept, and no other merge is added, so that the
    lowest rank is the same in every step. WordPiece takes the longest piece, and Unigram the best path: both are used,
    and the rest only becomes fewer. The exceptions are words that WordPiece cannot encode, which fewer pieces may split
    so that it can, and ties and unknown characters of Unigram. `orchestrator.export.vocabulary` compares all texts.

    Raises:
        InputError: the kind of tokenizer is not known.
    """
    document = json.loads(text)
    model = document["model"]
    kind = model.get("type")
    if kind not in KINDS:
        raise InputError(f"is a tokenizer of the kind {kind}, whose entries cannot be removed", where)
    ids = _ids(model)
    added = {token["content"]: token["id"] for token in document.get("added_tokens") or []}
    names = {number: token for token, number in {**ids, **added}.items()}
    kept = {number for number in used if number in names} | set(added.values())
    kept |= {number for vocabulary in _references(document) for number in vocabulary.values()}
    kept |= {ids[token] for token in _indispensable(document, ids)}
    if (unknown := model.get("unk_token")) in ids:
        kept.add(ids[unknown])
    if kind == "Unigram" and model.get("unk_id") is not None:
        kept.add(model["unk_id"])
    kept |= _characters({names[number] for number in kept | {*rare} if number in names}, ids)
    kept = _closed(kept, model, ids, names) if kind == "BPE" else kept
    order = tuple(sorted(kept))
    numbers = {old: new for new, old in enumerate(order)}
    _renumber(document, numbers)
    result = json.dumps(document, ensure_ascii=False)
    vocabulary = Tokenizer.from_str(result).get_vocab()
    if vocabulary != {names[old]: new for old, new in numbers.items()}:
        raise InputError("has entries that do not keep their order when others are removed", where)
    return Reduced(result, order)


def _ids(model: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        return {piece: number for number, (piece, _) in enumerate(vocabulary)}
    return dict(vocabulary)


def _indispensable(document: Mapping[str, Any], ids: Mapping[str, int]) -> Iterator[str]:
    """Yield the entries by which any text is encoded: the bytes, under the names that the tokenizer has for them."""
    if "ByteLevel" in json.dumps([document.get("pre_tokenizer"), document.get("decoder")]):
        yield from (letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter in ids)
    if document["model"].get("byte_fallback"):
        yield from (name for name in (f"<0x{byte:02X}>" for byte in range(256)) if name in ids)


def _characters(pieces: Collection[str], ids: Mapping[str, int]) -> set[int]:
    """Return the entries of a single character that occurs in the pieces."""
    characters = {character for piece in pieces for character in piece}
    return {number for token, number in ids.items() if _bare(token) in characters}


def _bare(token: str) -> str:
    """Return the text of a piece without its marks."""
    for mark in MARKS:
        if len(token) > len(mark):
            token = token.removeprefix(mark).removesuffix(mark)
    return token


def _closed(
    kept: set[int], model: Mapping[str, Any], ids: Mapping[str, int], names: Mapping[int, str]
) -> set[int]:
    """Return the entries with everything that merges into them, by any of the merges that give them."""
    prefix = model.get("continuing_subword_prefix") or ""
    parts: dict[str, list[str]] = {}
    for first, second in _merges(model):
        parts.setdefault(first + second.removeprefix(prefix), []).extend((first, second))
    result = set(kept)
    todo = [names[number] for number in kept]
    while todo:
        for part in parts.get(todo.pop(), ()):
            if part in ids and ids[part] not in result:
                result.add(ids[part])
                todo.append(part)
    return result


def _merges(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for merge in model["merges"]:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        yield first, second


def _renumber(document: dict[str, Any], numbers: Mapping[int, int]) -> None:
    """Remove the entries without a number, and give the others theirs."""
    model = document["model"]
    ids = _ids(model)
    if isinstance(model["vocab"], list):
        model["vocab"] = [piece for number, piece in enumerate(model["vocab"]) if number in numbers]
        if model.get("unk_id") is not None:
            model["unk_id"] = numbers[model["unk_id"]]
    else:
        model["vocab"] = {token: numbers[number] for token, number in ids.items() if number in numbers}
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [
            [first, second]
            for first, second in _merges(model)
            if all(
                ids.get(token) in numbers for token in (first, second, first + second.removeprefix(prefix))
            )
        ]
    for token in document.get("added_tokens") or []:
        token["id"] = numbers[token["id"]]
    for reference in _references(document):
        reference.renumber(numbers)


class _Reference(dict[str, int]):
    """The ids that a part of a tokenizer names, by token; `renumber` replaces them there."""

    def __init__(self, holder: Any, key: Any, ids: Mapping[str, int]) -> None:
        super().__init__(ids)
        self._holder = holder
        self._key = key

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Replace the ids."""
        value = self._holder[self._key]
        new = [numbers[number] for number in value] if isinstance(value, list) else numbers[value]
        self._holder[self._key] = new


def _references(document: Mapping[str, Any]) -> Iterator[_Reference]:
    """Yield where post-processor and padding name tokens by their ids."""
    if padding := document.get("padding"):
        yield _Reference(padding, "pad_id", {padding["pad_token"]: padding["pad_id"]})
    todo = [document.get("post_processor")]
    while todo:
        processor = todo.pop()
        if not processor:
            continue
        todo += processor.get("processors", [])
        for token in (processor.get("special_tokens") or {}).values():
            yield _Reference(token, "ids", dict(zip(token["tokens"], token["ids"], strict=True)))
        for name in ("sep", "cls"):
            if isinstance(pair := processor.get(name), list):
                yield _Reference(pair, 1, {pair[0]: pair[1]})
