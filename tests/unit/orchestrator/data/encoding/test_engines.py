from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from orchestrator.data.encoding import engines, tokenizer, training
from orchestrator.data.encoding.engines import TEXTS, FastEngine, fast, hard_texts, reference, same
from orchestrator.data.encoding.training import train_bytes

WORDS = [f"word{i} of {i * 7} naïve 日本 \n\n  x = '{i}'\t" for i in range(200)]


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Engines are kept by a process; each test loads its own."""
    fast.cache_clear()
    yield
    fast.cache_clear()


@pytest.fixture(scope="module")
def text() -> str:
    return train_bytes(WORDS, 400, ("<extra_id_0>",))


def added(text: str, *tokens: str) -> str:
    found = Tokenizer.from_str(text)
    found.add_tokens(list(tokens))
    return str(found.to_str())


def test_the_reference_reads_the_spelling_of_special_tokens_as_text(text: str) -> None:
    found = reference(text).encode(["a<pad>", "", "b"])
    loaded = tokenizer.encoder(text)
    assert [found.of(n).tolist() for n in range(3)] == [loaded.encode(t).ids for t in ("a<pad>", "", "b")]
    assert loaded.token_to_id("<pad>") not in found.ids


@pytest.mark.parametrize("tokens", [(), ("word1", "  x", "日")])
def test_the_faster_engine_gives_the_ids_of_the_reference(text: str, tokens: tuple[str, ...]) -> None:
    json = added(text, *tokens)
    found = fast(json)
    assert isinstance(found, FastEngine)
    texts = [*WORDS, *hard_texts(["<pad>", *tokens]), "".join(WORDS)]
    assert same(found.encode(texts), reference(json).encode(texts))
    assert same(found.encode([]), reference(json).encode([]))


def test_a_tokenizer_that_the_engine_does_not_know_is_left_to_the_reference() -> None:
    unknown = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    unknown.normalizer, unknown.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    assert fast(str(unknown.to_str())) is None


def test_without_the_extra_the_reference_encodes(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert fast(text) is None


def test_an_engine_that_differs_on_a_hard_text_is_not_used(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = FastEngine.encode

    def wrong(self: FastEngine, texts: Any) -> Any:
        return encode(self, [found.replace("\0", "") for found in texts])

    monkeypatch.setattr(FastEngine, "encode", wrong)
    assert fast(text) is None


class Panic(BaseException):
    """As one of Rust: no Exception."""


def test_a_text_on_which_the_engine_fails_is_encoded_by_the_reference(text: str) -> None:
    class Failing:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def encode_batch_flat(self, texts: list[str], *arguments: Any) -> Any:
            if any("7" in found for found in texts):
                raise Panic("match limit")
            return self._inner.encode_batch_flat(texts, *arguments)

    found = FastEngine(text)
    found._tokenizer = Failing(found._tokenizer)
    assert same(found.encode(WORDS), reference(text).encode(WORDS))


def test_the_words_that_the_engine_keeps_are_given_up_again(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "RENEWED", 3 * max(map(len, WORDS)))
    found = FastEngine(text)
    held = [found._tokenizer]
    for word in WORDS[:20]:
        assert same(found.encode([word]), reference(text).encode([word]))
        held.append(found._tokenizer)  # so that no other is made at its place
    assert 5 <= len(set(map(id, held))) <= 10


def test_an_interrupt_is_not_taken_for_a_failure(text: str) -> None:
    class Interrupted:
        def encode_batch_flat(self, *_: Any) -> Any:
            raise KeyboardInterrupt

    found = FastEngine(text)
    found._tokenizer = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        found.encode(["a"])


def test_hard_texts_are_the_same_every_time_and_hold_all_added_tokens() -> None:
    found = hard_texts(["<a>", "<b>"])
    assert found == hard_texts(["<a>", "<b>"])
    assert set(TEXTS) <= set(found)
    assert {"<a>", "a<b><b>b", " <a>\n"} <= set(found)
    assert "".join(found).encode()  # no half of a surrogate pair


def test_what_was_compared_is_added_up_by_engine() -> None:
    found: dict[str, dict[str, int]] = {}
    for record in (None, engines.Compared("x 1", 2, 30).to_json(), engines.Compared("x 1", 1, 5).to_json()):
        engines.add_engine(found, record)
    assert found == {"x 1": {"parts": 2, "compared_documents": 3, "compared_bytes": 35}}
    assert np.dtype(np.uint32).itemsize == 4


def test_no_token_is_made_of_a_letter_thousands_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faster engine would read such a tokenizer in the square of that length."""
    texts = ["x" * 20_000, *("some words of a text " * 40 for _ in range(30))]
    trained = train_bytes(texts, 600, [])
    assert max(map(len, Tokenizer.from_str(trained).get_vocab())) <= training.LONGEST
    read: list[str] = []
    monkeypatch.setattr(engines, "FastEngine", read.append)
    foreign = Tokenizer(models.BPE({"a": 0, "a" * 1000: 1}, []))
    assert fast(foreign.to_str()) is None
    assert not read
