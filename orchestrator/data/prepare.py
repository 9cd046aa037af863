"""Raw sources to token shards, with Ray Data.

    <cache>/<fingerprint>/
      tokenizer.json
      shards/000000.bin      token ids of one part, little-endian; each document ends with eos
      shards/000000.ends     where its documents end
      records/000000.json    what the shard holds and its checksum, written after it
      manifest.json          written last

The fingerprint covers the content of the sources, the tokenizer and the format, so the same text is the same
data wherever it lies. A killed preparation goes on where it was: a part that has a record is not done again. What is
missing of finished data, or was put aside because it is damaged, is made again and must come out the same.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import ray
import ray.data
import xxhash

from orchestrator.data import manifest, shards, sources, tokenizer
from orchestrator.data.documents import LINE_BYTES
from orchestrator.data.files import Folder
from orchestrator.data.quiet_logging import hushed
from orchestrator.data.sources import Part, SourceFile
from orchestrator.job.errors import InputError, Unreachable
from orchestrator.job.spec import DataSpec, TrainBpe
from orchestrator.storage.retry import storage_failed, transient

Progress = Callable[[str, int, int], None]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

SAMPLE_BYTES = 64 * 2**20
"""Text that a tokenizer is trained on at most, spread evenly over all parts."""


def prepare(
    data: DataSpec,
    objective_special_tokens: tuple[str, ...],
    cache: str,
    progress: Progress | None = None,
    *,
    part_bytes: int | None = None,
    before: str = "",
) -> str:
    """Make the token shards of `data` in `cache` unless they are there; the URI of the prepared data.

    Ray must be initialised, and its nodes must see the sources and the cache. Needs one free CPU, takes
    no more than are free, one a task, and holds none afterwards. `progress(phase, done, total)` counts
    parts in the phases "tokenizer" and "tokens". With `before`, the fingerprint of data that a run began with, it is
    that data, in the format that it had. Raises InputError for sources or a tokenizer that cannot be used, for a cache
    that cannot be written, and if nothing that `data` names has the fingerprint `before`.
    """
    files = sources.resolve(data.sources)
    if not any(file.size for file in files):
        raise InputError("all files are empty", "data.sources", "give files with text")
    if isinstance(data.tokenizer, TrainBpe):
        tokenizer.check_size(data.tokenizer.train_bpe, objective_special_tokens)
        chosen: Any = [data.tokenizer.train_bpe, tokenizer.all_special(objective_special_tokens)]
    else:
        chosen = tokenizer.load(data.tokenizer, objective_special_tokens)
    part_bytes = part_bytes or sources.part_size(files)
    rule, name = _named(files, chosen, part_bytes, before)
    folder = Folder(f"{Folder(cache).uri}/{name}")
    try:
        folder.remove_old_drafts()
        if not shards.is_whole(folder):
            _make(
                folder, data, files, chosen, part_bytes, rule, progress or (lambda phase, done, total: None)
            )
    except Exception as error:
        if isinstance(error, InputError) or not storage_failed(error):
            raise
        reason, place = (
            getattr(error, "strerror", None) or error,
            getattr(error, "filename", None) or folder.uri,
        )
        if transient(error):
            raise Unreachable(
                f"does not answer ({reason})", str(place), "check address and network"
            ) from None
        hint = "make room or name another data.cache; the same command goes on"
        raise InputError(f"cannot be written ({reason})", str(place), hint) from None
    return folder.uri


def _named(files: Sequence[SourceFile], chosen: Any, part_bytes: int, before: str) -> tuple[int, str]:
    """Format and fingerprint of the data: of now, or that of `before`. Raises InputError if there is none."""
    names = {rule: _fingerprint(files, chosen, part_bytes, rule) for rule in manifest.FORMATS}
    if not before:
        return manifest.FORMAT, names[manifest.FORMAT]
    for rule, name in names.items():
        if name == before:
            return rule, name
    hint = "put the files back as they were, or start another run"
    raise InputError(
        "the text has changed since the run began, and its token shards are gone", "data.sources", hint
    )


def _make(
    folder: Folder,
    data: DataSpec,
    files: Sequence[SourceFile],
    chosen: Any,
    part_bytes: int,
    rule: int,
    tell: Progress,
) -> None:
    """Make what is missing of the data in `folder`, and its manifest last."""
    try:
        finished = manifest.read(folder)
    except manifest.DamagedManifest:
        finished = None
    parts = sources.cut(files, part_bytes)
    tell("tokenizer", 0, 1)
    vocabulary, roles = _tokenizer(folder, data, chosen, parts, rule)
    tell("tokenizer", 1, 1)
    _refuse_pairs_without_separator(files, roles)
    _tokenise(folder, parts, vocabulary, roles, rule, tell)
    name = folder.uri.rsplit("/", 1)[-1]
    found = shards.gather(folder, name, [s.uri for s in data.sources], parts, vocabulary, roles, rule)
    if finished is None:
        manifest.write(folder, found)
    elif not finished.same(found):
        what = "what was missing cannot be made again as it was: the tokenizer's library is another"
        raise InputError(what, folder.uri, "install the version that it was made with, or start another run")


def _refuse_pairs_without_separator(files: Sequence[SourceFile], roles: dict[str, int]) -> None:
    paired = next((file for file in files if len(file.fields) > 1), None)
    if paired and "sep" not in roles:
        hint = "use a tokenizer with a separator, or train one"
        raise InputError("holds pairs, and the tokenizer has no separator token", paired.uri, hint)


def _fingerprint(
    files: Sequence[SourceFile], tokenizer_: Any, part_bytes: int, rule: int = manifest.FORMAT
) -> str:
    """xxh3_128 of all that decides the shards' bytes; where the files lie does not."""
    content = [{k: v for k, v in asdict(file).items() if k not in ("uri", "sums")} for file in files]
    whole = json.dumps([rule, part_bytes, tokenizer_, content], sort_keys=True)
    return xxhash.xxh3_128_hexdigest(whole.encode())


