"""Check that a continued search trains and measures its trials as before, because one table compares all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestrator.checkpoint.evaluations import measure_of
from orchestrator.checkpoint.identity import CODE, KEPT, is_other
from orchestrator.config.errors import InputError, Problems
from orchestrator.config.own_code import check_same_code, code_of
from orchestrator.config.spec import JobSpec
from orchestrator.data.store.tokens import Tokens
from orchestrator.resolve.base import named_base
from orchestrator.resolve.kept_config import check_config, config_json, config_to_keep
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.resolve.resolved_job import wrong_input
from orchestrator.resolve.training_inputs import digest_of
from orchestrator.storage.run_directory import RunDir
from workloads.hf.hf_config import FolderConfig

INPUTS = "inputs.json"
"""The file in a search's directory with the inputs of its first trials, by the keys of the job file."""
TEXTS = "texts"
"""Its key for the digests of texts."""
BASE = "base"
"""Its key for the digest of the pretrained weights."""
HINT = "put it back as it was, or search under another name"


def measured_otherwise(spec: JobSpec, before: JobSpec) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys in which two jobs measure evaluations differently, each with the value `before` and now.

    These keys are not part of a run's identity, see `measure_of`.
    """
    was, now = (
        measure_of(before.evaluate, before.checkpoint.averaged),
        measure_of(spec.evaluate, spec.checkpoint.averaged),
    )
    for key, name in (("evaluate.batches", "batches"), ("checkpoint.average.last", "averaged")):
        if is_other(was[name], now[name]):
            yield key, was[name], now[name]


def check_same_inputs(spec: JobSpec, sweep: RunDir, data: PreparedData) -> None:
    """Raise InputError if a file that the job names differs from what the trials of this search have read.

    The first call stores the digests in the search's directory. Keys that are searched over are not compared.

    Args:
        spec: the job.
        sweep: the directory of the search.
        data: the prepared data of the job.

    Raises:
        InputError: with the key of each differing file.
    """
    known = sweep.read_json(INPUTS) or {}
    inputs = _inputs_of(spec, data)
    problems = Problems()
    for where, digest in inputs[TEXTS].items():
        if known.get(TEXTS, {}).get(where, digest) != digest:
            with problems.noted():
                raise InputError("is not the text that this search has read so far", where, HINT)
    if known.get(BASE, inputs[BASE]) != inputs[BASE]:
        with problems.noted():
            where = "workload.init_from" if spec.workload.init_from else "workload.model"
            raise InputError("the weights are not those that this search's trials begin with", where, HINT)
    with problems.noted():
        check_same_code(spec.own_code, spec.accept_code, known.get(CODE) or {}, sweep.uri)
    if known.get(KEPT) and inputs[KEPT]:
        with problems.noted():
            check_config(spec.workload, FolderConfig(**known[KEPT]), sweep.uri)
    problems.raise_noted()
    texts = {**inputs[TEXTS], **known.get(TEXTS, {})}
    updated = {**inputs, **known, TEXTS: texts}
    if updated != known:
        sweep.write_json(INPUTS, updated)


def _inputs_of(spec: JobSpec, data: PreparedData) -> dict[str, Any]:
    """Return the inputs of the trials as plain data. The weights are None if the search is over models."""
    key = "data.samples" if spec.data.samples is not None else "data.sources"
    texts = {key: digest_of(spec.data, Tokens.open(data.uri, keep=0))}
    for name, (where, _) in spec.set_sources.items():
        texts[where] = Tokens.open(data.sets[name], keep=0).manifest.digest
    over_models = spec.tune is not None and any(key.startswith("workload.") for key in spec.tune.space)
    with wrong_input("workload.model"):
        base = None if over_models else named_base(spec.workload, None)
        kept = None if over_models else config_to_keep(spec.workload)
    return {TEXTS: texts, BASE: base and base.digest, CODE: code_of(spec.own_code), KEPT: config_json(kept)}
