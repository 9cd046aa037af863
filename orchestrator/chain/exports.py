"""The exports of a chain with `compress`: measured as soon as their stages are done, and compared with the teacher's.

What was measured is in exports.json of the chain's directory, by the content of each export, so that a chain which goes
on measures only what is new.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from cluster.workers.machine import processors_here
from orchestrator.bench.export_folder import FORMS, ExportFolder, read_exports
from orchestrator.bench.inputs import Inputs, Prepare, comparable_metric, metrics_of, read_inputs
from orchestrator.bench.measure import Tell, measure_exports, to_json
from orchestrator.chain.measured_exports import EXPORTS, compared, comparison_context, shortfall, stored
from orchestrator.chain.stage_run import StageRun, export_of
from orchestrator.config.chain import COMPRESS, ChainSpec
from orchestrator.config.errors import InputError
from orchestrator.data.config import DataSpec, Source
from orchestrator.data.sources import resolve
from orchestrator.data.sources.check import check_set
from orchestrator.export.target import mark_of
from orchestrator.storage.run_directory import RunDir
from orchestrator.storage.uri import is_local

HELD_OUT = f"{COMPRESS}.held_out"
BATCHES = (1, 32)
"""The sizes of batches that are timed."""


def check_compress(chain: ChainSpec, stages: Mapping[str, StageRun]) -> None:
    """Raise InputError if the exports of the chain cannot be compared."""
    if (compress := chain.compress) is None:
        return
    if compress.teacher not in stages:
        read_exports([str(compress.teacher)])
    first, *_ = chain.exporting
    for stage in chain.exporting:
        if (form := stage.job.checkpoint.export) not in FORMS:
            problem = f"{stage.name} is exported as {form}, which is not measured"
            hint = f"set checkpoint.export of {stage.name} to {' or '.join(FORMS)}, or to null"
            raise InputError(problem, COMPRESS, hint)
        objective = stage.job.workload.objective
        if objective != (theirs := first.job.workload.objective):
            problem = f"{stage.name} trains {objective}, and {first.name} {theirs}: their exports cannot be compared"
            hint = "set checkpoint.export of one of them to null"
            raise InputError(problem, COMPRESS, hint)
        metrics = metrics_of(objective)
        if not metrics:
            hint = f"leave {COMPRESS} out, and compare them with `orchestrator evaluate`"
            raise InputError(
                f"{stage.name} trains {objective}, whose exports are not measured", COMPRESS, hint
            )
        if compress.metric is not None and compress.metric not in metrics:
            hint = f"use {', '.join(metrics)}"
            raise InputError(f"{compress.metric} is not measured", f"{COMPRESS}.metric", hint)
        if not is_local(place := export_of(stages[stage.name])):
            hint = f"set checkpoint.export_to of {stage.name} to a folder"
            problem = f"the export of {stage.name} goes to {place}, but exports are compared on this machine"
            raise InputError(problem, COMPRESS, hint)
        _check_rows(compress.held_out, stages[stage.name].job.data, objective)


def _check_rows(held_out: str, data: DataSpec, objective: str) -> None:
    """Check that the held-out rows are there, with the columns of a stage. Raises InputError."""
    if data.samples is not None:
        return
    source = Source(uri=held_out, field=data.sources[0].field)
    try:
        check_set([source], HELD_OUT, "fail", objective, begins=True)
    except InputError as error:
        where = error.where.replace(f"{HELD_OUT}.0.uri", HELD_OUT).replace(f"{HELD_OUT}.0.field", HELD_OUT)
        raise InputError(error.what, where, error.hint) from None


class ExportTable:
    """Measures the exports of a chain."""

    def __init__(
        self, chain: ChainSpec, stages: Mapping[str, StageRun], root: RunDir, prepare: Prepare, tell: Tell
    ) -> None:
        """
        Args:
            chain: the chain.
            stages: its stages, by name.
            root: its directory.
            prepare: prepares held-out rows on the cluster that the chain runs on.
            tell: shows the progress.
        """
        self._chain = chain
        self._stages = stages
        self._root = root
        self._prepare = prepare
        self._tell = tell
        self._inputs: dict[str, Inputs] = {}

    def measure(self, name: str) -> None:
        """Measure the metrics of a stage that is done, and of the teacher, unless that was done before.

        Raises InputError if the export cannot read the rows, or predicts something else than the teacher's;
        `ExportFailed` if it cannot be run.
        """
        teacher, *_ = names = compared(self._chain) or ("",)
        if name not in names or not self._content(teacher):
            return  # without a teacher's export yet, `measure_all` compares them at the end
        wanted = list(dict.fromkeys([teacher, name]))
        if any(not self._is_measured(each) for each in wanted):
            self._measure(wanted, rounds=0)

    def measure_all(self) -> None:
        """Measure the metrics and speeds of all exports in alternating rounds, unless they were measured before."""
        if self._chain.compress is not None and not self._are_measured():
            self._measure(compared(self._chain), self._chain.compress.rounds)

    def shortfall(self, name: str) -> str:
        """Return why a stage fails because its export keeps too little, see `measured_exports.shortfall`."""
        return shortfall(self._chain, self._root, name)

    def are_good(self) -> bool:
        """Return whether all exports were measured before as they are now, and keep enough."""
        if self._chain.compress is None:
            return True
        short = any(map(self.shortfall, self._stages))
        return self._are_measured() and not short

    def _are_measured(self) -> bool:
        timed = self._chain.compress is not None and self._chain.compress.rounds > 0
        return all(self._is_measured(name, timed) for name in compared(self._chain))

    def _measure(self, names: Sequence[str], rounds: int) -> None:
        compress = self._chain.compress
        assert compress is not None
        exports = [self._export(name) for name in names]
        for name, export in zip(names, exports, strict=True):
            if name not in self._inputs:
                rows = read_inputs([export], compress.held_out, (), compress.samples, self._prepare)
                self._inputs[name] = rows[0]
        inputs = [self._inputs[name] for name in names]
        metric = comparable_metric(exports, inputs, compress.metric, f"{COMPRESS}.metric")
        found = stored(self._chain, self._root).get("rows", {})
        measured = measure_exports(
            exports,
            inputs,
            batches=BATCHES,
            rounds=rounds,
            threads=processors_here(),
            tell=self._tell,
            known={
                export.path: found[name]["metrics"]
                for name, export in zip(names, exports, strict=True)
                if self._is_measured(name)
            },
        )
        for name, row in zip(names, to_json(measured, metric), strict=True):
            found[name] = row | {"mark": self._mark(name)}
        self._root.write_json(EXPORTS, {"metric": metric, **comparison_context(compress), "rows": found})

    def _export(self, name: str) -> ExportFolder:
        (exported,) = read_exports([self._folder(name)])
        return dataclasses.replace(exported, name=name if name in self._stages else exported.name)

    def _folder(self, name: str) -> str:
        return export_of(self._stages[name]) if name in self._stages else name

    def _is_measured(self, name: str, timed: bool = False) -> bool:
        row = stored(self._chain, self._root).get("rows", {}).get(name)
        return row is not None and row["mark"] == self._mark(name) and (bool(row["speeds"]) or not timed)

    def _mark(self, name: str) -> str:
        """Return what a row of the table follows from: the content of an export, of the teacher's, and of the rows."""
        teacher, *_ = compared(self._chain)
        contents = [self._content(name), self._content(teacher), self._rows]
        return hashlib.sha256(json.dumps(contents).encode()).hexdigest()

    @cached_property
    def _rows(self) -> list[tuple[str, str]]:
        """The key of the held-out rows' content."""
        assert self._chain.compress is not None
        files = resolve([Source(uri=self._chain.compress.held_out)], HELD_OUT)
        return [(file.uri, file.content) for file in files]

    def _content(self, name: str) -> str:
        """Return what identifies the content of an export; empty without one. A folder by others has no export.json."""
        folder = self._folder(name)
        content = mark_of(folder)
        if not content and name not in self._stages:
            files = sorted(Path(folder).glob("*"))
            content = str([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])
        return content
