"""The plan for a job's objective (time or cost), and the planner of a run. Torch-free and ray-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.resources import ResourceSpec
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.choose_layout import NO_VERDICTS, Plan, Verdict, plan, predict
from orchestrator.planner.demand import Demand
from orchestrator.planner.device import Machine
from orchestrator.planner.host_memory import state_bytes, worker_bytes
from orchestrator.planner.memory import MEMORY_SHARE, fits, needed_bytes
from orchestrator.planner.rollouts import rollout_time, with_rollout_time
from orchestrator.planner.search import TIE
from orchestrator.planner.simulation.operators import needed_flops
from orchestrator.planner.simulation.step import pipeline

COMPUTE_BOUND_SHARE = 0.7
"""Share of computation in a step above which fewer workers are not faster: on half of them a step computes twice as
long, or 1.4 times as long if workers share caches."""
MAX_TIMELINE_ACTIONS = 5000
"""Forward passes of a pipeline's step beyond which plan.json has no timeline."""


MAX_UNDERESTIMATE = 2.5
"""Ratio up to which a layout may need more memory than the formula predicts."""
MAX_OVERESTIMATE = 1.35
"""Ratio up to which the formula may predict more memory than a layout needs: 1.26 was measured for small layouts
(docs/predictions.md)."""


def planned(
    demand: Demand,
    shape: ModelShape,
    workers: int,
    machine: Machine,
    must_fit: bool = True,
    verdicts: Mapping[Layout, Verdict] = NO_VERDICTS,
) -> Plan:
    """Return the plan for the job's objective on at most `workers` workers.

    Objective `time`: the fastest layout. Objective `cost`: of the best layouts on `workers.min` workers, twice as many
    and so on, the one that takes least worker time (seconds x workers) and finishes within `limits.hours` as
    predicted; the fastest if none does. Among layouts with equal cost the faster one is chosen.

    Arguments and errors are those of `plan`.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of its model.
        workers: maximum number of ranks.
        machine: one worker.
        must_fit: whether a layout must fit.
        verdicts: results of traces.
    """
    fastest = plan(demand, shape, workers=workers, machine=machine, must_fit=must_fit, verdicts=verdicts)
    if demand.resources.objective == "time" or not fastest.fits:
        return fastest
    plans = [fastest, *_narrower(demand, shape, fastest, must_fit, verdicts)]
    return min(best_of(demand, plans), key=_seconds)


def faster_on_fewer(demand: Demand, shape: ModelShape, plan: Plan) -> Plan | None:
    """Return the fastest plan on fewer workers if it is faster than `plan` by more than TIE, else None.

    The plans compared are those on `workers.min` workers, twice as many and so on. A step that mostly computes is
    never faster on fewer workers, so nothing is compared then.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of its model.
        plan: its plan on all workers.
    """
    computes = plan.chosen.time.compute > COMPUTE_BOUND_SHARE * plan.chosen.seconds
    if computes or not plan.fits or not demand.searches_layout:
        return None
    cheapest = min(_narrower(demand, shape, plan), key=_seconds, default=None)
    return cheapest if cheapest and _seconds(cheapest) * (1.0 + TIE) < _seconds(plan) else None


def _narrower(
    demand: Demand,
    shape: ModelShape,
    candidate: Plan,
    must_fit: bool = True,
    verdicts: Mapping[Layout, Verdict] = NO_VERDICTS,
) -> list[Plan]:
    """Return the plans that fit on `workers.min` workers, twice as many and so on, but fewer than `candidate` has."""
    narrower = []
    for width in worker_counts(demand.resources.workers.min, candidate.chosen.layout.world)[:-1]:
        try:
            narrower_plan = plan(
                demand, shape, workers=width, machine=candidate.machine, must_fit=must_fit, verdicts=verdicts
            )
        except InputError:
            continue
        if narrower_plan.fits and narrower_plan.chosen.layout.world >= demand.resources.workers.min:
            narrower.append(narrower_plan)
    return narrower


