from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from orchestrator.data.encoding.vocabulary import vocabulary_of
from orchestrator.data.store.manifest import DataManifest

WORDS = ["<eos>", "Ġthe", "cat", "##s", "▁dog", ".", '!"', "Ċ", "?Ċ", "e.g"]
MANIFEST = DataManifest("", "<u2", "tokenizer.json", 12, {"eos": 0}, (), (), 0, 0, 0, 0.0, 0.0)


def made(decoder: object | None) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>"))
    tokenizer.add_special_tokens(["<eos>"])
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


@pytest.mark.parametrize(
    ("decoder", "starts"),
    [
        (decoders.ByteLevel(), ["Ġthe", "Ċ"]),
        (decoders.Metaspace(), ["▁dog"]),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]), ["▁dog"]),
        (decoders.WordPiece(), ["Ġthe", "cat", "▁dog", ".", '!"', "Ċ", "?Ċ", "e.g"]),
    ],
)
def test_word_starts_are_read_from_the_spelling(decoder: object, starts: list[str]) -> None:
    table = vocabulary_of(made(decoder), MANIFEST).word_start
    assert table is not None
    assert [WORDS[i] for i in np.flatnonzero(table)] == starts
    assert len(table) == 12


def test_a_tokenizer_that_marks_no_words_has_no_table_of_them() -> None:
    assert vocabulary_of(made(None), MANIFEST).word_start is None


def test_sentences_end_with_a_stop_and_what_closes_it() -> None:
    table = vocabulary_of(made(decoders.ByteLevel()), MANIFEST).sentence_end
    assert table is not None
    assert [WORDS[i] for i in np.flatnonzero(table)] == [".", '!"', "?Ċ"]
    assert len(table) == 12


def test_roles_come_from_the_manifest() -> None:
    roles = {"eos": 0, "pad": 1, "bos": 2, "cls": 3, "sep": 4, "mask": 5, "unk": 6}
    found = vocabulary_of(made(None), replace(MANIFEST, roles=roles, sentinels=(7, 8)))
    assert (found.size, found.eos, found.pad, found.bos) == (12, 0, 1, 2)
    assert (found.cls, found.sep, found.mask, found.sentinels) == (3, 4, 5, (7, 8))


def test_special_tokens_of_any_name_and_ids_without_an_entry_are_reserved_but_for_runs_that_began_before() -> (
    None
):
    tokenizer = made(None)
    tokenizer.add_special_tokens(["<|reserved_0|>"])
    tokenizer.add_tokens(["dogs"])
    found = replace(MANIFEST, vocabulary=14)
    assert vocabulary_of(tokenizer, found).reserved == {0, 10, 12, 13}
    assert vocabulary_of(tokenizer, replace(found, format=1)).reserved == frozenset()
