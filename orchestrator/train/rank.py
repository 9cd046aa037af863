"""One rank of a gang: it restores a commit, then trains step by step, evaluates and commits."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from cluster.workers.clock import wall
from cluster.workers.worker_context import WorkerContext
from orchestrator.data.samples.batches import Prefetch, StepSamples
from orchestrator.evaluate.config import StopWhen
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.rank_messages import agree
from orchestrator.resolve.training_inputs import TrainingInputs
from orchestrator.storage.row_types import EvaluationRow
from orchestrator.train.commits import Commits
from orchestrator.train.computed_values import ComputedValues
from orchestrator.train.engines.engine import Engine, Metrics
from orchestrator.train.evaluation import Evaluator, MakeEvaluator
from orchestrator.train.profile import StepProfiler
from orchestrator.train.rank_record import RankRecord, step_row
from orchestrator.train.restore import Restorer
from orchestrator.train.step_samples import MakeReader, StepPlan, seed_step
from orchestrator.train.task import Task
from orchestrator.train.training_progress import TrainingProgress
from orchestrator.train.verification import Device, Verification, VerifySpec
from workloads.workload import Batch

MAX_PAUSE = 0.5
"""Maximum seconds between two checks for new samples."""


def await_samples(prefetched: Prefetch[Any], context: WorkerContext) -> bool:
    """Wait until all ranks have the samples of the next step.

    The wait has no limit here: the controller ends a gang that waits while no data is being prepared, and no logits of
    a teacher are computed. The status of the run says that it waits.

    Args:
        prefetched: reads the samples.
        context: this rank's connection to the controller.

    Returns:
        False if any rank must stop before the samples are ready. All ranks get the same answer.
    """
    context.set_waiting(True)
    pause = MAX_PAUSE / 128
    is_told = False
    while not (agreed := agree(0, context.stop_requested(), ready=prefetched.is_ready)).ready:
        if agreed.stop:
            break
        time.sleep(pause)
        if pause == MAX_PAUSE and not is_told:  # all ranks come here together
            context.begin_stage("waiting for samples, or for logits of the teacher")
            is_told = True
        pause = min(2 * pause, MAX_PAUSE)
    if is_told:
        context.begin_stage("training")
    context.set_waiting(False)
    return agreed.ready


def is_growing(streaming: bool, is_complete: bool) -> bool:
    """Whether streamed data is still incomplete on some rank. All ranks get the same answer.

    Args:
        streaming: whether the job trains while data is prepared.
        is_complete: whether this rank sees all of it.
    """
    return streaming and not agree(0, False, ready=is_complete).ready


class Rank:
    """One rank of a gang, from the restored commit to the end of its task.

    All ranks take the same decisions at the same step, because each follows from values that `agree` has combined.
    """

    def __init__(
        self,
        task: Task,
        plan: StepPlan,
        layout: Layout,
        context: WorkerContext,
        inputs: TrainingInputs,
        make_engine: Callable[[int], Engine],
        make_evaluator: MakeEvaluator,
        make_commits: Callable[[Engine], Commits],
        make_reader: MakeReader,
        restorer: Restorer,
        stop_when: StopWhen | None,
        verify: VerifySpec | None,
        device: Device,
        memory_before: int = 0,
        values: Sequence[ComputedValues] = (),
        growing: bool = False,
    ) -> None:
        """Build the engine and restore the commit, or initialise the weights.

        Args:
            task: what this gang does, from which commit to which step.
            plan: what a step reads.
            layout: how the ranks divide the work.
            context: this rank's number and its connection to the controller.
            inputs: the workload and its batches.
            make_engine: returns the engine that continues after the given number of steps.
            make_evaluator: returns what evaluates an engine.
            make_commits: returns what saves the state of an engine.
            make_reader: returns what reads the samples of steps that continue from a progress.
            restorer: restores commits.
            stop_when: when a run ends early; None for never.
            verify: which steps are computed again, and by whom; None for none.
            device: this rank's device.
            memory_before: bytes in use before the model was built.
            values: values that other models compute for every sample, if the objective needs them.
            growing: whether some of the data is still being prepared, or some logits of a teacher.
        """
        self._task = task
        self._plan = plan
        self._stop_when = stop_when
        self._layout = layout
        self._context = context
        self._device = device
        self._make_engine = make_engine
        self._restorer = restorer
        self._verification = Verification.for_rank(
            verify, layout, context.rank_info.rank, train=plan.train, device=device
        )
        self._growing = growing
        self._engine = make_engine(task.restore or 0)
        self._faults = task.parsed_faults
        self._stopped = False  # whether a stop came while values were computed that training needs
        for computed_values in values:
            inputs = self._with_values(inputs, computed_values)
        self._make_evaluator: Callable[[Engine], Evaluator] = lambda engine: make_evaluator(
            engine=engine, inputs=inputs, between=lambda step: self._inject(step, in_evaluation=True)
        )
        self._evaluator = self._make_evaluator(self._engine)
        self._last = min(-(-task.until // plan.reading.steps) * plan.reading.steps, plan.train.steps)
        self._record = RankRecord(memory_before)
        self._commits = make_commits(self._engine)
        self._weight_facts: dict[
            str, Any
        ] = {}  # facts about the restored weights, for an evaluation-only row
        self._progress = self._restore()
        self._sound_until = self._progress.sound_until(verify.every) if verify is not None else 0
        self._reader = make_reader(inputs.batches, self._progress, self._verification.replicas_to_read)
        self._evaluations: list[EvaluationRow] = []  # evaluations since the last step's row

    def train(self) -> dict[str, Any]:
        """Train to the end of the task. The last commit is published when this returns."""
        profiler = self._profiler = StepProfiler(self._context, self._task, lambda: self._engine.clock)
        prefetch = Prefetch(self._reader, self._progress.step, self._reader.ahead, self._last)
        with self._commits, profiler, prefetch as prefetched:
            self._context.begin_stage("training")
            # An evaluation may be due now: before the first step, or because a stop cut it short in the last attempt.
            stop = self._stopped or (not self._is_over and not self._evaluate())
            if not self._is_over:
                self._commits.before_training(dataclasses.asdict(self._progress))
            while not self._is_over and not stop:
                waits = self._growing and not self._is_within_rollout  # else a stop could end a rollout
                stop = waits and not await_samples(prefetched, self._context)
                stop = stop or self._step(prefetched)
                if not stop and not self._is_over and self._progress.step in self._plan.train.thaw:
                    self._thaw()
            self._context.begin_stage("saving the last checkpoint")
            self._commits.finish(dataclasses.asdict(self._progress))
        step = self._progress.step
        if step >= self._plan.train.steps:
            reason = "steps"
        elif stop:
            reason = "stop"
        elif self._progress.is_on_plateau(self._stop_when):
            reason = "plateau"
        else:
            reason = "until"
        return {"step": step, "ended": reason}

    def close(self) -> None:
        """Free the engine's memory."""
        self._engine.close()

    def _thaw(self) -> None:
        """Continue with more trained parameters.

        Waits for the commit of this step and restores it into a new engine, exactly as another attempt would.
        """
        step = self._progress.step
        self._commits.finish(dataclasses.asdict(self._progress))
        self._context.set_waiting(True)
        self._engine.close()
        self._engine = self._make_engine(step)
        self._evaluator = self._make_evaluator(self._engine)
        self._commits.continue_with(self._engine)
        with self._device.long_lived():
            self._engine.load(self._restorer.open(step)[1])
        self._context.set_waiting(False)

    def _with_values(self, inputs: TrainingInputs, values: ComputedValues) -> TrainingInputs:
        """Return the inputs with another model's outputs for every sample; compute what is missing now.

        A stop cuts the computation short. The values so far are kept, and this gang does not train.
        """
        if not values.are_complete:
            values.compute(
                self._engine,
                self._layout,
                self._context,
                not self._task.evaluate_only,
                lambda: self._inject(0, in_evaluation=True),
            )
            self._stopped = not values.are_complete
        return values.joined(inputs)

    def evaluate(self) -> dict[str, Any]:
        """Evaluate the restored commit, whether or not an evaluation is due."""
        step = self._progress.step
        row = self._evaluator.evaluate(step, self._task.attempt, heeds_stop=False)
        evaluation = {**(row or {}), **self._weight_facts}
        return {"step": step, "ended": "last_evaluation_step", "evaluation": evaluation}

    @property
    def _is_over(self) -> bool:
        progress = self._progress
        # The last commit must not be within a rollout, whose answers the next attempt would not have.
        is_on_plateau = progress.is_on_plateau(self._stop_when) and not self._is_within_rollout
        return progress.step >= self._last or is_on_plateau

    def _restore(self) -> TrainingProgress:
        """Load the commit that the task names, or initialise the weights."""
        self._context.begin_stage("loading the weights")
        with self._device.long_lived():
            if self._task.restore is None:
                self._engine.initialise(self._plan.seed)
                return TrainingProgress.for_new_run(self._task.skips)
            progress, self._weight_facts = self._restorer.restore(self._task.restore, self._engine)
        return progress

    def _step(self, prefetched: Prefetch[StepSamples]) -> bool:
        """Do one optimizer step, write its row and, if due, evaluate and commit. Return whether to stop now."""
        started = time.perf_counter()
        steps_done = self._progress.step  # steps before this one
        self._inject(steps_done + 1)
        self._profiler.next(steps_done + 1)
        self._context.set_waiting(True)
        samples = prefetched.next()
        self._context.set_waiting(False)
        waited = time.perf_counter() - started
        with self._progress.generating(self._plan.reading):
            step_rows = self._reader.rows(samples, self._engine, self._progress.step, self._task)
        lr = self._progress.learning_rate(self._plan.train)
        metrics = self._compute(step_rows.batches, samples.others, lr)
        parts = self._engine.clock.take()
        with self._progress.generating(self._plan.reading):
            collected = self._reader.collect(steps_done + 1)
        computed = time.perf_counter()
        busy = waited + metrics.busy_seconds if metrics.busy_seconds else 0.0
        self._commits.receive()
        # A few numbers over a tree of CPUs. After it every rank knows the same, and so decides the same.
        agreed = agree(
            digest=step_rows.digest,
            stop=self._context.stop_requested(),
            failures=self._commits.failures,
            ready=self._commits.ready,
            snapshot_step=self._commits.snapshot_step,
            failed_step=self._commits.failed_step,
            busy=busy,
            memory=self._record.memory,
        )
        self._commits.note_agreed(agreed)
        if self._layout.world > 1:
            parts["agreement"] = time.perf_counter() - computed
        stability = self._plan.train.stability
        self._progress.check_stable(metrics.loss, metrics.grad_norm, stability, self._plan.reading)
        self._progress = self._progress.after_step(
            metrics.loss,
            agreed.digest,
            reading=self._plan.reading,
            tokens=self._plan.tokens,
            stability=stability,
        )
        is_verified = self._verification.is_due(steps_done + 1)
        if is_verified:
            self._progress = dataclasses.replace(self._progress, verified=steps_done + 1)
        row = step_row(
            metrics,
            self._progress,
            self._plan,
            self._layout,
            self._task,
            lr=lr,
            seconds=time.perf_counter() - started,
            data_seconds=waited,
            share=samples.share,
        )
        if samples.padding is not None:
            row["padding"] = samples.padding
        row |= step_rows.metrics | collected
        if is_verified:
            row["verified_by"] = self._verification.by
        row["busy_seconds"] = agreed.busy if busy else ()
        row |= self._record.row(agreed.memory)
        row |= {f"{part}_seconds": round(seconds, 6) for part, seconds in parts.items()}
        stop = agreed.stop and not self._is_within_rollout
        if not stop or self._progress.step == self._last:
            stop |= not self._evaluate()
            row["time"] = wall()
        row["evaluation_seconds"] = sum(evaluation["seconds"] for evaluation in self._evaluations)
        if self._evaluations:
            row["evaluations"] = self._evaluations
            self._evaluations = []
        progress = dataclasses.asdict(self._progress)
        final = stop or self._is_over
        if final:  # the copy of the last commit then needs no more memory than a step
            self._device.trim()
        row["commit_seconds"] = self._commits.after_step(
            progress, row, agreed, final=final, may_save=not self._is_within_rollout
        )
        row["saves"] = self._commits.outcomes()
        self._context.report(
            self._progress.step,
            row if self._context.rank_info.rank == 0 else None,
            hold=0 if final else self._commits.rows_to_hold(self._progress.step),
        )
        return stop

    def _evaluate(self) -> bool:
        """Evaluate if an evaluation is due after this step and not done yet.

        Returns:
            False, on all ranks, if a stop cut the evaluation short. Training must then end at this step, and the
            next attempt evaluates its commit.
        """
        step = self._progress.step
        # A task that does not commit is a replay, which compares training only.
        is_due = self._task.commit and self._evaluator.is_due(step)
        if not is_due or self._progress.last_evaluation_step == step:
            return True
        # No attempt follows the last step, so a stop does not cut its evaluation short.
        heeds_stop = step < self._last and not self._is_within_rollout
        with self._progress.evaluating(self._plan.reading):
            row = self._evaluator.evaluate(step, self._task.attempt, heeds_stop=heeds_stop)
        if row is not None:
            self._evaluations.append(row)
            self._progress = self._progress.with_evaluation(row["sets"], self._evaluator.stop_when(step))
        return row is not None

    def _inject(self, step: int, in_evaluation: bool = False) -> None:
        """Apply the injected faults of this rank and step. A fault that asks for it sets the weights to NaN."""
        info = self._context.rank_info
        for fault in self._faults:
            if fault.apply(info.rank, info.world_size, step, self._task.attempt, in_evaluation):
                self._engine.poison()
            if not in_evaluation and fault.spoils(info.rank, info.world_size, step, self._task.attempt):
                self._engine.damage(fault.kind, seed=step)

    def _compute(self, micro_batches: list[Batch], others: Sequence[list[Batch]], lr: float) -> Metrics:
        """Run the engine's step, verified if that is due; add the step and the pipeline stage to an error's notes.

        Args:
            micro_batches: the rows of this rank.
            others: those of replicas that this rank computes again.
            lr: the learning rate.
        """
        steps_done = self._progress.step
        try:
            with self._record.watch_step():
                check = None
                if self._verification.is_due(steps_done + 1):
                    check = self._verification.begin(
                        self._engine,
                        micro_batches,
                        others,
                        step=steps_done + 1,
                        verified=max(self._progress.verified, self._sound_until),
                        seed=lambda role: seed_step(self._plan.seed, steps_done, role),
                    )
                # Again after the verification, which has drawn numbers for the replicas that it computes.
                seed_step(self._plan.seed, steps_done, self._context.rank_info.rank)
                return self._engine.train_step(micro_batches, lr, check)
        except Exception as error:
            stage = self._layout.coordinate(self._context.rank_info.rank)["pp"]
            error.add_note(f"at step {self._progress.step + 1}, pipeline stage {stage}")
            raise

    @property
    def _is_within_rollout(self) -> bool:
        return self._progress.step % self._plan.reading.steps != 0
