"""Loading of a tokenizer, and the roles of its special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Tokenizer

from orchestrator.config.errors import InputError
from orchestrator.data.encoding import sentencepiece_file, tiktoken_file
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import FORMAT
from workloads.hf.files.hf_config import of_the_hub
from workloads.hf.files.meaning import PLAIN_CLASSES, tokens_of_class, tokens_of_files

STANDARD = ("<|endoftext|>", "<pad>", "<bos>", "<cls>", "<sep>", "<mask>", "<unk>")
"""The special tokens of every tokenizer trained here, with ids 0, 1, ... in this order."""

_NAMES: Mapping[str, tuple[str, ...]] = {
    "eos": ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[EOS]", "[SEP]"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
    "bos": ("<bos>", "<s>", "<|begin_of_text|>", "[BOS]"),
    "cls": ("<cls>", "[CLS]"),
    "sep": ("<sep>", "[SEP]"),
    "mask": ("<mask>", "[MASK]"),
    "unk": ("<unk>", "[UNK]"),
}
"""Common tokens of each role, the most common first."""


LANGUAGES = {"source_language": "src_lang", "target_language": "tgt_lang"}
"""The roles of languages, and their names in transformers' tokenizers."""


def all_special(objective: Sequence[str]) -> list[str]:
    """Return the standard special tokens and the objective's, each once."""
    return list(dict.fromkeys([*STANDARD, *objective]))


def check_size(entries: int, special_tokens: Sequence[str]) -> None:
    """Raise InputError if a vocabulary of `entries` is too small for all bytes and special tokens."""
    min_size = 256 + len(all_special(special_tokens))
    if entries < min_size:
        raise InputError(
            f"{entries} entries do not hold the 256 bytes and {min_size - 256} special tokens",
            "data.tokenizer.train_bpe",
            f"make it at least {min_size}",
        )


def load(
    uri: str, special_tokens: Sequence[str], added: Sequence[str] = (), data_format: int = FORMAT
) -> tuple[str, dict[str, int]]:
    """Return the JSON of the tokenizer at `uri`, and the ids of its tokens by role.

    Args:
        uri: a tokenizer.json or its folder, a file of tiktoken, or a model of SentencePiece or its folder.
        special_tokens: those that the objective needs; added unless the tokenizer has a common token of that role.
        added: further tokens to add.
        data_format: format of the prepared data, which determines how the tokenizer is read.

    Raises:
        InputError: if there is no tokenizer, or none of its tokens can end a document.
    """
    where = f"data.tokenizer {uri}"
    folder, name = _file(uri)
    try:
        named = special_tokens_of(uri, data_format)
        if name.endswith(tiktoken_file.SUFFIX):
            made = tiktoken_file.tokenizer_of(folder, name, where)
            text = str(made.to_str()) if made else ""
        elif name.endswith(sentencepiece_file.SUFFIX):
            text = sentencepiece_file.text_of(folder, name, where)
        else:
            text = (folder.read(name) or b"").decode()
        is_special = data_format > 5
        result = _prepared(text, tuple(named.items()), tuple(special_tokens), tuple(added), is_special)
    except InputError:
        raise
    except Exception as error:  # tokenizers raises plain Exception, and every file system its own errors
        raise InputError(f"is not a tokenizer.json that can be read ({error})", where) from None
    if not text:
        hint = "give its path or its folder, or train_bpe: N; AutoTokenizer's save_pretrained writes one"
        raise InputError(
            "there is no tokenizer.json, no file of tiktoken, and no model of SentencePiece",
            where,
            hint + of_the_hub(uri),
        )
    if result is None:
        eos = named.get("eos_token")
        problem = f"its eos_token {eos!r} is not in its vocabulary" if eos else "no token ends a document"
        raise InputError(problem, where, "name eos_token in a tokenizer_config.json next to it")
    if data_format < 6:
        return result[0], dict(result[1])
    config = folder.read_json("tokenizer_config.json") or {}
    return result[0], {**result[1], **languages_of(Tokenizer.from_str(result[0]), config)}


