"""Prepared data where a job looks for it, made in this process: `prepare` then finds it and needs no Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from orchestrator.config.spec import JobSpec, parse
from orchestrator.data import sources
from orchestrator.data.config import TrainBpe
from orchestrator.data.encoding import tokenizer
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.prepare import shards
from orchestrator.data.prepare.fingerprint import fingerprint, given_in
from orchestrator.data.prepare.gather import gather
from orchestrator.data.prepare.part_text import sample
from orchestrator.data.prepare.record_kind import kind_of
from orchestrator.data.samples.own_samples import prepare_samples
from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.tokens import read_tokenizer
from orchestrator.resolve.resolved_job import is_framed
from workloads.objectives import special_tokens


def prepare_sets_here(spec: JobSpec, cache: str, data: str) -> dict[str, str]:
    """The URIs of the token shards of the job's sets of their own text, by the tokenizer of `data`."""
    if not spec.set_sources:
        return {}
    own = spec.data.model_copy(update={"tokenizer": f"{data}/tokenizer.json", "validation": None})
    there = manifest.read(DataFolder(data))
    assert there is not None
    chosen = (read_tokenizer(DataFolder(data), there), there.roles)
    found = {}
    for name, (_, named) in spec.set_sources.items():
        changes = {"data": own.model_copy(update={"sources": named}), "evaluate": None}
        found[name] = _prepare(spec.model_copy(update=changes), cache, chosen)
    return found


def with_data(document: dict[str, Any], cache: Path) -> dict[str, Any]:
    """The job, with its data prepared in `cache`."""
    document["data"]["cache"] = str(cache)
    prepare_here(parse(document), str(cache))
    return document


def prepare_here(spec: JobSpec, cache: str) -> str:
    """The URI of the job's token shards, made unless they are there, and with them those of its sets."""
    uri = _prepare(spec, cache)
    prepare_sets_here(spec, cache, uri)
    return uri


def _prepare(spec: JobSpec, cache: str, tokenizer_of: tuple[str, dict[str, int]] | None = None) -> str:
    if spec.data.samples is not None:
        return prepare_samples(spec.data.samples, spec.seed, cache)
    extra = special_tokens(spec.workload.objective)
    files = sources.resolve(spec.data.sources)
    part_bytes = sources.part_size(files)
    parts = sources.cut(files, part_bytes)
    chosen: Any
    if tokenizer_of is not None:
        chosen = tokenizer_of
    elif isinstance(spec.data.tokenizer, TrainBpe):
        chosen = [spec.data.tokenizer.train_bpe, tokenizer.all_special(extra)]
    else:
        chosen = tokenizer.load(spec.data.tokenizer, extra)
    kind = kind_of(spec.data, spec.workload.objective)
    framing = given_in(
        manifest.FORMAT, spec.data, lambda _: chosen, lambda _: kind, is_framed(spec.data, spec.workload)
    ).framing
    name = fingerprint(files, chosen, part_bytes, kind=kind, framing=framing)
    folder = DataFolder(f"{cache}/{name}")
    if shards.is_complete(folder):
        return folder.uri
    if isinstance(spec.data.tokenizer, TrainBpe):
        entries = spec.data.tokenizer.train_bpe
        text = train_bytes(sample(parts, 2**20), entries, extra)
        roles = tokenizer.roles_of(Tokenizer.from_str(text), {})
    else:
        text, roles = chosen
        entries = tokenizer.size_of(tokenizer.encoder(text))
    folder.write("tokenizer.json", text.encode())
    written = shards.TokenFormat(entries, roles, manifest.newest_format(kind is not None), kind, framing)
    for number, part in enumerate(parts):
        shards.make_shard(folder.uri, number, part, written)()
    uris = [source.uri for source in spec.data.sources]
    manifest.write(folder, gather(folder, name, uris, parts, written))
    return folder.uri
