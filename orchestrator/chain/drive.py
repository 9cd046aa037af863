"""Drive a chain: each stage is a separate run, which starts as soon as the stages that it needs are done.

Everything needed to continue is in the run directories of the stages, so this process may be killed at any moment.
Stages that are ready at the same time share the cluster through its queue, like other runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.workers.stop_signals import held_interruptions
from orchestrator.bench.inputs import Prepare
from orchestrator.bench.measure import ExportFailed
from orchestrator.chain.exports import ExportTable
from orchestrator.chain.preflight import of_stage
from orchestrator.chain.results import finish, record
from orchestrator.chain.stage_run import StageRun
from orchestrator.chain.vocabulary import make as make_folder
from orchestrator.config.chain import ChainSpec
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.data.progress import StageLine
from orchestrator.launch.finished import PastRun
from orchestrator.launch.preflight import preflight
from orchestrator.launch.watched_run import REFRESH, RunOutcome, WatchedRun, attach
from orchestrator.resolve.precision import record_choice
from orchestrator.resolve.prepared_data import prepared
from orchestrator.storage.file_names import CHAIN
from orchestrator.storage.run_directory import RunDir

Show = Callable[[Mapping[str, Any]], None]
Faults = Mapping[str, tuple[str, ...]]
"""Injected faults of each stage, for tests."""


def tell_of(show: Show, name: str, line: str) -> None:
    """Show a line about a stage that does not run yet."""
    show({name: {"phase": "prepare", "note": line}})


@dataclass(frozen=True)
class ChainOutcome:
    """How a command ended, the content of chain.json, and a line for the user."""

    outcome: Outcome
    summary: dict[str, Any]
    line: str = ""


class Driver:
    """Starts and watches the stages of a chain."""

    def __init__(
        self,
        chain: ChainSpec,
        stages: Mapping[str, StageRun],
        root: RunDir,
        done: set[str],
        show: Show,
        address: str | None,
        faults: Faults,
        priority: int,
    ) -> None:
        """Start nothing yet. `done` are the stages that are done already; for the other arguments see `run`."""
        self._chain = chain
        self._stages = stages
        self._root = root
        self._show = show
        self._address = address
        self._faults = faults
        self._priority = priority
        self._working: dict[str, WatchedRun] = {}
        """The running stages."""
        self._ended = {name: RunOutcome(Outcome.DONE, None) for name in done}
        """How the other stages have ended."""
        self._stopping = False
        """Whether the user wants a stop, or a stage was stopped. No further stage begins then."""
        self._fallen = ""
        """A line about the process of this machine's Ray that has died; empty while Ray lives."""
        self.exports = ExportTable(
            chain,
            stages,
            root,
            prepare=self._prepare("exports"),
            tell=lambda status: show({"exports": status}),
        )
        """Measures the exports, and knows what they keep."""
        self._are_exports_left = False
        """Whether the user has interrupted the comparison of the exports."""

    def _prepare(self, name: str) -> Prepare:
        """Return the function that prepares data on the cluster of the chain, and shows the progress by a name."""
        return partial(prepared, tell=StageLine(partial(tell_of, self._show, name)))

    def drive(self, shared: str = "") -> bool:
        """Run until no stage is running and none can begin. Return whether to connect to Ray again and continue.

        For `shared` see `attach`.
        """
        from cluster.workers.ray_internals import dead_main_process

        for name, outcome in self._ended.items():  # done by an earlier command
            self._ended[name] = self._checked_export(name, outcome)
        while True:
            try:
                if gone := dead_main_process():
                    self._fallen = f"Ray's {gone} on this machine has died"
                    self._working.clear()
                    return not self._stopping
                self._fallen = ""
                self._begin(shared)
                if not self._working:
                    self._compare()
                    return False
                self._look()
                time.sleep(REFRESH)
            except KeyboardInterrupt:
                if self._stopping and all(run.stopping for run in self._working.values()):
                    for run in self._working.values():
                        run.leave()
                    raise
                self._stop()

    def record(self) -> dict[str, Any]:
        """Write chain.json, and return its content."""
        lines = {name: outcome.line for name, outcome in self._ended.items() if not outcome.summary}
        result = record(self._chain, self._stages, self._root, lines)
        self._root.write_json(CHAIN, result)
        return result

    def finish(self) -> ChainOutcome:
        """Write the results once no stage is running, and return the outcome."""
        outcome, line = self._outcome()
        result = self.record() | {"state": str(outcome), "ended": time.time()}
        return ChainOutcome(outcome, finish(self._chain, self._stages, self._root, result), line)

    def _compare(self) -> None:
        """Measure all exports once every stage is done."""
        ended = {name for name, each in self._ended.items() if each.outcome == Outcome.DONE}
        if self._stopping or ended != set(self._stages):
            return
        try:
            self.exports.measure_all()
        except KeyboardInterrupt:
            self._are_exports_left = True
            return
        for name in self._stages:
            if why := self.exports.shortfall(name):
                self._ended[name] = RunOutcome(Outcome.FAILED, None, why)

    def _checked_export(self, name: str, outcome: RunOutcome) -> RunOutcome:
        """Return the outcome of a stage: failed if its export keeps too little, or cannot be measured."""
        if outcome.outcome != Outcome.DONE:
            return outcome
        try:
            self.exports.measure(name)
        except (InputError, ExportFailed) as error:
            return RunOutcome(Outcome.FAILED, None, str(error))
        except KeyboardInterrupt:  # the next command measures it
            self._stop()
            self._are_exports_left = True
            return outcome
        why = self.exports.shortfall(name)
        return RunOutcome(Outcome.FAILED, None, why) if why else outcome

    def _stop(self) -> None:
        """Ask all stages to commit and end."""
        self._stopping = True
        for run in self._working.values():
            run.stopping = True

    def _begin(self, shared: str) -> None:
        """Start the stages that are ready."""
        for name, stage in self._stages.items():
            needed = [self._ended.get(other) for other in stage.stage.needs]
            ready = all(each is not None and each.outcome == Outcome.DONE for each in needed)
            if self._stopping or not ready or name in self._working or name in self._ended:
                continue
            try:
                with of_stage(name):
                    self._start(name, stage, shared)
            except InputError as error:
                self._end(name, RunOutcome(Outcome.WRONG_INPUT, None, str(error)))

    def _start(self, name: str, stage: StageRun, shared: str) -> None:
        if stage.stage.vocabulary:
            make_folder(stage, self._prepare(name))
            self._end(name, RunOutcome(Outcome.DONE, None))
            return
        past = PastRun(stage.job, stage.run)
        if (past_outcome := past.done()) is not None:
            past.put_back()
            self._end(name, RunOutcome(Outcome.DONE, past_outcome))
            return
        job = preflight(stage.job, stage.run, None, self._address)
        stage.run.create()
        faults = self._faults.get(name, ())
        with held_interruptions():
            self._working[name] = attach(
                job.spec.document(), stage.run, None, faults=faults, priority=self._priority, shared=shared
            )
        record_choice(job, stage.run)

    def _look(self) -> None:
        """Poll the running stages and show them."""
        for name, run in list(self._working.items()):
            if (outcome := run.look()) is not None:
                self._end(name, outcome)
        self._show({name: run.status for name, run in self._working.items()})

    def _end(self, name: str, outcome: RunOutcome) -> None:
        if outcome.summary and outcome.summary["state"] == Outcome.STOPPED:
            outcome = RunOutcome(Outcome.STOPPED, outcome.summary, outcome.line)
            self._stopping = True
        outcome = self._checked_export(name, outcome)
        self._working.pop(name, None)
        self._ended[name] = outcome
        self.record()

    def _outcome(self) -> tuple[Outcome, str]:
        """How the chain has ended, and a line about the stages that failed and those that did not begin."""
        result = {name: each for name, each in self._ended.items() if each.outcome != Outcome.DONE}
        left = [name for name in self._stages if name not in self._ended]
        bad = [name for name, each in result.items() if each.outcome != Outcome.STOPPED]
        if not (result or left):
            if self._are_exports_left:
                return Outcome.STOPPED, "the exports are not compared yet; the same command continues"
            return Outcome.DONE, ""
        if self._fallen:
            return Outcome.FAILED, f"{self._fallen}; the same command continues from the last checkpoints"
        if not bad:
            return self._stopped(result, left)
        lines = []
        for name in bad:
            waiting = [other for other in self._chain.after(name) if other in left]
            ends = (
                f"; {', '.join(waiting)} {'did' if len(waiting) > 1 else 'does'} not begin" if waiting else ""
            )
            lines.append(f"{name} failed: {result[name].line}{ends}")
        wrong = all(result[name].outcome == Outcome.WRONG_INPUT for name in bad)
        return Outcome.WRONG_INPUT if wrong else Outcome.FAILED, " -- ".join(lines)

    def _stopped(self, outcomes: Mapping[str, RunOutcome], left: list[str]) -> tuple[Outcome, str]:
        """As `_outcome`, if no stage has failed. The outcome STOPPED promises a commit to continue from."""
        line = "; ".join(f"{name}: {each.line}" for name, each in outcomes.items()) or "stopped by the user"
        if left:
            line += f"; still to come: {', '.join(left)}"
        committed = any((each.summary or {}).get("commit") is not None for each in outcomes.values())
        if committed or any(each.outcome == Outcome.DONE for each in self._ended.values()):
            return Outcome.STOPPED, f"{line}; the same command continues"
        return Outcome.FAILED, f"{line}; no checkpoint yet; the same command starts from the beginning"