def _tokenizer(
    folder: Folder, data: DataSpec, chosen: Any, parts: list[Part], rule: int
) -> tuple[int, dict[str, int]]:
    """Put the tokenizer in its place, trained first if it is to be; the vocabulary's size and the roles."""
    if not isinstance(data.tokenizer, TrainBpe):
        text, roles = chosen
        if folder.read("tokenizer.json") != text.encode():
            folder.write("tokenizer.json", text.encode())
        return tokenizer.size_of(tokenizer.encoder(text)), roles
    if folder.read("tokenizer.json") is None:
        rows = [sources.to_json(part, _reach(rule)) for part in parts]
        _raise(ray.get(_train.remote(folder.uri, rows, chosen[0], chosen[1], rule)))
    text = (folder.read("tokenizer.json") or b"").decode()
    # The size that was asked for, also where the text gave fewer entries: it is the model's, known before.
    return data.tokenizer.train_bpe, tokenizer.roles_of(tokenizer.encoder(text), {})


def _reach(rule: int) -> int | None:
    """Bytes beyond its spans that a task may read."""
    return None if rule == 1 else LINE_BYTES


@ray.remote(num_cpus=1)
def _train(uri: str, parts: list[str], entries: int, special_tokens: list[str], rule: int) -> str:
    texts = shards.sample([sources.from_json(part) for part in parts], SAMPLE_BYTES, rule)
    try:
        Folder(uri).write("tokenizer.json", tokenizer.train(texts, entries, special_tokens).encode())
    except Exception as error:
        return _told(error, uri)
    return ""


def _tokenise(
    folder: Folder, parts: list[Part], vocabulary: int, roles: dict[str, int], rule: int, tell: Progress
) -> None:
    """Write the shards that have no record yet, or of which something is missing."""
    todo = shards.unfinished(folder, len(parts), vocabulary, rule)
    tell("tokens", len(parts) - len(todo), len(parts))
    if not todo:
        return

    def task(row: dict[str, Any]) -> dict[str, Any]:
        try:
            part = sources.from_json(row["part"])
            shards.write_shard(folder_uri, row["number"], part, vocabulary, roles, rule)
        except Exception as error:
            return {"error": _told(error, folder_uri)}
        return {"error": ""}

    folder_uri = folder.uri
    rows = [{"number": n, "part": sources.to_json(parts[n], _reach(rule))} for n in todo]
    free = int(ray.available_resources().get("CPU", 1))
    tasks = ray.data.TaskPoolStrategy(size=max(1, min(free, len(todo))))
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map(task, compute=tasks, num_cpus=1)
    dataset.context.enable_progress_bars = False
    dataset.context.print_on_execution_start = False
    dataset.context.execution_options.preserve_order = True
    with _quiet():
        for done, row in enumerate(dataset.iter_rows(), len(parts) - len(todo) + 1):
            _raise(row["error"])
            tell("tokens", done, len(parts))


def _told(error: Exception, cache: str) -> str:
    """The error as JSON: an exception that crosses from a task would bring Ray's whole trace with it. One that is
    neither of the input nor of storage is raised."""
    if not (isinstance(error, InputError) or storage_failed(error)):
        raise error
    passing = transient(error)
    if isinstance(error, InputError):
        return json.dumps([passing, error.what, error.where, error.hint])
    hint = "keep sources and cache where all nodes see them"
    if getattr(error, "errno", None) in FULL:
        hint = "make room or name another data.cache; the same command goes on"
    reason, place = getattr(error, "strerror", None) or error, getattr(error, "filename", None) or cache
    return json.dumps([passing, f"cannot be used on a worker's node ({reason})", str(place), hint])


def _raise(told: str) -> None:
    """Raise the error that `_told` wrote, if it wrote one: InputError, or Unreachable if it may pass."""
    if told:
        passing, *words = json.loads(told)
        raise (Unreachable if passing else InputError)(*words)


def _quiet() -> AbstractContextManager[None]:
    """Keep Ray Data's account of its own progress out of the terminal; it stays in Ray's log files."""
    handlers = [h for h in logging.getLogger("ray.data").handlers if isinstance(h, logging.StreamHandler)]
    return hushed(handlers, logging.ERROR)
