"""Tokenizers with fewer entries: the same tokens of the texts that count, renumbered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from hf_tokenizers import DOCUMENTS, bert, gpt2, unigram, with_bos
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from orchestrator.config.errors import InputError
from orchestrator.data.encoding.reduced import reduced

OTHERS = [topics[key].strip() for key in sorted(topics)[20:30]] + ["Ünïcödé 東京 🙂"]


def made(folder: Path, make: Callable[[Path], None]) -> str:
    folder.mkdir(exist_ok=True)
    make(folder)
    return (folder / "tokenizer.json").read_text()


@pytest.mark.parametrize("make", [gpt2, bert, unigram, with_bos])
@pytest.mark.parametrize("count", [1, 12])
def test_the_texts_have_the_same_tokens_renumbered(
    tmp_path: Path, make: Callable[[Path], None], count: int
) -> None:
    text = made(tmp_path, make)
    whole = Tokenizer.from_str(text)
    whole.no_truncation()
    texts = DOCUMENTS[:count]
    used = {number for each in texts for number in whole.encode(each).ids}
    found = reduced(text, used, "here")
    small = Tokenizer.from_str(found.text)
    small.no_truncation()
    numbers = found.numbers
    for each in texts:
        for special in (True, False):
            wanted = [numbers[number] for number in whole.encode(each, add_special_tokens=special).ids]
            assert small.encode(each, add_special_tokens=special).ids == wanted
        assert small.encode(each, each).ids == [numbers[number] for number in whole.encode(each, each).ids]
    assert small.get_vocab_size() == len(found.kept)
    assert (
        len(found.kept) < whole.get_vocab_size() or count == 12
    )  # of 400 pieces twelve documents use almost all
    for token, number in small.get_vocab().items():
        assert whole.token_to_id(token) == found.kept[number]


def test_any_text_can_still_be_encoded_by_bytes(tmp_path: Path) -> None:
    text = made(tmp_path, gpt2)
    whole = Tokenizer.from_str(text)
    small = Tokenizer.from_str(reduced(text, set(whole.encode(DOCUMENTS[0]).ids), "here").text)
    for each in OTHERS:
        assert small.decode(small.encode(each).ids) == each
        assert len(small.encode(each).ids) > len(whole.encode(each).ids)


def merging(*merges: tuple[str, str]) -> str:
    letters = "abcd"
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    for first, second in merges:
        vocabulary.setdefault(first + second, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return str(tokenizer.to_str())


def test_what_merges_on_the_way_to_a_used_token_is_kept() -> None:
    """No text ends in ab, cd or abcd's other halves, and without them abcd would be four letters."""
    text = merging(("a", "b"), ("c", "d"), ("ab", "cd"), ("b", "c"))
    whole = Tokenizer.from_str(text)
    assert whole.encode("abcd").tokens == ["abcd"]
    found = reduced(text, set(whole.encode("abcd").ids), "here")
    small = Tokenizer.from_str(found.text)
    assert small.encode("abcd").tokens == ["abcd"]
    assert set(small.get_vocab()) == {"a", "b", "c", "d", "ab", "cd", "abcd"}
    assert len(json.loads(found.text)["model"]["merges"]) == 3


def test_a_token_with_two_derivations_keeps_both() -> None:
    text = merging(("b", "c"), ("a", "bc"), ("a", "b"), ("ab", "c"))
    whole = Tokenizer.from_str(text)
    found = reduced(text, set(whole.encode("abc").ids), "here")
    assert {"bc", "ab"} <= set(Tokenizer.from_str(found.text).get_vocab())


def test_merges_of_pieces_with_a_prefix_are_followed() -> None:
    """As in WordPiece by merges: the second half loses its prefix."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", continuing_subword_prefix="##"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], continuing_subword_prefix="##", show_progress=False
    )
    tokenizer.train_from_iterator(DOCUMENTS, trainer)
    text = str(tokenizer.to_str())
    word = max(tokenizer.encode(DOCUMENTS[0]).tokens, key=len)
    used = {tokenizer.token_to_id(word)}
    small = Tokenizer.from_str(reduced(text, used, "here").text)
    bare = word.removeprefix("##")
    before = [token for token in tokenizer.encode(bare).tokens if token != "<unk>"]
    if word == bare:
        assert small.encode(bare).tokens == before == [word]
    assert small.token_to_id(word) is not None


def test_what_names_tokens_is_renumbered(tmp_path: Path) -> None:
    document: dict[str, Any] = json.loads(made(tmp_path, bert))
    document["padding"] = {
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "[PAD]",
    }  # fmt: skip
    text = json.dumps(document)
    whole = Tokenizer.from_str(text)
    whole.no_truncation()
    found = reduced(text, {whole.token_to_id("the")}, "here")
    small = Tokenizer.from_str(found.text)
    assert small.encode("the").tokens == ["[CLS]", "the", "[SEP]"]
    assert small.padding["pad_id"] == small.token_to_id("[PAD]")
    assert small.token_to_id("[UNK]") is not None


def test_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match="of the kind Own"):
        reduced(json.dumps({"model": {"type": "Own", "vocab": {}}}), set(), "here")
