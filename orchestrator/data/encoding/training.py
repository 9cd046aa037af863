"""Training of a tokenizer by a recipe. Equal texts give equal tokenizers.

Except over bytes, the trainers of `tokenizers` number entries in the order of hash tables, which differs between
processes. Characters are therefore numbered here first, and the scores of a unigram model are rounded and sorted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from orchestrator.config.errors import InputError
from orchestrator.data.encoding import tokenizer as byte_level
from orchestrator.data.encoding.config import TokenizerRecipe
from orchestrator.data.encoding.patterns import GPT4

UNKNOWN = "<unk>"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHARACTERS = 6000
"""Maximum number of characters that are tokens; also at most a quarter of the vocabulary."""
SAMPLE_BYTES = {"bpe": 2**26, "wordpiece": 2**26, "unigram": 2**23}
"""Maximum bytes of training text for each kind, taken evenly from all parts. A unigram model takes minutes for more."""
DIGITS = 4
"""Decimal digits of a unigram model's scores. Two trainings differ from the twelfth digit on."""
NEVER = 1000.0
"""How far the score of a special token is below that of any piece in a unigram model."""
LONGEST = 256
"""Maximum characters of a trained token. A text that repeats one letter a thousand times would otherwise yield useless
tokens of every length, which take long to read.
"""


