"""The planner's input: the properties of a job that decide which layouts it may have and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

from orchestrator.config.records import OF_ANSWERS
from orchestrator.config.resources import ResourceSpec, Workers
from orchestrator.config.spec import JobSpec
from orchestrator.optim.config import OptimizerSpec
from orchestrator.parallel.config import ParallelChoice
from orchestrator.parallel.engine_rules import engine_problems
from orchestrator.parallel.layout import Layout
from orchestrator.planner.simulation.operators import Program
from orchestrator.quantize.config import QuantizeSpec
from orchestrator.train.config import Precision, TrainSpec
from orchestrator.train.rollouts.config import RolloutSpec, beside_rollout_workers, trains_as_it_reads


@dataclass(frozen=True)
class Demand:
    """The constraints on a plan, and the work of a step besides the model.

    Attributes:
        parallel: the layout that is asked for, or the pinned part of it.
        resources: the workers, and what a plan is to minimise.
        precision: the precision of training.
        program: how the engine computes a step.
        optimizer: the optimizer, for the size of its state.
        batch: samples of a global batch.
        shards: virtual shards of a batch under bitwise determinism; 0 without it.
        ema: the decay of a moving average of the weights; None without one.
        compares: whether the objective compares answers, so that the head computes all tokens at once.
        rollout: how answers are generated; None if the objective does not learn from rewards.
        trains_as_it_reads: whether training computes the log-probabilities of answers as the pass that reads them does,
            if the model has no experts.
        teacher_workers: the number of teacher workers; None without any.
        steps: steps of the run.
        hours: hours within which it should finish; None for no limit.
        pruned: bytes of masks and scores for each parameter of the layers; 0 if none is pruned.
        engine_problems: returns why a layout's engine cannot run the job.
    """

    parallel: ParallelChoice
    resources: ResourceSpec
    precision: Precision
    program: Program
    optimizer: OptimizerSpec
    batch: int
    shards: int
    ema: float | None
    compares: bool
    rollout: RolloutSpec | None
    trains_as_it_reads: bool
    teacher_workers: Workers | None
    steps: int
    hours: float | None
    pruned: float
    engine_problems: Callable[[Layout], list[str]] = field(repr=False, compare=False)

    @property
    def searches_layout(self) -> bool:
        """Whether the planner chooses the layout, or the part of it that is not pinned."""
        return self.parallel == "auto" or self.parallel.is_partial

    @property
    def shared_resources(self) -> ResourceSpec:
        """The resources with rollout or teacher workers among the workers, from which follows what a worker has of its
        node."""
        return beside_rollout_workers(self.resources, self.extra_workers)

    @property
    def extra_workers(self) -> Workers | None:
        """The number of rollout workers or teacher workers; None without any."""
        return self.rollout.workers if self.rollout else self.teacher_workers

    @property
    def decoded_at_once(self) -> int:
        """Answers that a rank decodes in one batch; 0 if the ranks generate none."""
        return self.rollout.decoded_by_ranks if self.rollout else 0

    @property
    def on_gpu(self) -> bool:
        """Whether workers have a GPU."""
        return self.resources.per_worker.gpu > 0


def demand_of(spec: JobSpec) -> Demand:
    """Return what a job asks of the planner."""
    train = spec.train
    return Demand(
        parallel=spec.parallel,
        resources=spec.resources,
        precision=train.dtype,
        program=_program_of(train, spec.workload.dropouts, spec.checkpoint.every, spec.quantize),
        optimizer=train.optimizer,
        batch=train.global_batch,
        shards=train.bitwise_shards,
        ema=spec.checkpoint.ema,
        compares=spec.workload.objective in OF_ANSWERS,
        rollout=spec.rollout,
        trains_as_it_reads=trains_as_it_reads(
            spec.workload, train, has_experts=False, on_gpu=spec.resources.per_worker.gpu > 0
        ),
        teacher_workers=spec.distill.teacher_workers if spec.distill else None,
        steps=train.steps,
        hours=spec.limits.hours,
        pruned=spec.pruned_bytes,
        engine_problems=partial(
            engine_problems,
            train,
            spec.workload,
            spec.resources.per_worker.gpu,
            prunes=spec.prune is not None,
            verifies=spec.resources.verify is not None,
            speaks=spec.evaluate is not None and spec.evaluate.samples is not None,
        ),
    )


def _program_of(
    train: TrainSpec, dropouts: tuple[float, float], commit_every: int, quantize: QuantizeSpec | None
) -> Program:
    """Return how the engine computes this job's steps. ZeRO gathers weights and sums gradients in fp32."""
    return _program(
        width=4.0 if train.dtype == "fp32" else 2.0,
        in_8_bits=2 if train.dtype == "fp8" else 0,
        dropout=dropouts[0] > 0,
        attention=dropouts[1] > 0,
        compiled=train.compile,
        commit_every=commit_every,
        optimizer=str(train.optimizer.name),
        reference=train.reference == "held",
        rounds_weights=quantize is not None,
        rounds_inputs=quantize is not None and quantize.activations != "none",
    )


@lru_cache
def _program(
    width: float,
    in_8_bits: int,
    dropout: bool,
    attention: bool,
    compiled: bool,
    commit_every: int,
    optimizer: str,
    reference: bool,
    rounds_weights: bool,
    rounds_inputs: bool,
) -> Program:
    return Program(
        width,
        in_8_bits,
        dropout=dropout,
        attention_dropout=attention,
        compiled=compiled,
        products_again=float(compiled),
        commit_every=commit_every,
        optimizer=optimizer,
        reference=reference,
        rounds_weights=rounds_weights,
        rounds_inputs=rounds_inputs,
    )
