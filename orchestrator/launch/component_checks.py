"""The lists of what the components of a job check.

A component's check stands in the component's own room and gets its part of the job.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from orchestrator.config.commit_steps import check_best
from orchestrator.config.own_code import code_of
from orchestrator.config.spec import JobSpec
from orchestrator.data.clean.check import check_cleaning
from orchestrator.data.prepare.record_kind import check_records
from orchestrator.data.sources.check import check_sources
from orchestrator.evaluate.check import check_tasks
from orchestrator.export.check import check_export, check_export_target
from orchestrator.launch.trial import check_trial
from orchestrator.optim.check import check_groups, check_own_update
from orchestrator.planner import prices
from orchestrator.planner.own_cost import check_own_cost
from orchestrator.prune.check import check_prune
from orchestrator.quantize.check import check_quantize
from orchestrator.train.reference_check import check_preferences
from orchestrator.train.rollouts.engine_check import check_engine
from orchestrator.train.rollouts.reward_check import check_reward_models
from orchestrator.train.verification_check import check_verification

Check = Callable[[], object]
"""A check of a component with its arguments bound. It raises InputError, and its result means nothing."""


class ComponentChecks:
    """The checks of a job's components, in the order in which their problems are shown."""

    def __init__(self, job: JobSpec) -> None:
        self._job = job

    def without_text(self) -> list[Check]:
        """Return the checks of components that read neither the text nor the model."""
        job = self._job
        return [
            partial(check_records, job.data, job.workload.objective, job.every_source),
            partial(check_preferences, job.workload, job.train, job.data.shuffle),
            partial(check_cleaning, job.data, job.workload.objective, job.workload.adapter is not None),
            partial(prices.check, job.limits, job.tune),
        ]

    def model_checks(self, workload: Any, prepared: str = "") -> list[Check]:
        """Return the checks of components that look at the model. The first problem ends them, because each relies on
        those before.

        Args:
            workload: the model and its objective.
            prepared: the folder of the run's data, if the run has begun.
        """
        job = self._job
        return [
            partial(check_groups, job.train.optimizer, workload),
            partial(check_prune, job.prune, workload),
            partial(check_quantize, job.quantize, workload),
            partial(check_verification, job.resources, job.parallel, workload),
            partial(check_export, job.checkpoint, workload, job.quantize),
            partial(check_engine, job.rollout, job.resources, workload),
            partial(check_tasks, job.evaluate, job.set_names, workload),
            partial(code_of, job.own_code),
            partial(check_own_cost, job.parallel, job.resources.workers.max),
            partial(check_own_update, job.train.optimizer, job.train.warmup_steps, job.train.steps),
            partial(
                check_trial,
                workload,
                prepared,
                data=job.data,
                train=job.train,
                seed=job.seed,
                draws=job.workload.draws,
                parallel=job.parallel,
                own_metrics=job.evaluate.own_metrics if job.evaluate else (),
                chosen_by=[
                    (job.checkpoint.best_metric or "").partition(".")[2],
                    (job.stop_when.metric if job.stop_when else "").partition(".")[2],
                    *((job.evaluate and job.evaluate.metrics) or ()),
                ],
                continues=bool(job.evaluate and (job.evaluate.samples or job.evaluate.tasks)),
                any_length=bool(job.evaluate and job.evaluate.tasks),
            ),
        ]

    def before_loading(self, begins: bool) -> list[Check]:
        """Return the checks of components that need no model, but may read the text.

        Args:
            begins: see `check_sources`.
        """
        job = self._job
        return [
            partial(check_sources, job.data, job.workload.objective, job.set_sources, begins),
            *self.without_text(),
            partial(check_best, job.checkpoint, job.train, job.evaluate),
            partial(check_export_target, job.checkpoint.export_to),
            partial(check_reward_models, job.rewards),
        ]
