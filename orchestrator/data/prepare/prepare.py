"""Preparing data: raw sources to token shards, as Ray tasks.

    <cache>/<fingerprint>/
      tokenizer.json
      shards/000000.bin      token ids of one part, little-endian; each document ends with eos
      shards/000000.ends     the ends of its documents
      records/000000.json    the shard's counts and checksums, written after it
      plan.json              number of parts of each source
      sections/000000.json   streamed data only: the shards of a section, written once all of them exist
      manifest.json          written last

The fingerprint covers the content of the sources, the tokenizer and the format, but not the location of the files. A
killed preparation continues: parts that have a record are not done again. If files of finished data are missing, or
were quarantined as damaged, they are made again and must come out the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from orchestrator.config.errors import Absent, InputError, Unreachable
from orchestrator.data import sources
from orchestrator.data.clean.cleaned_text import CleanedText
from orchestrator.data.clean.config import columns_of_steps
from orchestrator.data.clean.documents import aligned
from orchestrator.data.clean.plan import Cleaning, cleaning_of
from orchestrator.data.clean.totals import TOTALS, totals
from orchestrator.data.config import DataSpec
from orchestrator.data.encoding import tokenizer, training
from orchestrator.data.encoding.config import TokenizerRecipe
from orchestrator.data.encoding.engines import REFERENCE
from orchestrator.data.prepare import rejections, reuse, shards
from orchestrator.data.prepare.fingerprint import (
    SOURCES,
    Given,
    KindOf,
    chosen_tokenizer,
    format_and_fingerprint,
    given_in,
    no_kind,
)
from orchestrator.data.prepare.gather import gather, gather_some
from orchestrator.data.prepare.part_text import sample
from orchestrator.data.prepare.shards import TokenFormat
from orchestrator.data.progress import Progress, silent
from orchestrator.data.samples.sections import published
from orchestrator.data.samples.sections.plan import SectionPlan
from orchestrator.data.samples.sections.publisher import Publisher
from orchestrator.data.sources import Part, SourceFile
from orchestrator.data.sources.identity import part_key
from orchestrator.data.sources.lines import LINE_BYTES
from orchestrator.data.sources.named_columns import check_columns, check_columns_of_steps
from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.node_copies import AGAIN
from orchestrator.data.store.tokens import read_tokenizer
from orchestrator.storage.retry import storage_failed, transient


def prepare(
    data: DataSpec,
    objective_special_tokens: tuple[str, ...],
    cache: str,
    progress: Progress | None = None,
    *,
    part_bytes: int | None = None,
    before: str = "",
    tokenizer_of: str = "",
    where: str = SOURCES,
    kind_of: KindOf = no_kind,
    framed: bool = False,
    make: bool = True,
    begin: bool = False,
    leave: float = 0.0,
    data_format: int = 0,
) -> str:
    """Prepare the token shards of `data` in `cache` unless they exist; return the URI of the prepared data.

    Ray must be initialised, and its nodes must see the sources and the cache. At least one CPU must be free. Each
    task takes one CPU, tasks use only free CPUs, and all CPUs are released afterwards.

    Args:
        data: what to prepare.
        objective_special_tokens: special tokens that the objective needs in the tokenizer.
        cache: folder or URI of all prepared data.
        progress: called with numbers of parts, in the stages "tokenizer" and "tokens", see `Progress`.
        part_bytes: size of a part; derived from the amount of text if None.
        before: fingerprint of the data that a run began with. Prepares exactly that data, in its format.
        tokenizer_of: URI of prepared data whose tokenizer replaces the one that `data` names.
        where: the key of the sources in the job file.
        kind_of: how rows become records in data of a format, for an objective that reads records.
        framed: put the tokenizer's special tokens around each text.
        make: False raises InputError if the data does not exist yet.
        begin: for streamed data, prepare only the first section and those that were published before.
        leave: CPUs to leave for others. If no CPU is free, a single task runs without reserving one.
        data_format: format of new data; 0 for the newest.

    Raises InputError for sources or a tokenizer that cannot be used and for a cache that cannot be written,
    TextChanged if `data` no longer has the fingerprint `before`.
    """
    files = sources.resolve(data.sources, where, data.on_error)
    if not any(file.size for file in files):
        raise InputError("all files are empty", where, "give files with text")
    there = _tokenizer_of(tokenizer_of) if tokenizer_of else None

    def choose(data_format: int) -> Any:
        return there or chosen_tokenizer(data, objective_special_tokens, data_format)

    part_bytes = part_bytes or sources.part_size(files)
    cleaning = cleaning_of(data, files, part_bytes)
    clean_key = cleaning.key if cleaning else ""
    given_in_format = partial(given_in, data=data, choose=choose, kind_of=kind_of, framed=framed)
    data_format, name, given = format_and_fingerprint(
        files, given_in_format, part_bytes, before, clean=clean_key, wanted=data_format
    )
    if cleaning and given.kind:
        raise InputError(
            f"cleans text, and {given.kind.objective} reads records", "data.clean", "leave it out"
        )
    folder = DataFolder(f"{DataFolder(cache).uri}/{name}")
    try:
        folder.remove_old_drafts()
        if not shards.is_complete(folder):
            if not make:
                hint = "make it with `orchestrator data prepare`"
                raise Absent("there is no prepared data", folder.uri, hint)
            preparation = _Preparation(
                data,
                files,
                given=given,
                part_bytes=part_bytes,
                cleaning=cleaning,
                data_format=data_format,
                folder=folder,
                progress=progress or silent,
                where=where,
            )
            preparation.make(begin, leave)
        elif data.shuffle == "sections" and not getattr(
            SectionPlan.read(folder), "bytes", ()
        ):  # made by an earlier version
            parts = sources.cut(files, part_bytes, data_format)
            SectionPlan.of(aligned(parts) if cleaning else parts, len(data.sources)).write(folder)
        rejections.check(data.max_rejected, folder)
    except Exception as error:
        if isinstance(error, InputError) or not storage_failed(error):
            raise
        reason = getattr(error, "strerror", None) or error
        place = getattr(error, "filename", None) or folder.uri
        if transient(error):
            raise Unreachable(
                f"does not answer ({reason})", str(place), "check address and network"
            ) from None
        hint = "free space or set another data.cache, then run the same command again"
        raise InputError(f"cannot be written ({reason})", str(place), hint) from None
    return folder.uri


def _tokenizer_of(uri: str) -> tuple[str, dict[str, int]]:
    """Return the tokenizer of the prepared data at `uri` as JSON, and the ids of its tokens by role. Raises
    InputError and DamagedShard.
    """
    folder = DataFolder(uri)
    if (published_data := published.read(folder)) is None:
        raise InputError("there is no prepared data", uri, AGAIN)
    return read_tokenizer(folder, published_data), published_data.roles


@dataclass(frozen=True)
class _Preparation:
    """One preparation; see `prepare`. `given.chosen` is the tokenizer's JSON with its roles, or the vocabulary size
    of one to train with its special tokens.
    """

    data: DataSpec
    files: Sequence[SourceFile]
    given: Given
    part_bytes: int
    cleaning: Cleaning | None
    data_format: int
    folder: DataFolder
    progress: Progress
    where: str

    @property
    def _uris(self) -> list[str]:
        """The URIs of the sources."""
        return [source.name for source in self.data.sources]

    @property
    def _name(self) -> str:
        """The fingerprint."""
        return self.folder.uri.rsplit("/", 1)[-1]

    def make(self, begin: bool, leave: float) -> None:
        """Make the missing files, the manifest last. With `begin`, make only the first sections."""
        folder = self.folder
        cleaning = self.cleaning
        try:
            finished = manifest.read(folder)
        except manifest.DamagedManifest:
            finished = None
        parts = sources.cut(self.files, self.part_bytes, self.data_format)
        text = None
        if self.data_format > 5:
            kind = self.given.kind
            check_columns(parts, self.where, kind.objective if kind else "")
            check_columns_of_steps(parts, columns_of_steps(self.data.clean) if cleaning else {})
        if cleaning:
            from orchestrator.data.clean.run import clean

            parts = aligned(parts)
            text = clean(cleaning, parts, folder.uri.rsplit("/", 1)[0], self.progress)
            folder.write_json(TOTALS, totals(text, parts, len(self.data.sources)))
        self.progress("tokenizer", 0, 1)
        written = self._tokenizer(parts, text)
        self.progress("tokenizer", 1, 1)
        _refuse_pairs_without_separator(self.files, written.roles)
        plan = SectionPlan.of(parts, len(self.data.sources))
        plan.write(folder)
        publisher = self._publisher(plan, parts, written, begin) if self.data.streaming else None
        given = (folder.read("tokenizer.json") or b"").decode()
        key = reuse.tokens_key(given, written, cleaning.key if cleaning else "")
        keys = [part_key(part) for part in parts]
        there = reuse.there_already(folder, key, keys)
        tasks = _shard_tasks(folder.uri, written, given, self.data.encode_with != REFERENCE, text)
        self._tokenise(parts, written, tasks=tasks, publisher=publisher, there=there, leave=leave)
        if begin:
            return
        gathered = gather(folder, self._name, uris=self._uris, parts=parts, written=written, where=self.where)
        reuse.note(folder, key, keys)
        if finished is None:
            manifest.write(folder, replace(gathered, code=cleaning.code if cleaning else {}))
        elif not finished.same_tokens(gathered):
            problem = "missing shards cannot be recreated: the tokenizer library's version has changed"
            hint = "install the version that made the data, or start a new run"
            raise InputError(problem, folder.uri, hint)

    def _tokenizer(self, parts: list[Part], text: CleanedText | None) -> TokenFormat:
        """Train the tokenizer if the job asks for it, and write it."""
        folder, (chosen, kind, framing) = self.folder, self.given
        if isinstance(chosen[0], str):
            given, roles = chosen
            if folder.read("tokenizer.json") != given.encode():
                folder.write("tokenizer.json", given.encode())
            return TokenFormat(tokenizer.size_in(given), roles, self.data_format, kind, framing)
        if folder.read("tokenizer.json") is None:
            from orchestrator.data.prepare.part_tasks import run_alone

            rows = [sources.to_json(part, _reach(self.data_format)) for part in parts]
            run_alone(_train, folder.uri, folder.uri, (rows, chosen, self.data_format), text)
        made = (folder.read("tokenizer.json") or b"").decode()
        roles = tokenizer.roles_of(tokenizer.encoder(made), {})
        # use the requested size even if the text gave fewer entries: the model's size follows from it before there is
        # data
        return TokenFormat(chosen[0], roles, self.data_format, kind, framing)

    def _publisher(
        self, plan: SectionPlan, parts: list[Part], written: TokenFormat, begin: bool
    ) -> Publisher:
        """Return the publisher of all sections. With `begin`, of the first section and those that were published
        before.
        """
        folder = self.folder
        name = self._name
        uris = self._uris
        code = self.cleaning.code if self.cleaning else {}

        def section(numbers: Sequence[int]) -> manifest.DataManifest:
            gathered, _ = gather_some(folder, name, uris=uris, parts=parts, numbers=numbers, written=written)
            return replace(gathered, code=code)

        there = published.so_far(folder) if begin else None
        sections = max(1, there[1] if there else 0) if begin else plan.sections
        return Publisher(folder, plan, section, sections)

    def _tokenise(
        self,
        parts: list[Part],
        written: TokenFormat,
        tasks: _ShardTasks,
        publisher: Publisher | None,
        there: Mapping[int, tuple[str, int]],
        leave: float,
    ) -> None:
        """Write the shards that lack a record or a file, until `data.max_rejected` is exceeded for certain.

        With a `publisher`, write only the shards of its sections, in their order. Shards that are `there` are copied.
        """
        folder = self.folder
        progress = self.progress
        ceiling = rejections.Ceiling(self.data.max_rejected, folder)
        todo = shards.unfinished(folder, len(parts), written)
        from orchestrator.data.prepare.part_tasks import (  # only here: complete data is used without Ray
            run_tasks,
            together,
        )

        task, is_there = tasks
        refuted = None
        wanted = publisher.parts if publisher else range(len(parts))
        text_bytes = sum(span.bytes for number in wanted for span in parts[number])
        # one part a task if sections are to be published early
        most = 1 if publisher else together(text_bytes // max(len(parts), 1))
        # One more round for shards of an engine that later differed from the reference.
        while refuted != (refuted := shards.refuted_engine(folder)):
            if refuted:
                todo = shards.unfinished(folder, len(parts), written)
            if publisher:
                publisher.look(todo)
                todo = publisher.order(todo)
            before = len(wanted) - len(todo)
            progress("tokens", before, len(wanted), text_bytes)
            recorded = folder.sizes("records")
            rows = [
                {
                    "number": n,
                    "recorded": os.path.basename(shards.record_name(n)) in recorded,
                    "part": sources.to_json(parts[n], _reach(written.version)),
                    "there": there.get(n, ()) and list(there[n]),
                }
                for n in todo
            ]
            for done in run_tasks(task, rows, cache=folder.uri, leave=leave, together=most, there=is_there):
                if ceiling.limited:
                    number = todo[done - 1]
                    ceiling.check(number, shards.read_record(folder, number, written.version), parts)
                if publisher:
                    publisher.look(todo[done:])
                progress("tokens", before + done, len(wanted), text_bytes)


_ShardTasks = tuple[Callable[[dict[str, Any]], Callable[[], None] | None], Callable[[dict[str, Any]], bool]]


def _shard_tasks(
    uri: str, written: TokenFormat, given: str, fast: bool, text: CleanedText | None
) -> _ShardTasks:
    """Return the function that makes the shard of a row with the tokenizer `given`, and the one that says whether the
    shard exists. Both are sent to other processes.
    """

    def task(row: dict[str, Any]) -> Callable[[], None] | None:
        if row["there"]:
            source, number = row["there"]
            if reuse.copy_shard(source, number, DataFolder(uri), row["number"], written.version):
                return None
        part = sources.from_json(row["part"])
        return shards.make_shard(
            uri, row["number"], part=part, written=written, fast=fast, cleaned=text, text=given
        )

    def is_there(row: dict[str, Any]) -> bool:
        # a record from before belongs to files that are missing
        if row["recorded"]:
            return False
        return shards.read_record(DataFolder(uri), row["number"], written.version) is not None

    return task, is_there


def _refuse_pairs_without_separator(files: Sequence[SourceFile], roles: Mapping[str, int]) -> None:
    paired = next((file for file in files if isinstance(file.field, tuple)), None)
    if paired and "sep" not in roles:
        hint = "use a tokenizer with a separator, or train one"
        raise InputError("holds pairs, and the tokenizer has no separator token", paired.uri, hint)


def _reach(data_format: int) -> int | None:
    """Return how many bytes after its spans a task may read; None for no limit."""
    return None if data_format == 1 else LINE_BYTES


def _train(uri: str, asked: tuple[list[str], list[Any], int], text: CleanedText | None) -> None:
    """Train the configured tokenizer on these parts of the text, for data of that format."""
    parts, chosen, data_format = asked
    entries, special_tokens, *others = chosen
    recipe = TokenizerRecipe(vocabulary=entries, **(others[0] if others else {}))
    limit = training.SAMPLE_BYTES[recipe.kind]
    texts = sample([sources.from_json(part) for part in parts], limit, data_format, text)
    DataFolder(uri).write("tokenizer.json", training.train(texts, recipe, special_tokens).encode())