def languages_of(tokenizer: Tokenizer, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids, by role, of the language tokens that a tokenizer_config.json names for source and target.

    Some classes of transformers write the token of a language between underscores.
    """
    result = {}
    for role, key in LANGUAGES.items():
        name = config.get(key)
        names = (name, f"__{name}__") if isinstance(name, str) else ()
        ids = [tokenizer.token_to_id(token) for token in names]
        if existing := [i for i in ids if i is not None]:
            result[role] = existing[0]
    return result


def special_tokens_of(uri: str, data_format: int = FORMAT) -> dict[str, str]:
    """Return the special tokens by name, such as eos_token, as transformers assigns them to the tokenizer at `uri`.

    They come from tokenizer_config.json, special_tokens_map.json and the defaults of the class. Before format 6 they
    come from tokenizer_config.json alone.
    """
    folder, _ = _location(uri)
    config = folder.read_json("tokenizer_config.json") or {}
    if data_format < 6:
        return {f"{role}_token": token for role, token in named_tokens(config).items()}
    named = folder.read_json("special_tokens_map.json") or {}
    result = tokens_of_files(config, named)
    has_model = folder.read("config.json") is not None
    if not folder.local or (config.get("tokenizer_class") in PLAIN_CLASSES and not has_model):
        return result
    by_class = tokens_of_class(folder.uri)
    if by_class is None:
        return result
    written = (folder.read("tokenizer.json") or b"").decode()
    # The defaults of a class may name tokens that this tokenizer lacks.
    return {name: token for name, token in by_class.items() if name in result or _is_in(written, token)}


def _is_in(text: str, token: str) -> bool:
    """Return whether a tokenizer's JSON has a token of that name."""
    return any(json.dumps(token, ensure_ascii=ascii_only) in text for ascii_only in (False, True))


def is_there(uri: str) -> bool:
    """Return whether the file exists that `load` would read. Raises InputError if that cannot be determined."""
    folder, name = _file(uri)
    try:
        return folder.read(name) is not None
    except InputError:
        raise
    except Exception as error:  # every file system raises its own errors
        raise InputError(f"cannot be read ({error})", f"data.tokenizer {uri}") from None


def _location(uri: str) -> tuple[DataFolder, str]:
    """Return the folder and the name of the file that `load` reads."""
    head, _, tail = uri.rpartition("/")
    head = head or ("/" if uri.startswith("/") else ".")
    if tail.endswith((".json", tiktoken_file.SUFFIX, sentencepiece_file.SUFFIX)):
        return DataFolder(head), tail
    return DataFolder(uri), "tokenizer.json"


def _file(uri: str) -> tuple[DataFolder, str]:
    """Return the same, with the model of SentencePiece in a folder that has no tokenizer.json."""
    folder, name = _location(uri)
    if name != "tokenizer.json" or uri.endswith(name):
        return folder, name
    try:
        if folder.read(name) is None:
            name = sentencepiece_file.name_in(folder) or name
    except InputError:
        raise
    except Exception as error:  # every file system raises its own errors
        raise InputError(f"cannot be read ({error})", f"data.tokenizer {uri}") from None
    return folder, name


@lru_cache(maxsize=4)  # a command calls it several times, at a tenth of a second each
def _prepared(
    text: str,
    named: tuple[tuple[str, str], ...],
    special_tokens: tuple[str, ...],
    added: tuple[str, ...],
    is_special: bool,
) -> tuple[str, dict[str, int]] | None:
    """Return the JSON of a tokenizer with the added tokens, and its roles; None if no token ends a document.

    With `is_special`, the `named` tokens become special tokens, as in a tokenizer of transformers.
    """
    if not text:
        return None
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    by_role = {name.removesuffix("_token"): token for name, token in named}
    roles = roles_of(tokenizer, by_role)
    if "eos" not in roles:
        return None
    played = {name for role in roles for name in _NAMES[role]}
    if is_special:
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        existing = [token for _, token in named if tokenizer.token_to_id(token) is not None]
        tokenizer.add_special_tokens([token for token in dict.fromkeys(existing) if token not in special])
    tokenizer.add_special_tokens(
        [t for t in special_tokens if tokenizer.token_to_id(t) is None and t not in played]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    return str(tokenizer.to_str()), roles_of(tokenizer, by_role)


def roles_of(tokenizer: Tokenizer, named: Mapping[str, str]) -> dict[str, int]:
    """Return the ids of the tokens for eos, pad, bos, cls, sep, mask and unk, as far as the tokenizer has them.

    `named` gives the token of a role; for other roles the common tokens are tried.
    """
    result = {}
    for role, usual in _NAMES.items():
        ids = [tokenizer.token_to_id(token) for token in ([named[role]] if role in named else usual)]
        if existing := [i for i in ids if i is not None]:
            result[role] = existing[0]
    return result


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens of roles that a tokenizer_config.json names, as read before format 6."""
    named = {}
    for role in _NAMES:
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            named[role] = token
    return named


def size_in(text: str) -> int:
    """Return the largest id of a tokenizer's JSON plus one."""
    return _size_and_sentinels(text)[0]


def sentinels_in(text: str) -> tuple[int, ...]:
    """Return the ids of all `<extra_id_0>`, `<extra_id_1>`, ... in a tokenizer's JSON."""
    return _size_and_sentinels(text)[1]


@lru_cache(maxsize=4)  # reading a tokenizer takes a tenth of a second
def _size_and_sentinels(text: str) -> tuple[int, tuple[int, ...]]:
    result = encoder(text)
    return size_of(result), tuple(sentinels(result))


def size_of(tokenizer: Tokenizer) -> int:
    """Return the largest id plus one."""
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values())) + 1


def encoder(text: str, parse: bool = False) -> Tokenizer:
    """Return the tokenizer for raw text.

    Names of special tokens are ordinary text; with `parse` they are the tokens.
    """
    tokenizer = Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = not parse
    return tokenizer


def special_names(text: str) -> tuple[str, ...]:
    """Return the special tokens of a tokenizer's JSON, the longest first."""
    added = Tokenizer.from_str(text).get_added_tokens_decoder().values()
    return tuple(sorted((token.content for token in added if token.special), key=len, reverse=True))


def around_text(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that a tokenizer puts before and after a text."""
    for text in ("a", "0", ".", "\n", "\u4e00"):  # a small vocabulary may lack some of these characters
        encoding = tokenizer.encode(text)
        inside = [number for number, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
        if inside:
            return tuple(encoding.ids[: inside[0]]), tuple(encoding.ids[inside[-1] + 1 :])
    return (), ()


def sentinels(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of all existing `<extra_id_0>`, `<extra_id_1>`, ..."""
    ids: list[int] = []
    while (token := tokenizer.token_to_id(f"<extra_id_{len(ids)}>")) is not None:
        ids.append(token)
    return ids
