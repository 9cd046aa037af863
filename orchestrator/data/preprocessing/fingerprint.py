"""The fingerprint of prepared data: a checksum of all that determines its tokens, by which it is found again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from orchestrator.data import sources
from orchestrator.data.clean.plan import cleaning_of
from orchestrator.data.encoding import tokenizer, training
from orchestrator.data.prepared import manifest
from orchestrator.data.sources import SourceFile
from orchestrator.job.data import DataSpec
from orchestrator.job.errors import InputError
from orchestrator.job.tokenizer_training import TrainedTokenizer

if TYPE_CHECKING:
    from orchestrator.data.preprocessing.records import RecordKind

SOURCES = "data.sources"


class TextChanged(InputError):
    """The text is not that which a run began with."""


def chosen_tokenizer(data: DataSpec, special_tokens: Sequence[str]) -> Any:
    """What the fingerprint has of the tokenizer: its JSON with the ids of its roles, or the number of entries of one
    that is to be trained, with its special tokens, and its recipe unless that is the byte-level BPE.

    Raises InputError.
    """
    if isinstance(data.tokenizer, TrainedTokenizer):
        recipe = data.tokenizer.recipe
        training.check_size(recipe, special_tokens)
        others = [recipe.to_json()] if recipe.to_json() else []
        return [recipe.vocabulary, tokenizer.all_special(special_tokens), *others]
    return tokenizer.load(data.tokenizer, special_tokens, data.add_tokens)


def check_same_text(
    data: DataSpec, special_tokens: Sequence[str], before: str, kind: RecordKind | None
) -> None:
    """Raise TextChanged if `data` does not have the fingerprint `before` any more, and InputError if it cannot be
    read."""
    files = sources.resolve(data.sources, SOURCES, data.on_error)
    part_bytes = sources.part_size(files)
    cleaning = cleaning_of(data, files, part_bytes)
    chosen = chosen_tokenizer(data, special_tokens)
    format_and_fingerprint(files, chosen, part_bytes, before, kind, cleaning.key if cleaning else "")


def format_and_fingerprint(
    files: Sequence[SourceFile],
    chosen: Any,
    part_bytes: int,
    before: str,
    kind: RecordKind | None,
    clean: str = "",
) -> tuple[int, str]:
    """The current format and the fingerprint of the data in it; or the format in which it has the fingerprint `before`.
    Raises TextChanged if there is none."""
    names = {
        data_format: fingerprint(files, chosen, part_bytes, data_format, kind, clean)
        for data_format in manifest.FORMATS
    }
    if not before:
        newest = manifest.newest_format(kind is not None)
        return newest, names[newest]
    for data_format, name in names.items():
        if name == before:
            return data_format, name
    hint = "put the files back as they were, or start another run"
    raise TextChanged(
        "the text has changed since the run began, and its token shards are gone", SOURCES, hint
    )


def fingerprint(
    files: Sequence[SourceFile],
    chosen: Any,
    part_bytes: int,
    data_format: int | None = None,
    kind: RecordKind | None = None,
    clean: str = "",
) -> str:
    """xxh3_128 of everything that determines the shards' bytes; where the files are does not. `clean` is the key of the
    steps that clean the text, `data_format` the newest if it is not said."""
    data_format = data_format or manifest.newest_format(kind is not None)
    content = [_content(file) for file in files]
    records = [kind.to_json(data_format)] if kind else []
    cleaned = [{"clean": clean}] if clean else []
    whole = json.dumps([data_format, part_bytes, chosen, content, *records, *cleaned], sort_keys=True)
    return xxhash.xxh3_128_hexdigest(whole.encode())


def _content(file: SourceFile) -> dict[str, Any]:
    """What of a file determines its tokens."""
    found = {key: getattr(file, key) for key in ("source", "kind", "size", "content", "field")}
    if file.compression:
        found["compression"] = file.compression
    return {**found, "on_error": file.on_error} if file.on_error != "fail" else found
