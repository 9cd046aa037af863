"""The forward and backward passes of the torch engine: from micro-batches to gradients summed over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from orchestrator.checkpoint.reader import Reader
from orchestrator.optim.gradient_clipping import squared_norm
from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import EvaluationSums
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.parallelize import Parallel
from orchestrator.parallel.router_load import RouterLoad, ratios
from orchestrator.parallel.runner import runner_of
from orchestrator.parallel.step_clock import COMMUNICATION, OPTIMIZER, StepClock, Stopwatch
from orchestrator.prune.head_penalty import HeadPenalty
from orchestrator.train.distillation.teacher import Teacher
from orchestrator.train.engines.config import EngineConfig
from orchestrator.train.engines.forward_passes import ForwardPasses
from orchestrator.train.engines.loss_scale import LossScale
from orchestrator.train.engines.losses import arithmetic_in, losses_of
from workloads.workload import Batch, Workload


@dataclass(frozen=True)
class StepSums:
    """What the passes of one training step computed, over all ranks except `busy_seconds`.

    Attributes:
        loss: mean over predicted tokens, in nats; None if the step predicts nothing.
        metrics: other metrics of the workload.
        square: squared norm of the gradients as they are, before `factor`.
        factor: what gradients are multiplied by, to be those of the mean loss.
        routed: load of each router, as `Workload.routing` counts it.
        busy_seconds: see `Metrics`.
    """

    loss: float | None
    metrics: dict[str, float]
    square: float
    factor: float
    routed: Mapping[str, Tensor]
    busy_seconds: float


class TorchPasses:
    """Runs the micro-batches of a step under any layout.

    Attributes:
        losses: the loss of each micro-batch, and the sums over them.
        runner: runs micro-batches one after the other, through a pipeline, or compared with each other.
        scale: the loss scale of fp16.
        forward: the passes that change no state.
        teacher: the model that every training and evaluation step learns from; None without one.
    """

    def __init__(
        self,
        config: EngineConfig,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: Device,
        parallel: Parallel,
        clock: StepClock,
    ) -> None:
        """Prepare the passes.

        Args:
            config: how to compute a step.
            workload: the model and its objective.
            layout: how the ranks divide the work.
            mesh: its process groups.
            device: this rank's device.
            parallel: this rank's part of the model.
            clock: measures the parts of a step.
        """
        self._layout = layout
        self._device = device
        self._parallel = parallel
        self._clock = clock
        # With plain data parallelism a rank first waits for others in the sum of gradients. The time before that sum
        # is then the time that this rank was busy.
        self._is_alone_until_reduction = layout.world == layout.dp and layout.zero <= 1 and layout.ep == 1
        self._busy: Stopwatch | None = None
        self.losses = losses_of(config, workload, layout, mesh, device)
        self._routing = RouterLoad(workload, mesh, device.device)
        self.runner = runner_of(
            stages=parallel.stages,
            workload=workload,
            layout=layout,
            mesh=mesh,
            data=parallel.data,
            losses=self.losses,
            device=device,
            clock=clock,
        )
        self.scale = LossScale(config.train.dtype == "fp16")
        self._heads = HeadPenalty(config.head_penalty, parallel.data.shards, device.device)
        self.forward = ForwardPasses(self.losses, self._routing, parallel.stages, self._evaluate)
        self.teacher: Teacher | None = None

    def compute_gradients(self, micro_batches: Sequence[Batch]) -> None:
        """Compute the gradients of micro-batches, summed over the ranks."""
        self._parallel.data.begin()
        self.losses.begin(micro_batches)
        self.losses.scale = self.scale.value
        self._busy = Stopwatch(self._device.device)
        self.runner.train(self._taught(micro_batches))
        self._busy.stop()
        self._clock.switch(COMMUNICATION if self._layout.world > 1 else OPTIMIZER)
        # Before the sum over replicas, which then adds complete gradients.
        self._parallel.shared.sum()
        self._parallel.data.finish()

    def sums(self) -> StepSums:
        """Return what `compute_gradients` computed, with the penalty of open heads in the gradients.

        All ranks call it together, once a step.
        """
        self._heads.add_gradients(self.scale.value)
        # The squared norm is computed on shards of gradients. It travels with the metrics and the load of the routers.
        mine = squared_norm(self._parallel.data.shards)
        loss, metrics, count, square, load = self.losses.over_ranks(mine, self.take_routing())
        routed = self._routing.named(load)
        waits = not self._is_alone_until_reduction or (self.teacher is not None and self.teacher.gathers)
        busy = 0.0 if waits or self._busy is None else self._busy.seconds()
        # The backward pass differentiated (sum / expected) x scale; this makes it the gradient of sum / count.
        factor = self.losses.expected / count / self.scale.value
        return StepSums(
            loss=loss,
            metrics={**metrics, **ratios(routed), **self._heads.metrics},
            square=square,
            factor=factor,
            routed=routed,
            busy_seconds=busy,
        )

    def take_routing(self) -> Tensor:
        """Return this rank's load of the routers in the passes since the last call, see `RouterLoad.take`."""
        return self._routing.take(self._parallel.stages)

    def evaluate(self, micro_batches: Sequence[Batch]) -> EvaluationSums:
        """See `Engine.eval_step`."""
        return self.forward.evaluate(self._taught(micro_batches))

    def load(self, reader: Reader) -> None:
        """Load from a commit what passes depend on."""
        self.scale.load(reader)
        self.losses.arithmetic = arithmetic_in(reader)

    def _taught(self, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the micro-batches with the teacher's outputs for them, if this rank has a teacher."""
        return micro_batches if self.teacher is None else self.teacher.taught(micro_batches)

    def _evaluate(self, micro_batches: Sequence[Batch]) -> None:
        """Run the forward passes in evaluation mode, where dropout is off."""
        for stage in self._parallel.stages:
            stage.eval()
        self.runner.evaluate(micro_batches)
        for stage in self._parallel.stages:
            stage.train()