def train(texts: Iterable[str], recipe: TokenizerRecipe, special_tokens: Sequence[str]) -> str:
    """Train a tokenizer, and return its JSON.

    Args:
        texts: the training text.
        recipe: the kind of tokenizer and its options.
        special_tokens: the objective's special tokens, which follow the standard ones.

    Returns:
        The tokenizer. A small text may yield fewer entries than the recipe asks for.

    Raises:
        InputError: if the vocabulary is too small.
    """
    check_size(recipe, special_tokens)
    if not recipe.to_json():
        return train_bytes(texts, recipe.vocabulary, special_tokens)
    special = byte_level.all_special(special_tokens)
    tokenizer = _empty(recipe)
    if recipe.divided_by in ("gpt2", "gpt4"):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        sampled = texts
    else:
        sampled = list(texts)
        limit = min(CHARACTERS, (recipe.vocabulary - _reserved(recipe, special)) // 4)
        alphabet = _characters(sampled, limit, special)
        sampled = _without_others(sampled, set(alphabet), recipe)
    tokenizer.train_from_iterator(sampled, _trainer(recipe, special, alphabet))
    made = json.loads(tokenizer.to_str())
    if recipe.kind == "unigram":
        _round_scores(made["model"], len(special))
    if recipe.kind == "wordpiece":  # `_trainer` passed its characters as special tokens
        made["added_tokens"] = made["added_tokens"][: len(special)]
    if recipe.byte_fallback:
        _add_bytes(made["model"])
    result = Tokenizer.from_str(json.dumps(made))
    if byte_level.size_of(result) > recipe.vocabulary:
        problem = f"{recipe.vocabulary} entries do not hold the characters of the text"
        raise InputError(problem, "data.tokenizer.train.vocabulary", "raise it, or set pre_tokenizer to gpt2")
    return str(result.to_str())


def check_size(recipe: TokenizerRecipe, special_tokens: Sequence[str]) -> None:
    """Raise InputError if a vocabulary is too small for all special tokens and bytes."""
    special = byte_level.all_special(special_tokens)
    if recipe.divided_by in ("gpt2", "gpt4"):
        byte_level.check_size(recipe.vocabulary, special_tokens)
    elif recipe.vocabulary < _reserved(recipe, special) + 256:
        min_size = _reserved(recipe, special) + 256
        problem = f"{recipe.vocabulary} entries are few for {min_size - 256} special tokens and bytes"
        raise InputError(problem, "data.tokenizer.train.vocabulary", f"make it at least {min_size}")


def train_bytes(texts: Iterable[str], entries: int, special_tokens: Sequence[str]) -> str:
    """Train a byte-level BPE tokenizer (Radford et al., 2019, section 2.2) with `entries` entries, and return its JSON.

    A small text may yield fewer entries.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=byte_level.all_special(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=LONGEST,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def _reserved(recipe: TokenizerRecipe, special: Sequence[str]) -> int:
    return len(special) + (len(BYTES) if recipe.byte_fallback else 0)


def _empty(recipe: TokenizerRecipe) -> Tokenizer:
    """Return the tokenizer before training."""
    model = {
        "bpe": lambda: models.BPE(unk_token=UNKNOWN if recipe.divided_by == "metaspace" else None),
        "wordpiece": lambda: models.WordPiece(unk_token=UNKNOWN),
        "unigram": lambda: models.Unigram(),
    }[recipe.kind]()
    tokenizer = Tokenizer(model)
    digits: list[Any] = []
    if recipe.digits == "single":
        digits = [pre_tokenizers.Digits(individual_digits=True)]
    elif recipe.digits == "triples":
        digits = [pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")]
    parts: list[Any]
    decoder: Any
    if recipe.divided_by == "bert":
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
        parts = [pre_tokenizers.BertPreTokenizer()]
        decoder = decoders.WordPiece()
    elif recipe.divided_by == "metaspace":
        parts = [pre_tokenizers.Metaspace(prepend_scheme="never")]
        decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    else:
        gpt4: list[Any] = (
            [pre_tokenizers.Split(Regex(GPT4), "isolated")] if recipe.divided_by == "gpt4" else []
        )
        parts = [*gpt4, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not gpt4)]
        decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([*digits, *parts]) if digits or len(parts) > 1 else parts[0]
    )
    tokenizer.decoder = decoder
    return tokenizer


def _trainer(recipe: TokenizerRecipe, special: list[str], alphabet: list[str]) -> Any:
    options: dict[str, Any] = {
        "vocab_size": recipe.vocabulary - (len(BYTES) if recipe.byte_fallback else 0),
        "special_tokens": special,
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    if recipe.kind == "unigram":
        return trainers.UnigramTrainer(**options, unk_token=UNKNOWN)
    if recipe.kind == "wordpiece":
        options["special_tokens"] = [*special, *alphabet, *(f"##{character}" for character in alphabet)]
        return trainers.WordPieceTrainer(**options, limit_alphabet=len(alphabet))
    return trainers.BpeTrainer(**options, limit_alphabet=max(len(alphabet), 256), max_token_length=LONGEST)


def _characters(texts: Sequence[str], limit: int, special: Sequence[str]) -> list[str]:
    """Return the sign that stands for a space, the characters of the special tokens, and the most frequent others."""
    counts = Counter[str]()
    for text in texts:
        counts.update(text)
    del counts[" "]
    frequent = sorted(counts, key=lambda character: (-counts[character], character))[:limit]
    return list(dict.fromkeys(["▁", *sorted(set("".join(special))), *frequent]))


def _without_others(texts: Sequence[str], alphabet: set[str], recipe: TokenizerRecipe) -> list[str]:
    """Return the texts without characters that get no token. WordPiece's trainer leaves these out itself."""
    if recipe.kind == "wordpiece":
        return list(texts)
    dropped = {ord(character) for text in texts for character in set(text) - alphabet if character != " "}
    return [text.translate(dict.fromkeys(dropped)) for text in texts] if dropped else list(texts)


def _round_scores(model: dict[str, Any], special: int) -> None:
    """Round the scores, and sort the pieces by score and spelling, so that equal texts give equal models.

    Rare characters that are kept anyway get the lowest scores, in a fixed order. Special tokens get a score so low that
    their spelling in a text stays text; the trainer gives them the highest.
    """
    pieces = [(piece, round(score, DIGITS)) for piece, score in model["vocab"][special:]]
    lowest = min((score for _, score in pieces), default=0.0)
    single = [p for p in pieces if len(p[0]) == 1]
    # the trainer numbers them upwards from the lowest, in steps of 0.0001
    rare = sorted(piece for piece, score in single if score <= lowest + (len(single) + 1) / 10**DIGITS)
    low = {piece: round(lowest - (number + 1) / 10**DIGITS, DIGITS) for number, piece in enumerate(rare)}
    settled = sorted(((low.get(piece, score), piece) for piece, score in pieces), key=lambda e: (-e[0], e[1]))
    never = min((score for score, _ in settled), default=0.0) - NEVER
    names = [[piece, never] for piece, _ in model["vocab"][:special]]
    model["vocab"] = [*names, *([piece, score] for score, piece in settled)]


def _add_bytes(model: dict[str, Any]) -> None:
    """Add tokens for all bytes after the model's other tokens."""
    model["byte_fallback"] = True
    if isinstance(model["vocab"], list):
        lowest = min(score for _, score in model["vocab"]) - 10.0
        model["vocab"] += [[byte, lowest] for byte in BYTES]
    else:
        model["vocab"] |= {byte: len(model["vocab"]) + number for number, byte in enumerate(BYTES)}
