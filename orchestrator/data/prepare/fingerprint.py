"""The fingerprint of prepared data: a checksum of everything that determines its tokens. Prepared data is found by
it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.clean.plan import cleaning_of
from orchestrator.data.config import DataSpec
from orchestrator.data.encoding import tokenizer, training
from orchestrator.data.encoding.config import TrainedTokenizer
from orchestrator.data.encoding.framing import UNFRAMED, Framing
from orchestrator.data.sources import SourceFile
from orchestrator.data.store import manifest

if TYPE_CHECKING:
    from orchestrator.data.prepare.records import RecordKind

SOURCES = "data.sources"


class TextChanged(InputError):
    """The training text is not the text that the run began with."""


KindOf = Callable[[int], "RecordKind | None"]
"""Returns how rows become records in prepared data of a given format; None for plain text."""


class TokenizerInputs(NamedTuple):
    """Everything besides the text that determines the tokens of prepared data; see `fingerprint`."""

    chosen: Any
    kind: RecordKind | None
    framing: Framing


def no_kind(data_format: int) -> RecordKind | None:
    """The `KindOf` of plain text: no records."""
    return None


def given_in(
    data_format: int, data: DataSpec, choose: Callable[[int], Any], kind_of: KindOf, framed: bool
) -> TokenizerInputs:
    """Return what determines the tokens of `data` in a format, with the tokenizer that `choose` returns for that
    format.
    """
    chosen = choose(data_format)
    framing = UNFRAMED
    if data_format > 5:
        parsed = data.special_tokens == "parse"
        if isinstance(chosen[0], str):
            framing = Framing.of(chosen[0], chosen[1]["eos"], framed, parsed)
        else:
            framing = Framing(parsed=parsed)
    return TokenizerInputs(chosen, kind_of(data_format), framing)


def chosen_tokenizer(
    data: DataSpec,
    special_tokens: Sequence[str],
    data_format: int = manifest.FORMAT,
    existing: tuple[str, dict[str, int]] | None = None,
) -> Any:
    """Return the tokenizer's part of the fingerprint, as prepared data of `data_format` reads it.

    It is the `existing` one, of other prepared data, if there is any.

    For a given tokenizer: its JSON and the ids of its roles. For one that is still to be trained: its vocabulary
    size, its special tokens, and its recipe unless that is the byte-level BPE.

    Raises InputError.
    """
    if existing:
        return existing
    if isinstance(data.tokenizer, TrainedTokenizer):
        recipe = data.tokenizer.recipe
        training.check_size(recipe, special_tokens)
        recipe_part = [recipe.to_json()] if recipe.to_json() else []
        return [recipe.vocabulary, tokenizer.all_special(special_tokens), *recipe_part]
    return tokenizer.load(data.tokenizer, special_tokens, data.add_tokens, data_format)


def check_same_text(
    data: DataSpec, special_tokens: Sequence[str], before: str, kind_of: KindOf, framed: bool
) -> None:
    """Raise TextChanged if `data` no longer has the fingerprint `before`, and InputError if it cannot be read."""
    files = sources.resolve(data.sources, SOURCES, data.on_error)
    part_bytes = sources.part_size(files)
    cleaning = cleaning_of(data, files, part_bytes)
    choose = partial(chosen_tokenizer, data, special_tokens)
    inputs_in_format = partial(given_in, data=data, choose=choose, kind_of=kind_of, framed=framed)
    format_and_fingerprint(files, inputs_in_format, part_bytes, before, cleaning.key if cleaning else "")


def format_and_fingerprint(
    files: Sequence[SourceFile],
    inputs_in_format: Callable[[int], TokenizerInputs],
    part_bytes: int,
    before: str,
    clean: str = "",
    wanted: int = 0,
) -> tuple[int, str, TokenizerInputs]:
    """Return the format, the fingerprint in it, and what else determines the tokens.

    Without `before` this is the format `wanted`, or the current one. With `before` it is the format in which the data
    has that fingerprint. Raises TextChanged if no format matches.
    """
    refused = None
    for data_format in (wanted,) if wanted and not before else reversed(manifest.FORMATS):
        try:
            inputs = inputs_in_format(data_format)
        except InputError as error:  # an earlier or later format may accept the tokenizer
            if not before:
                raise
            refused = error if data_format == manifest.FORMATS[-1] else refused
            continue
        chosen, kind, framing = inputs
        name = fingerprint(
            files,
            chosen,
            part_bytes=part_bytes,
            data_format=data_format,
            kind=kind,
            clean=clean,
            framing=framing,
        )
        is_new = data_format == (wanted or manifest.newest_format(kind is not None))
        if name == before or (not before and is_new):
            return data_format, name, inputs
    if refused is not None:
        raise refused
    hint = "restore the text or start a new run"
    raise TextChanged(
        "the training text changed after the run began, and the prepared shards are gone", SOURCES, hint
    )


def fingerprint(
    files: Sequence[SourceFile],
    chosen: Any,
    part_bytes: int,
    data_format: int | None = None,
    kind: RecordKind | None = None,
    clean: str = "",
    framing: Framing = UNFRAMED,
) -> str:
    """Return the xxh3_128 hash of everything that determines the shards' bytes. The location of the files does not
    count.

    Args:
        files: the source files.
        chosen: the tokenizer's part, see `chosen_tokenizer`.
        part_bytes: size of a part.
        data_format: format of the prepared data; the newest one if None.
        kind: how rows become records; None for plain text.
        clean: key of the steps that clean the text.
        framing: the special tokens around each text.
    """
    data_format = data_format or manifest.newest_format(kind is not None)
    content = [_content(file, data_format) for file in files]
    records = [kind.to_json(data_format)] if kind else []
    cleaned = [{"clean": clean}] if clean else []
    framed = [framing.to_json()] if framing.to_json() else []
    serialized = json.dumps(
        [data_format, part_bytes, chosen, content, *records, *cleaned, *framed], sort_keys=True
    )
    return xxhash.xxh3_128_hexdigest(serialized.encode())


def _content(file: SourceFile, data_format: int) -> dict[str, Any]:
    """Return the properties of a file that determine its tokens."""
    fields = {key: getattr(file, key) for key in ("source", "kind", "size", "content", "field")}
    if file.compression:
        fields["compression"] = file.compression
    if data_format > 5:
        fields |= {key: value for key in ("folders", "labels") if (value := getattr(file, key))}
    return {**fields, "on_error": file.on_error} if file.on_error != "fail" else fields
