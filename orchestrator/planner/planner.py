"""The plan that a job asks for, by its objective, and the planner of a run. Torch-free and ray-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.device import Machine
from orchestrator.planner.host_memory import worker_bytes
from orchestrator.planner.memory import MEMORY_SHARE, fits, needed_bytes
from orchestrator.planner.plan import NOTHING, Plan, Verdict, plan, predict, program_of
from orchestrator.planner.search import TIE
from orchestrator.planner.simulation.operators import needed_flops
from orchestrator.planner.simulation.step import pipeline

MOSTLY = 0.7
"""A step that computes for more of its time than this is not faster on fewer workers: on half of them it computes for
twice as long, or, where they share caches, for 1.4 times."""
MOST_ACTIONS = 5000
"""Forward passes of a pipeline's step beyond which plan.json has no timeline."""


NEAR = 2.5
"""How many times what the formula says a layout may need."""
OVER = 1.35
"""How many times what a layout needs the formula may say: of small ones it was found to say 1.26
(docs/predictions.md)."""


def planned(
    spec: JobSpec,
    shape: ModelShape,
    workers: int,
    machine: Machine,
    must_fit: bool = True,
    verdicts: Mapping[Layout, Verdict] = NOTHING,
) -> Plan:
    """What the job's objective asks for on at most so many workers: the fastest layout; or of those on `workers.min`,
    on twice as many and so on, that which takes least of all workers' time, if it is done within `limits.hours` as
    predicted. If none is, the fastest. Of layouts that cost the same the faster one is taken.

    `verdicts` and InputError as of `plan`.
    """
    fastest = plan(spec, shape, workers, machine, must_fit, verdicts)
    if spec.resources.objective == "time" or not fastest.fits:
        return fastest
    found = [fastest, *_narrower(spec, shape, fastest, must_fit, verdicts)]
    return min(best_of(spec, found), key=_seconds)


def faster_on_fewer(spec: JobSpec, shape: ModelShape, found: Plan) -> Plan | None:
    """Of plans on `workers.min`, twice as many and so on the fastest, if it is faster than this one, which is on more,
    by more than predictions may be off; None if there is none, as of all steps that mostly compute."""
    computes = found.chosen.time.compute > MOSTLY * found.chosen.seconds
    if computes or not found.fits or not spec.searches_layout:
        return None
    least = min(_narrower(spec, shape, found), key=_seconds, default=None)
    return least if least and _seconds(least) * (1.0 + TIE) < _seconds(found) else None


def _narrower(
    spec: JobSpec,
    shape: ModelShape,
    found: Plan,
    must_fit: bool = True,
    verdicts: Mapping[Layout, Verdict] = NOTHING,
) -> list[Plan]:
    """Those that fit on `workers.min`, twice as many and so on, and on fewer than that plan."""
    narrower = []
    for width in widths(spec.resources.workers.min, found.chosen.layout.world)[:-1]:
        try:
            each = plan(spec, shape, width, found.machine, must_fit, verdicts)
        except InputError:
            continue
        if each.fits and each.chosen.layout.world >= spec.resources.workers.min:
            narrower.append(each)
    return narrower


def best_of(spec: JobSpec, found: Sequence[Plan]) -> list[Plan]:
    """Those of the plans, one at least, that count as equally good by the job's objective: in seconds, or in what all
    workers take of those that are done within `limits.hours`, if any is."""
    measure = _seconds
    if spec.resources.objective == "cost":
        hours = spec.limits.hours or float("inf")
        if in_time := [each for each in found if spec.train.steps * _seconds(each) <= 3600.0 * hours]:
            found, measure = in_time, _cost
    least = min(map(measure, found))
    return [each for each in found if measure(each) <= least * (1.0 + TIE)]


def is_roomy(spec: JobSpec, found: Plan) -> bool:
    """Whether the chosen layout fits even if it needs NEAR times what the formula says: then it is not traced before it
    starts."""
    on_cpu, most = not spec.resources.per_worker.gpu, NEAR * found.chosen.memory
    return fits(needed_bytes(found.chosen.layout, most, most, on_cpu), found.machine, on_cpu)


def may_fit(found: Plan) -> bool:
    """Whether the chosen layout, which needs too much by the formula, may fit by its trace."""
    return found.chosen.memory <= OVER * found.machine.memory * MEMORY_SHARE


def on_workers(spec: JobSpec, least: int, most: int) -> JobSpec:
    """The job on so many workers, whatever it would take."""
    asked = spec.resources.workers.model_copy(update={"min": least, "max": most})
    return spec.model_copy(update={"resources": spec.resources.model_copy(update={"workers": asked})})