def best_of(demand: Demand, plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans, at least one, that are equally good within TIE by the job's objective.

    The measure is seconds per step. For objective `cost` it is worker time, among the plans that finish within
    `limits.hours`, if there are any.

    Args:
        demand: says what a plan is to minimise.
        plans: to compare.
    """
    measure = _seconds
    if demand.resources.objective == "cost":
        hours = demand.hours or float("inf")
        if in_time := [
            candidate for candidate in plans if demand.steps * _seconds(candidate) <= 3600.0 * hours
        ]:
            plans = in_time
            measure = _cost
    lowest = min(map(measure, plans))
    return [candidate for candidate in plans if measure(candidate) <= lowest * (1.0 + TIE)]


def fits_with_margin(resources: ResourceSpec, plan: Plan) -> bool:
    """Whether the chosen layout fits even with MAX_UNDERESTIMATE times the predicted memory. It is then not traced.

    Args:
        resources: of the workers.
        plan: the plan.
    """
    on_cpu = not resources.per_worker.gpu
    needed = MAX_UNDERESTIMATE * plan.chosen.memory
    return fits(needed_bytes(plan.chosen.layout, needed, needed, on_cpu), plan.machine, on_cpu)


def may_fit(plan: Plan) -> bool:
    """Whether the chosen layout, which is too large by the formula, may fit by its trace."""
    return plan.chosen.memory <= MAX_OVERESTIMATE * plan.machine.memory * MEMORY_SHARE


def with_worker_range(resources: ResourceSpec, min_workers: int, max_workers: int) -> ResourceSpec:
    """Return the resources with `workers.min` and `workers.max` set to `min_workers` and `max_workers`.

    Args:
        resources: of the workers.
        min_workers: the new minimum.
        max_workers: the new maximum.
    """
    workers = resources.workers.model_copy(update={"min": min_workers, "max": max_workers})
    return resources.model_copy(update={"workers": workers})


def with_workers(resources: ResourceSpec, workers: int) -> ResourceSpec:
    """Return the resources limited to `workers` workers. The minimum is lowered to that number if it is larger.

    Args:
        resources: of the workers.
        workers: the new maximum.
    """
    return with_worker_range(resources, min(resources.workers.min, workers), workers)


def worker_counts(min_workers: int, max_workers: int) -> list[int]:
    """Return the numbers of workers to compare: `min_workers`, twice as many and so on, and `max_workers`.

    Args:
        min_workers: the first number.
        max_workers: the last number.
    """
    numbers = []
    while min_workers < max_workers:
        numbers.append(min_workers)
        min_workers *= 2
    return [*numbers, max_workers]


def _seconds(plan: Plan) -> float:
    return plan.chosen.seconds


def _cost(plan: Plan) -> float:
    """Return the worker time of a step: seconds x workers."""
    return plan.chosen.seconds * plan.chosen.layout.world


@dataclass(frozen=True)
class Planner:
    """Plans for one job. The controller asks repeatedly, and each number of workers is planned once.

    Attributes:
        demand: what the job asks of the planner.
        shape: the sizes of its model.
        machine: one worker.
        host: bytes of a worker's host memory besides its GPU; None if unknown.
        confirm: returns the traces' verdicts for a number of workers. It is called once for each number, if the formula
            leaves open whether the chosen layout fits.
        is_busy: whether the controller is busy with ranks. `confirm` is not called then, and the formula decides
            for the time being.
        verdicts: the verdicts so far.
    """

    demand: Demand
    shape: ModelShape
    machine: Machine
    host: float | None = None
    confirm: Callable[[int], Mapping[Layout, Verdict]] | None = None
    is_busy: Callable[[], bool] = lambda: False
    verdicts: dict[Layout, Verdict] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    _confirmed: set[int] = dataclasses.field(default_factory=set, repr=False, compare=False)
    _unconfirmed: set[int] = dataclasses.field(default_factory=set, repr=False, compare=False)
    _layouts: dict[int, Layout | None] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def plan(self, workers: int) -> Plan:
        """Return the plan of `planned`, in view of the verdicts so far."""
        chosen_plan = self._planned(workers, must_fit=False)
        if self._needs_traces(workers, chosen_plan):
            if not self.is_busy():
                return self._confirmed_plan(workers, chosen_plan)
            self._unconfirmed.add(workers)
        return chosen_plan if chosen_plan.fits else self._planned(workers)

    def _needs_traces(self, workers: int, plan: Plan) -> bool:
        """Whether traces must still confirm that the chosen layout fits."""
        if self.confirm is None or workers in self._confirmed:
            return False
        if plan.fits:
            return not fits_with_margin(self.demand.resources, plan)
        return self.demand.resources.must_fit and may_fit(plan)

    def _confirmed_plan(self, workers: int, plan: Plan) -> Plan:
        assert self.confirm is not None
        self._unconfirmed.discard(workers)
        self._confirmed.add(workers)
        new_verdicts = self.confirm(workers)
        self.verdicts.update(new_verdicts)
        if new_verdicts or not plan.fits:
            plan = self._planned(workers)
        self._confirmed.add(plan.chosen.layout.world)
        return plan

    def _planned(self, workers: int, must_fit: bool = True) -> Plan:
        return planned(
            self.demand,
            self.shape,
            workers=workers,
            machine=self.machine,
            must_fit=must_fit,
            verdicts=self.verdicts,
        )

    @property
    def refused(self) -> int:
        """Number of layouts whose traces do not fit."""
        return sum(bool(verdict.reason) for verdict in self.verdicts.values())

    def document(self, plan: Plan) -> dict[str, Any]:
        """Return the content of plan.json.

        `timeline` has (rank of the pipeline, kind, stage, micro-batch, begin, end) of each action of a pipeline's step,
        times in seconds. It is left out without a pipeline and for very long steps.
        """
        document = plan.to_json()
        document["memory"] = {"source": "formula"}
        if self.demand.rollout is not None:
            document["predicted"] |= with_rollout_time(plan, rollout_time(self.demand, self.shape, plan))
        layout = plan.chosen.layout
        micro_batches = layout.accumulation(self.demand.batch)
        if layout.pp == 1 or micro_batches * layout.stages > MAX_TIMELINE_ACTIONS:
            return document
        simulated = pipeline(self.shape, layout, micro_batches, self.machine, self.demand.program, keep=True)
        actions = [(*action[:4], round(action[4], 6), round(action[5], 6)) for action in simulated.actions()]
        return {**document, "timeline": actions}

    @property
    def flops(self) -> dict[str, float]:
        """The FLOPs that a task carries, see `orchestrator.train.task`."""
        return {"flops_per_token": needed_flops(self.shape), "peak_flops": self.machine.peak}

    def choose(self, workers: int) -> Layout | None:
        """Return the best layout for `workers` workers.

        None if no layout is legal, or if the memory of so few hosts cannot hold what is saved.
        """
        if workers not in self._layouts or (workers in self._unconfirmed and not self.is_busy()):
            try:
                self._layouts[workers] = self.plan(workers).chosen.layout if workers else None
            except InputError:
                self._layouts[workers] = None
        layout = self._layouts[workers]
        if layout is None or self.host is None:
            return layout
        state = state_bytes(self.demand.optimizer, self.demand.ema, self.shape, pruned=self.demand.pruned)
        return layout if worker_bytes(self.demand.resources, state, layout.world) <= self.host else None

    def seconds(self, layout: Layout) -> float:
        """Predicted seconds per step."""
        return predict(self.demand, self.shape, layout, self.machine).seconds
