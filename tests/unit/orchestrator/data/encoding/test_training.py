from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer

from orchestrator.config.errors import InputError
from orchestrator.data.config import DataSpec
from orchestrator.data.encoding import tokenizer, training
from orchestrator.data.encoding.config import TokenizerRecipe
from orchestrator.data.prepare.fingerprint import chosen_tokenizer

TEXTS = [
    f"The cat number {n} sat on the mat {n * n} times; x = '{n}'\n  naïve façade, 日本\n" for n in range(150)
]
UNSEEN = "Hello wörld 12345 Ω 😀\n  x = 'y'\ttab  two"
RECIPES: list[dict[str, Any]] = [
    {"kind": "bpe", "pre_tokenizer": "gpt2", "digits": "single"},
    {"kind": "bpe", "pre_tokenizer": "gpt4"},
    {"kind": "bpe", "pre_tokenizer": "metaspace", "byte_fallback": True, "digits": "triples"},
    {"kind": "wordpiece", "digits": "single"},
    {"kind": "unigram", "byte_fallback": True},
    {"kind": "unigram", "pre_tokenizer": "gpt2"},
]
IN_ANOTHER_PROCESS = """
import json, sys
from orchestrator.data.encoding.training import train
from orchestrator.data.encoding.config import TokenizerRecipe
texts, recipes = json.load(sys.stdin)
print(json.dumps([train(texts, TokenizerRecipe(vocabulary=700, **recipe), ()) for recipe in recipes]))
"""


def trained(special: tuple[str, ...] = (), **recipe: Any) -> str:
    return training.train(TEXTS, TokenizerRecipe(vocabulary=700, **recipe), special)


def test_equal_texts_give_equal_tokenizers_in_every_process() -> None:
    """The other process has another number of threads too: the trainer of unigram models adds up by thread."""
    threads = {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        input=json.dumps([TEXTS, RECIPES]),
        env=os.environ | threads,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [trained(**recipe) for recipe in RECIPES]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: "-".join(map(str, r.values())))
def test_special_tokens_come_first_and_are_text_in_a_text(recipe: dict[str, Any]) -> None:
    found = tokenizer.encoder(trained(("<extra_id_0>",), **recipe))
    assert tokenizer.roles_of(found, {}) == {
        "eos": 0, "pad": 1, "bos": 2, "cls": 3, "sep": 4, "mask": 5, "unk": 6,
    }  # fmt: skip
    assert tokenizer.sentinels(found) == [7]
    assert tokenizer.size_of(found) <= 700
    assert set(found.get_added_tokens_decoder()) == set(range(8))
    assert not {0, 1, 2, 3, 4, 5, 7} & set(found.encode("a <pad> b", add_special_tokens=False).ids)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: "-".join(map(str, r.values())))
def test_all_but_wordpiece_give_back_every_text(recipe: dict[str, Any]) -> None:
    found = tokenizer.encoder(trained(**recipe))
    for text in (UNSEEN, TEXTS[3]):
        ids = found.encode(text, add_special_tokens=False).ids
        assert (found.decode(ids) == text) == (recipe["kind"] != "wordpiece")


@pytest.mark.parametrize(
    ("digits", "expected"), [("single", ["1", "2", "3", "4"]), ("triples", ["123", "4"])]
)
def test_digits_are_divided(digits: str, expected: list[str]) -> None:
    found = Tokenizer.from_str(
        training.train(["1234 123 4 " * 50], TokenizerRecipe(vocabulary=300, digits=digits), ())
    )
    assert found.encode("1234").tokens == expected


def test_characters_without_a_token_are_unknown_unless_they_become_bytes() -> None:
    plain, by_bytes = (
        tokenizer.encoder(trained(kind="bpe", pre_tokenizer="metaspace", byte_fallback=to))
        for to in (False, True)
    )
    assert 6 in plain.encode("Ω").ids
    assert [by_bytes.id_to_token(i) for i in by_bytes.encode("Ω").ids] == ["<0xCE>", "<0xA9>"]


def test_a_vocabulary_that_does_not_hold_what_it_must_is_told() -> None:
    recipe = TokenizerRecipe(kind="unigram", vocabulary=300, byte_fallback=True)
    with pytest.raises(InputError, match="make it at least 519"):
        training.check_size(recipe, ())


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ({"kind": "wordpiece", "pre_tokenizer": "gpt2"}, "pre_tokenizer of wordpiece is bert, not gpt2"),
        ({"byte_fallback": True}, "byte_fallback goes with pre_tokenizer: metaspace, not gpt2"),
        ({"kind": "sentencepiece"}, "'bpe', 'wordpiece' or 'unigram'"),
    ],
)
def test_what_cannot_be_combined_is_refused(recipe: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        TokenizerRecipe(vocabulary=700, **recipe)


def test_the_fingerprint_of_byte_level_bpe_is_that_of_train_bpe() -> None:
    def chosen(**named: Any) -> Any:
        data = DataSpec(sources=[{"uri": "a.txt"}], tokenizer=named, sequence_length=16)
        return chosen_tokenizer(data, ("<extra_id_0>",))

    before = [700, [*tokenizer.STANDARD, "<extra_id_0>"]]
    assert chosen(train_bpe=700) == before
    assert chosen(train={"vocabulary": 700}) == before
    assert chosen(train={"vocabulary": 700, "kind": "bpe", "pre_tokenizer": "gpt2"}) == before
    others = [chosen(train={"vocabulary": 700, **recipe}) for recipe in RECIPES]
    assert len({json.dumps(other) for other in [before, *others]}) == len(RECIPES) + 1
