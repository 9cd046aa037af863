"""A pretrained folder without the tokens that a job's data never uses: its tokenizer, tables and configuration."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from orchestrator.config.errors import InputError
from orchestrator.data.encoding.auto_tokenizer import FILE
from orchestrator.data.encoding.reduced import Reduced, reduced
from orchestrator.data.prepare.chat_template import MORE_TEMPLATES
from orchestrator.data.prepare.shards import read_record
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.tokens import Tokens
from orchestrator.export.target import MARK as EXPORTED
from orchestrator.export.target import new_folder
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.resolve.resolved_job import wrong_input
from workloads.hf.export.fewer_rows import named_tokens, stored_parameters, write_fewer_rows
from workloads.hf.files.hf_config import FOLDER, root
from workloads.record_format import CLOSE, MARK

SETTINGS = "tokenizer_config.json"
BESIDE = ("special_tokens_map.json", "chat_template.jinja", "chat_template.json")
"""Files of a tokenizer that name no ids and are copied unchanged."""
VOCABULARY = "vocabulary"
"""The key of export.json with what `without_unused_tokens` returns."""
WRITTEN = "written"
"""The key with the unix time at which it was written."""
AT_ONCE = 2**22
"""Words of prepared data that are compared at once."""


def without_unused_tokens(
    model: str,
    tokenizer: object,
    data: PreparedData,
    target: str,
    prepare: Callable[[str], PreparedData],
    at_least: int = 1,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a pretrained model and its tokenizer to `target`, with only the tokens that the data of a job uses.

    The data is prepared with the smaller tokenizer too. If all used tokens are kept, every word of it is compared, and
    nothing is written if an id stands for another token than before. If rare ones are removed, shorter tokens stand for
    them, and the lengths and unknown tokens of the data are compared.

    Args:
        model: the job's workload.model.
        tokenizer: its data.tokenizer, which must be that of the model's folder.
        data: its prepared data, held-out sets included.
        target: the local folder to make.
        prepare: prepares the data of the job with the model and the tokenizer of another folder.
        at_least: how often the data must use a token for it to be kept.
        more: what export.json of the folder says besides.

    Returns:
        {"uri", "tokens", "tokens_before", "parameters", "parameters_before", "length", "length_before", "unknown",
        "unknown_before"}: the last four count tokens of the prepared data.

    Raises:
        InputError: the job's model is in no folder or has another tokenizer, or the tokenizer's entries cannot be
            removed.
    """
    folder = _folder_of(model, tokenizer)
    text = (Path(folder) / FILE).read_text()
    uris = [data.uri, *data.sets.values()]
    special = set().union(*(Tokens.open(uri).manifest.roles.values() for uri in uris)) | named_tokens(folder)
    before = sum(map(_token_counts, uris), Counter())
    rare = {number for number, count in before.items() if count < at_least} - special
    smaller = reduced(text, {*before, *special} - rare, f"data.tokenizer {folder}", rare)
    with new_folder(target) as made:
        with wrong_input("workload.model"):
            write_fewer_rows(folder, smaller.kept, made)
        _write_tokenizer(folder, smaller, made)
        again = prepare(made)
        uris_again = [again.uri, *again.sets.values()]
        for ours, theirs in zip(uris, uris_again, strict=True) if not rare else ():
            _check_same_tokens(ours, theirs)
        after = sum(map(_token_counts, uris_again), Counter())
        counts = {
            "uri": target,
            "tokens": len(smaller.kept),
            "tokens_before": Tokenizer.from_str(text).get_vocab_size(),
            "parameters": stored_parameters(made),
            "parameters_before": stored_parameters(folder),
            "length": after.total(),
            "length_before": before.total(),
            "unknown": _unknown(smaller.text, after),
            "unknown_before": _unknown(text, before),
        }
        _write_mark(folder, {VOCABULARY: counts, WRITTEN: time.time(), **(more or {})}, made)
    return counts


def _write_mark(folder: str, facts: Mapping[str, Any], made: str) -> None:
    """Write export.json. It says how the model is evaluated, if the folder that it was made of does."""
    kept = {}
    with contextlib.suppress(OSError, ValueError):
        source = json.loads((Path(folder) / EXPORTED).read_text())
        kept = {key: source[key] for key in ("step", "evaluation") if key in source}
    files = sorted([*os.listdir(made), EXPORTED])
    (Path(made) / EXPORTED).write_text(json.dumps({**kept, **facts, "files": files}, indent=2) + "\n")


