"""The properties of a tokenizer that objectives need, derived from the spelling of its entries."""

from __future__ import annotations

import json

import numpy as np
from tokenizers import Tokenizer

from orchestrator.data.store.manifest import DataManifest
from workloads.workload import Frame, Vocabulary

_CLOSING = "\"')]}ĠĊč "
"""Characters that may follow a full stop within an entry: quotes, brackets, and white space in byte-level spelling."""


def vocabulary_of(tokenizer: Tokenizer, manifest: DataManifest) -> Vocabulary:
    """Return the vocabulary of prepared data.

    A token starts a word if it begins with white space, as spelled by byte-level BPE ('Ġ', 'Ċ', ...) or SentencePiece
    ('▁'), or if it is not marked as a continuation ('##', WordPiece). The table is None for a tokenizer that marks
    neither. A token ends a sentence if its text ends with . ! or ?, ignoring closing quotes and brackets. Data of
    format 1 reserves no ids, as in the version that made it.
    """
    entries = [tokenizer.id_to_token(number) or "" for number in range(manifest.vocabulary)]
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    text = np.array([bool(entry) and number not in special for number, entry in enumerate(entries)])
    ends = np.array([entry.rstrip(_CLOSING).endswith((".", "!", "?")) for entry in entries])
    starts = _word_starts(tokenizer, entries)
    roles = manifest.roles
    return Vocabulary(
        size=manifest.vocabulary,
        eos=roles["eos"],
        pad=roles.get("pad"),
        bos=roles.get("bos"),
        cls=roles.get("cls"),
        sep=roles.get("sep"),
        mask=roles.get("mask"),
        sentinels=tuple(manifest.sentinels),
        frame=frame_of(tokenizer),
        source_language=roles.get("source_language"),
        target_language=roles.get("target_language"),
        before=tuple(manifest.frame[0]),
        added=first_added(tokenizer, manifest.vocabulary),
        reserved=frozenset(np.flatnonzero(~text).tolist() if manifest.format > 1 else ()),
        word_start=None if starts is None else starts & text,
        sentence_end=ends & text,
    )


def frame_of(tokenizer: Tokenizer) -> Frame | None:
    """Return the tokens that the tokenizer puts around one text and around two; None if it adds none."""
    if not tokenizer.num_special_tokens_to_add(is_pair=False):
        return None

    def around(text: str, second: str | None = None) -> tuple[list[tuple[int, ...]], int]:
        encoding = tokenizer.encode(text, second)
        parts: list[list[int]] = [[]]
        for number, sequence in zip(encoding.ids, encoding.sequence_ids, strict=True):
            if sequence is None:
                parts[-1].append(number)
            elif len(parts) == sequence + 1:
                parts.append([])
        types = [
            kind
            for kind, sequence in zip(encoding.type_ids, encoding.sequence_ids, strict=True)
            if sequence == 1
        ]
        return [tuple(part) for part in parts], max(types, default=0)

    (before, after), _ = around("a")
    (start, between, end), kind = around("a", "a")
    return Frame((before, after), (start, between, end), bool(kind))


def first_added(tokenizer: Tokenizer, size: int) -> int:
    """Return the smallest id from which on all of `size` entries were added to the tokenizer, or are unused."""
    added = tokenizer.get_added_tokens_decoder()
    while size and (size - 1 in added or tokenizer.id_to_token(size - 1) is None):
        size -= 1
    return size


def _word_starts(tokenizer: Tokenizer, entries: list[str]) -> np.ndarray | None:
    """Return whether each entry starts a word, bool [entries]; None if the tokenizer does not mark words."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    kinds = {d.get("type") for d in [decoder, *decoder.get("decoders", [])]}
    if "WordPiece" in kinds:
        return np.array([not entry.startswith("##") for entry in entries])
    if "ByteLevel" in kinds:
        return np.array([entry.startswith(("Ġ", "Ċ", "ĉ", "č")) for entry in entries])
    if kinds & {"Metaspace", "Replace"}:
        return np.array([entry.startswith("▁") for entry in entries])
    return None
