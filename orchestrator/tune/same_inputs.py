"""Check that a continued search trains and measures its trials as before, because one table compares all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from orchestrator.checkpoint.evaluations import measure_of
from orchestrator.checkpoint.identity import CODE, KEPT, is_other
from orchestrator.config.errors import InputError, Problems
from orchestrator.config.inputs import Input, changed_by
from orchestrator.config.own_code import check_same_code, code_of
from orchestrator.config.spec import JobSpec
from orchestrator.data.store.tokens import Tokens
from orchestrator.models.base import named_base
from orchestrator.models.kept_config import check_config, config_json, config_to_keep
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.resolve.resolved_job import wrong_input
from orchestrator.resolve.training_inputs import digest_of
from orchestrator.storage.run_directory import RunDir
from workloads.hf.files.hf_config import FolderConfig

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


class InputsChanged(InputError):
    """A file that the job names differs from what the trials so far have read."""


def check_same_inputs(
    spec: JobSpec, sweep: RunDir, data: PreparedData, values: Mapping[str, Any] | None = None
) -> None:
    """Raise InputsChanged if a file that the job names differs from what the trials of this search have read.

    The first call stores the digests in the search's directory: once for inputs that no key of the search changes,
    and for each of the values that change them.

    Args:
        spec: the job, of the whole search or of one trial.
        sweep: the directory of the search.
        data: the prepared data of the job.
        values: the trial's values by key; None for the job of the whole search, whose weights and folder are not
            compared if the search changes them.

    Raises:
        InputsChanged: with the key of each differing file.
    """
    searched = spec.tune.space if spec.tune and values is None else {}
    inputs = _Inputs(spec, sweep.uri, data)
    problems = Problems()
    for part, kind in inputs.kinds.items():
        changing = {key: value for key, value in (values or {}).items() if kind in changed_by(JobSpec, key)}
        over = any(kind in changed_by(JobSpec, key) for key in searched)
        now = None if over and part in (BASE, KEPT) else inputs.now(part)
        place = _place_of(changing)
        stored = sweep.read_json(place) or {}
        known = stored.get(part)
        with problems.noted():
            inputs.compare(part, known, now)
        kept = {**(now or {}), **(known or {})} if part in (TEXTS, CODE) else now if known is None else known
        if kept is not None and kept != known:
            sweep.write_json(place, {**stored, part: kept})
    try:
        problems.raise_noted()
    except InputError as error:
        raise InputsChanged(error.what, error.where, error.hint, error.others) from None


def _place_of(changing: Mapping[str, Any]) -> str:
    """Return the file of an input: one for all trials, or one for each of the values that change the input."""
    if not changing:
        return INPUTS
    values = json.dumps(changing, sort_keys=True, default=str).encode()
    return INPUTS.replace(".", f"-{xxhash.xxh3_64_hexdigest(values)}.")


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a job in the search at `where`."""

    spec: JobSpec
    where: str
    data: PreparedData

    @property
    def kinds(self) -> dict[str, Input | None]:
        """Return the parts that a search stores, each with the input that keys of the search may change."""
        text = Input.TEXT if self.spec.data.samples is None else Input.SAMPLES
        return {TEXTS: text, BASE: Input.WEIGHTS, CODE: None, KEPT: Input.FOLDER}

    def now(self, part: str) -> Any:
        """Return an input as plain data; None for weights or a configuration that the job does not have."""
        spec = self.spec
        if part == CODE:
            return code_of(spec.own_code)
        if part != TEXTS:
            with wrong_input("workload.model"):
                if part == KEPT:
                    return config_json(config_to_keep(spec.workload))
                base = named_base(spec.workload, None)
                return base and base.digest
        key = "data.samples" if spec.data.samples is not None else "data.sources"
        texts = {key: digest_of(spec.data, Tokens.open(self.data.uri, keep=0))}
        for name, (where, _) in spec.set_sources.items():
            texts[where] = Tokens.open(self.data.sets[name], keep=0).manifest.digest
        return texts

    def compare(self, part: str, known: Any, now: Any) -> None:
        """Raise InputError if an input is not the `known` one; None if it is unknown or not compared."""
        if known is None or now is None:
            return
        if part == TEXTS:
            problems = Problems()
            for where in (where for where, digest in now.items() if known.get(where, digest) != digest):
                with problems.noted():
                    raise InputError("is not the text that this search has read so far", where, HINT)
            problems.raise_noted()
        elif part == CODE:
            check_same_code(self.spec.own_code, self.spec.accept_code, known, self.where)
        elif part == KEPT:
            check_config(self.spec.workload, FolderConfig(**known), self.where)
        elif known != now:
            where = "workload.init_from" if self.spec.workload.init_from else "workload.model"
            raise InputError("the weights are not those that this search's trials begin with", where, HINT)
