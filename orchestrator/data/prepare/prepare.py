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

from functools import partial

from cluster.workers.cluster import Call, call_here
from orchestrator.config.errors import Absent, InputError, Unreachable
from orchestrator.data import sources
from orchestrator.data.clean.documents import aligned
from orchestrator.data.clean.plan import cleaning_of
from orchestrator.data.config import DataSpec
from orchestrator.data.prepare import rejections, shards
from orchestrator.data.prepare.fingerprint import (
    SOURCES,
    KindOf,
    TokenizerInputs,
    chosen_tokenizer,
    format_and_fingerprint,
    given_in,
    no_kind,
)
from orchestrator.data.prepare.preparation import Preparation
from orchestrator.data.prepare.prepared_tokenizer import read_tokenizer_of
from orchestrator.data.progress import Progress, silent
from orchestrator.data.samples.sections.plan import SectionPlan
from orchestrator.data.store.data_folder import DataFolder
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
    call: Call = call_here,
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
        call: reads the tokenizer and its templates, for which transformers may be imported.

    Raises InputError for sources or a tokenizer that cannot be used and for a cache that cannot be written,
    TextChanged if `data` no longer has the fingerprint `before`.
    """
    files = sources.resolve(data.sources, where, data.on_error)
    if not any(file.size for file in files):
        raise InputError("all files are empty", where, "give files with text")
    existing = read_tokenizer_of(tokenizer_of) if tokenizer_of else None
    choose = partial(chosen_tokenizer, data, objective_special_tokens, existing=existing)
    part_bytes = part_bytes or sources.part_size(files)
    cleaning = cleaning_of(data, files, part_bytes)
    clean_key = cleaning.key if cleaning else ""

    given = data, choose, kind_of, framed

    def inputs_in_format(data_format: int) -> TokenizerInputs:
        inputs: TokenizerInputs = call(given_in, data_format, *given)
        return inputs

    data_format, name, inputs = format_and_fingerprint(
        files, inputs_in_format, part_bytes, before, clean=clean_key, wanted=data_format
    )
    if cleaning and inputs.kind:
        raise InputError(
            f"cleans text, and {inputs.kind.objective} reads records", "data.clean", "leave it out"
        )
    folder = DataFolder(f"{DataFolder(cache).uri}/{name}")
    try:
        folder.remove_old_drafts()
        if not shards.is_complete(folder):
            if not make:
                hint = "make it with `orchestrator data prepare`"
                raise Absent("there is no prepared data", folder.uri, hint)
            preparation = Preparation(
                data,
                files,
                tokenizer_inputs=inputs,
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
        location = getattr(error, "filename", None) or folder.uri
        if transient(error):
            raise Unreachable(
                f"does not answer ({reason})", str(location), "check address and network"
            ) from None
        hint = "free space or set another data.cache, then run the same command again"
        raise InputError(f"cannot be written ({reason})", str(location), hint) from None
    return folder.uri