def widths(least: int, most: int) -> list[int]:
    """Numbers of workers to compare: `least`, twice as many and so on, and `most`."""
    found = []
    while least < most:
        found.append(least)
        least *= 2
    return [*found, most]


def _seconds(found: Plan) -> float:
    return found.chosen.seconds


def _cost(found: Plan) -> float:
    """Seconds of all workers in a step."""
    return found.chosen.seconds * found.chosen.layout.world


@dataclass(frozen=True)
class Planner:
    """Plans for one job, which the controller asks for repeatedly: each number of workers is planned once. `host` is
    how many bytes a worker has beside its GPU, None where that is not known. `confirm` is asked, once for each number
    of workers, what the traces of layouts say, where the formula does not settle whether the chosen one fits; while the
    controller `is_busy` with ranks it is not, and the formula decides until it is."""

    spec: JobSpec
    shape: ModelShape
    machine: Machine
    host: float | None = None
    confirm: Callable[[int], Mapping[Layout, Verdict]] | None = None
    is_busy: Callable[[], bool] = lambda: False
    verdicts: dict[Layout, Verdict] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    _confirmed: set[int] = dataclasses.field(default_factory=set, repr=False, compare=False)
    _unasked: set[int] = dataclasses.field(default_factory=set, repr=False, compare=False)
    _known: dict[int, Layout | None] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def plan(self, workers: int) -> Plan:
        """See `planned`; with the layouts, and without them, of which it is known that their traces fit or do not."""
        found = self._planned(workers, must_fit=False)
        if self._is_open(workers, found):
            if not self.is_busy():
                return self._confirmed_plan(workers, found)
            self._unasked.add(workers)
        return found if found.fits else self._planned(workers)

    def _is_open(self, workers: int, found: Plan) -> bool:
        """Whether traces have still to say that the chosen layout fits."""
        if self.confirm is None or workers in self._confirmed:
            return False
        if found.fits:
            return not is_roomy(self.spec, found)
        return self.spec.resources.must_fit and may_fit(found)

    def _confirmed_plan(self, workers: int, found: Plan) -> Plan:
        assert self.confirm is not None
        self._unasked.discard(workers)
        self._confirmed.add(workers)
        more = self.confirm(workers)
        self.verdicts.update(more)
        if more or not found.fits:
            found = self._planned(workers)
        self._confirmed.add(found.chosen.layout.world)
        return found

    def _planned(self, workers: int, must_fit: bool = True) -> Plan:
        return planned(self.spec, self.shape, workers, self.machine, must_fit, self.verdicts)

    @property
    def refused(self) -> int:
        """How many layouts were not taken since their traces do not fit."""
        return sum(bool(verdict.reason) for verdict in self.verdicts.values())

    def document(self, found: Plan) -> dict[str, Any]:
        """The content of plan.json for such a plan, with the timeline of a pipeline's step under `timeline`: rank
        of the pipeline, kind, stage, micro-batch, begin and end in seconds of each action."""
        told = found.to_json()
        told["memory"] = {"source": "formula"}
        layout, batch = found.chosen.layout, self.spec.train.global_batch
        parts = layout.accumulation(batch)
        if layout.pp == 1 or parts * layout.stages > MOST_ACTIONS:
            return told
        played = pipeline(self.shape, layout, parts, self.machine, program_of(self.spec), keep=True)
        actions = [(*action[:4], round(action[4], 6), round(action[5], 6)) for action in played.actions()]
        return {**told, "timeline": actions}

    @property
    def flops(self) -> dict[str, float]:
        """What a task says of FLOPs, see `orchestrator.train.task`."""
        return {"flops_per_token": needed_flops(self.shape), "peak_flops": self.machine.peak}

    def choose(self, workers: int) -> Layout | None:
        """The best layout for that number of workers; None if there is no legal one, or so few cannot hold what is
        saved."""
        if workers not in self._known or (workers in self._unasked and not self.is_busy()):
            try:
                self._known[workers] = self.plan(workers).chosen.layout if workers else None
            except InputError:
                self._known[workers] = None
        layout = self._known[workers]
        if layout and self.host is not None and worker_bytes(self.spec, self.shape, layout.world) > self.host:
            return None
        return layout

    def seconds(self, layout: Layout) -> float:
        """Predicted seconds per step."""
        return predict(self.spec, self.shape, layout, self.machine).seconds
