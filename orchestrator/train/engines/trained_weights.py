"""The weights that a model trains: this rank's shards, and everything that changes with an update of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.reader import Reader
from orchestrator.config.errors import InputError
from orchestrator.optim.gradient_clipping import clip_factor
from orchestrator.optim.groups import set_lr
from orchestrator.parallel.device import Device
from orchestrator.parallel.full_matrices import FullMatrices
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.parallelize import Parallel
from orchestrator.prune.names import pruned_names
from orchestrator.prune.pruner import Pruner
from orchestrator.train.engines.config import EngineConfig
from orchestrator.train.engines.engine import StepCheck
from orchestrator.train.engines.flaw import Flaw
from orchestrator.train.engines.frozen_weights import fill
from orchestrator.train.engines.moving_average import MovingAverage
from orchestrator.train.engines.optimizer_maker import OptimizerMaker
from orchestrator.train.engines.rounding import Rounding
from orchestrator.train.engines.state import (
    begin_state,
    committed_shapes,
    committed_slot,
    pieces,
    restore,
    shards_to_save,
)
from orchestrator.train.engines.update_again import UpdateAgain
from workloads.workload import Workload


class TrainedWeights:
    """This rank's shards of the trained parameters, with their optimizer, moving average, masks and rounding.

    Attributes:
        shards: the parts of parameters that this rank updates.
        device: where the shards are; a rank may have none.
        optimizer: holds the optimizer states by parameter.
        steps: updates so far.
        flaw: an injected fault of the arithmetic; None without.
    """

    def __init__(
        self, config: EngineConfig, workload: Workload, parallel: Parallel, mesh: Mesh, device: Device
    ) -> None:
        """Build the optimizer; weights stay uninitialised.

        Args:
            config: how to compute a step.
            workload: the model and its objective.
            parallel: this rank's part of the model.
            mesh: the process groups of the layout.
            device: this rank's device.
        """
        self._spec = config.train.optimizer
        self._workload = workload
        self._parallel = parallel
        self.shards = parallel.data.shards
        self._saved_shards = shards_to_save(self.shards)
        self._maker = OptimizerMaker(self._spec, workload, parallel, mesh, device)
        self.device = self._maker.device
        self.optimizer = self._maker.make(self.shards)
        self._update_again = UpdateAgain(
            self.shards,
            parallel.cuts,
            spec=self._spec,
            slots=self._maker.slots,
            build=self._maker.make,
            device=self.device,
        )
        self.steps = 0
        self.flaw: Flaw | None = None
        self._rounding = Rounding(parallel.stages, config.quantize)
        self._average = MovingAverage(config.ema, [shard.parameter for shard in self.shards])
        names = pruned_names(config.prune, workload)
        cuts = {name: cut for name, cut in parallel.cuts.items() if name in names}
        full = FullMatrices(cuts, self.shards, mesh, self.device)
        self._pruner = Pruner(config.prune, names, self.shards, full)

    @property
    def pruning_metrics(self) -> dict[str, float]:
        """Metrics of the masks; empty without pruning."""
        return self._pruner.metrics

    def mask_gradients(self) -> None:
        """Set the gradients of pruned weights to zero. Call it before the norm of the gradients is computed."""
        self._pruner.mask_gradients()

    @torch.no_grad()
    def update(self, lr: float, norm: float, factor: float, check: StepCheck | None) -> None:
        """Update the weights, and everything that follows from them.

        Args:
            lr: the learning rate.
            norm: norm of the scaled gradients, by which they are clipped.
            factor: what the gradients must be multiplied by.
            check: compares the update with what other ranks computed; None in a step that is not verified.
        """
        # One factor for everything, folded with clipping into a single pass over the gradients.
        scale = factor * clip_factor(norm, self._spec.clip)
        gradients = [shard.parameter.grad for shard in self.shards if shard.parameter.grad is not None]
        if scale != 1.0 and gradients:
            # In place and in one kernel: a copy of all gradients would raise the peak of memory exactly at the update.
            torch._foreach_mul_(gradients, scale)
        set_lr(self.optimizer.param_groups, lr)
        if check is None:
            self.optimizer.step()
            if self.flaw is not None:
                self.flaw.bend_updates([shard.parameter for shard in self.shards])
        else:
            self._update_again.step(self.optimizer, lr, check, self.flaw)
        self.steps += 1
        # The order matters: masks first, so that the average and the weights that `publish` sends are pruned. Rounding
        # is a function of the number of updates, and `publish` needs the final shards.
        self._pruner.update(self.steps, scale, self.optimizer, self._average.of)
        self._rounding.at(self.steps)
        self._average.update()
        self._parallel.data.publish()

    @torch.no_grad()
    def swap_average(self) -> None:
        """See `Engine.swap_average`."""
        self._average.swap()
        self._parallel.data.publish()

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill the weights with their initial values, and begin without any update.

        Each element depends on (seed, name, place) alone, so every layout begins with the same weights without a
        broadcast.
        """
        fill(self._workload, self.shards, seed)
        self._parallel.data.publish()
        self.optimizer = self._maker.make(self.shards)
        # Before the first pass, whose activations would lie between the states otherwise.
        for shard in self.shards:
            begin_state(shard, self.optimizer, self._maker.slots)
        self.steps = 0
        self._rounding.at(0)
        self._average.begin()
        self._pruner.begin()

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield the weights, optimizer states, averages and masks that this rank saves."""
        yield from pieces(self._saved_shards, self.optimizer, self._maker.slots, self._average.of)
        for shard in self._saved_shards:
            yield from self._pruner.pieces(shard)

    def step_piece(self) -> TensorPiece:
        """Return the number of updates, which one rank saves."""
        return full_piece("optim.step", torch.tensor(self.steps, dtype=torch.int64))

    def check(self, reader: Reader) -> None:
        """Raise InputError if a commit belongs to another model or lacks optimizer states."""
        thawing = self._thawing(reader)
        reader.manifest.check_shapes(committed_shapes(self._workload, thawing))
        for shard in self.shards:
            for slot in () if shard.name in thawing else self._maker.slots(shard.name):
                if committed_slot(shard.name, slot) not in reader.manifest.tensors:
                    raise InputError(
                        f"has no {slot.name} of {shard.name}: the optimizer of that version updated {shard.name} in "
                        "another way",
                        f"step {reader.manifest.step}",
                        "continue with the version that wrote it, or begin a new run with workload.init_from",
                    )

    @torch.no_grad()
    def restore(self, reader: Reader, seed: int) -> None:
        """Load the weights and all that belongs to them from a commit.

        Args:
            reader: the commit.
            seed: of the parameters that begin to train at its step.
        """
        thawing = self._thawing(reader)
        fill(self._workload, [shard for shard in self.shards if shard.name in thawing], seed)
        restore(
            self.shards,
            self.optimizer,
            slots=self._maker.slots,
            averages=self._average.of,
            reader=reader,
            thawed=self._workload.thawed_after,
        )
        self._pruner.restore(reader)
        self.steps = int(reader.read("optim.step"))
        self._rounding.at(self.steps)
        self._average.go_on(self.steps)
        self._parallel.data.publish()

    def optimizer_tensors(self) -> list[Tensor]:
        """Return the tensors that stay between two steps besides weights and gradients."""
        slots = [item for state in self.optimizer.state.values() for item in state.values()]
        tensors = [*slots, *self._average.of.values(), *self._pruner.tensors]
        return [item for item in tensors if isinstance(item, Tensor)]

    def _thawing(self, reader: Reader) -> list[str]:
        """Return the parameters that begin to train at a commit's step: it has no optimizer state of them yet."""
        step = reader.manifest.step
        return [name for name, at in self._workload.thawed_after.items() if at == step]
