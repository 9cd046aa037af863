"""Check that a continued search trains and measures its trials as before, because one table compares all of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from orchestrator.checkpoint.config import RunIdentity
from orchestrator.checkpoint.identity import CODE, KEPT
from orchestrator.config.errors import InputError, Problems
from orchestrator.config.inputs import Input, changed_by
from orchestrator.config.own_code import check_same_code, code_of
from orchestrator.config.spec import JobSpec
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
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
HINT = "restore it, or search under another name"


class InputsChanged(InputError):
    """A file that the job names differs from what the trials so far have read."""


def check_same_inputs(
    sweep: RunDir,
    prepared: PreparedData,
    *,
    identity: RunIdentity,
    workload: WorkloadSpec,
    data: DataSpec,
    searched: Collection[str] = (),
    values: Mapping[str, Any] | None = None,
) -> None:
    """Raise InputsChanged if a file that the job names differs from what the trials of this search have read.

    The first call stores the digests in the search's directory: once for inputs that no key of the search changes,
    and for each of the values that change them.

    Args:
        sweep: the directory of the search.
        prepared: the prepared data of the job, of the whole search or of one trial.
        identity: names the user's own code and the held-out sets of that job.
        workload: the model of that job.
        data: the data of that job.
        searched: the keys that the search varies, for the job of the whole search. Weights and folders that they
            change are not compared.
        values: the trial's values by key; None for the job of the whole search.

    Raises:
        InputsChanged: with the key of each differing file.
    """
    inputs = _Inputs(identity, workload, data, where=sweep.uri, prepared=prepared)
    problems = Problems()
    for part, kind in inputs.kinds.items():
        changing = {key: value for key, value in (values or {}).items() if kind in changed_by(JobSpec, key)}
        over = any(kind in changed_by(JobSpec, key) for key in searched)
        now = None if over and part in (BASE, KEPT) else inputs.now(part)
        file_name = _place_of(changing)
        stored = sweep.read_json(file_name) or {}
        known = stored.get(part)
        with problems.noted():
            inputs.compare(part, known, now)
        kept = {**(now or {}), **(known or {})} if part in (TEXTS, CODE) else now if known is None else known
        if kept is not None and kept != known:
            sweep.write_json(file_name, {**stored, part: kept})
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

    identity: RunIdentity
    workload: WorkloadSpec
    data: DataSpec
    where: str
    prepared: PreparedData

    @property
    def kinds(self) -> dict[str, Input | None]:
        """Return the parts that a search stores, each with the input that keys of the search may change."""
        text = Input.TEXT if self.data.samples is None else Input.SAMPLES
        return {TEXTS: text, BASE: Input.WEIGHTS, CODE: None, KEPT: Input.FOLDER}

    def now(self, part: str) -> Any:
        """Return an input as plain data; None for weights or a configuration that the job does not have."""
        if part == CODE:
            return code_of(self.identity.own_code)
        if part != TEXTS:
            with wrong_input("workload.model"):
                if part == KEPT:
                    return config_json(config_to_keep(self.workload))
                base = named_base(self.workload, None)
                return base and base.digest
        key = "data.samples" if self.data.samples is not None else "data.sources"
        texts = {key: digest_of(self.data, Tokens.open(self.prepared.uri, keep=0))}
        for name, (where, _) in self.identity.set_sources.items():
            texts[where] = Tokens.open(self.prepared.sets[name], keep=0).manifest.digest
        return texts

    def compare(self, part: str, known: Any, now: Any) -> None:
        """Raise InputError if an input is not the `known` one; None if it is unknown or not compared."""
        if known is None or now is None:
            return
        if part == TEXTS:
            problems = Problems()
            for where in (where for where, digest in now.items() if known.get(where, digest) != digest):
                with problems.noted():
                    raise InputError("differs from the text that earlier trials read", where, HINT)
            problems.raise_noted()
        elif part == CODE:
            check_same_code(self.identity.own_code, self.identity.accepted, known, self.where)
        elif part == KEPT:
            check_config(self.workload, FolderConfig(**known), self.where)
        elif known != now:
            where = "workload.init_from" if self.workload.init_from else "workload.model"
            raise InputError("the weights are not those that this search's trials begin with", where, HINT)