def _folder_of(model: str, tokenizer: object) -> str:
    """Return the local folder of a job's model, which must also hold its tokenizer."""
    if not model.startswith(FOLDER):
        raise InputError(
            f"{model} has no tokenizer", "workload.model", "name a pretrained model by hf:<folder>"
        )
    folder = str(root(model.removeprefix(FOLDER)))
    if not isinstance(tokenizer, str) or Path(tokenizer).resolve() not in (
        Path(folder).resolve(),
        (Path(folder) / FILE).resolve(),
    ):
        raise InputError("the tokenizer is not the model's", "data.tokenizer", f"set it to {folder}")
    if not (Path(folder) / FILE).is_file():
        raise InputError(
            f"has no {FILE}", f"workload.model {folder}", "save it by AutoTokenizer's save_pretrained"
        )
    return folder


def _unknown(text: str, counts: Counter[int]) -> int:
    """Return how often the unknown token of a tokenizer occurs; 0 if it has none."""
    model = json.loads(text)["model"]
    named = model.get("unk_token")
    number = model.get("unk_id") if named is None else Tokenizer.from_str(text).token_to_id(named)
    return 0 if number is None else counts[number]


def _token_counts(uri: str) -> Counter[int]:
    """Return how often each token occurs in prepared data, by id.

    The shards' records count tokens; numbers beside them (labels, lengths) do not count. Without its record, every
    word of a shard counts.
    """
    tokens = Tokens.open(uri)
    result: Counter[int] = Counter()
    folder = DataFolder(uri)
    for number, source in enumerate(tokens.manifest.sources):
        records = [
            read_record(folder, int(Path(shard.file).stem), tokens.manifest.format) for shard in source.shards
        ]
        if all(record is not None for record in records):
            for record in records:
                assert record is not None
                counts = np.asarray(record["counts"])
                result.update({int(token): int(counts[token]) for token in np.flatnonzero(counts)})
            continue
        for words in _windows(tokens, number):
            token_ids, counts = np.unique(words & ~np.int64(MARK | CLOSE), return_counts=True)
            result.update(dict(zip(token_ids.tolist(), counts.tolist(), strict=True)))
    return result


def _windows(tokens: Tokens, source: int) -> Iterator[np.ndarray]:
    """Yield the words of a source, int64, some at a time."""
    length = tokens.length(source)
    for start in range(0, length, AT_ONCE):
        yield tokens.window(source, start, min(AT_ONCE, length - start)).astype(np.int64)


def _check_same_tokens(before: str, after: str) -> None:
    """Raise InputError if a word of prepared data is another token in the data of the smaller tokenizer."""
    old, new = Tokens.open(before), Tokens.open(after)
    names = new.tokenizer().get_vocab()
    entries = old.tokenizer().get_vocab()
    numbers = np.full(max(entries.values()) + 1, -1, dtype=np.int64)
    for token, number in entries.items():
        numbers[number] = names.get(token, -1)
    records = bool(old.manifest.records)
    for source in range(old.sources):
        same = old.length(source) == new.length(source)
        for ours, theirs in zip(_windows(old, source), _windows(new, source), strict=True) if same else ():
            flags = ours & np.int64(MARK | CLOSE)
            token = ours ^ flags
            mapped = numbers[np.minimum(token, len(numbers) - 1)] | flags
            # Records have labels and lengths between their tokens; these are not renumbered.
            same &= bool(((theirs == mapped) | (records & (theirs == ours))).all())
        if not same:
            raise InputError(
                "some texts would have other tokens with the smaller tokenizer",
                f"data.tokenizer of {before}",
                "keep the whole tokenizer",
            )


def _write_tokenizer(folder: str, smaller: Reduced, target: str) -> None:
    """Write the tokenizer, with its settings and templates."""
    made = Path(target)
    (made / FILE).write_text(smaller.text)
    for name in BESIDE:
        if (path := Path(folder) / name).is_file():
            (made / name).write_bytes(path.read_bytes())
    for path in sorted((Path(folder) / MORE_TEMPLATES).glob("*.jinja")):
        (made / MORE_TEMPLATES).mkdir(exist_ok=True)
        (made / MORE_TEMPLATES / path.name).write_bytes(path.read_bytes())
    settings = Path(folder) / SETTINGS
    if settings.is_file():
        document = json.loads(settings.read_text())
        numbers = smaller.numbers
        if added := document.get("added_tokens_decoder"):
            document["added_tokens_decoder"] = {
                str(numbers[int(number)]): token for number, token in added.items() if int(number) in numbers
            }
        (made / SETTINGS).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
