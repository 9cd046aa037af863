"""The weights that a model does not train: each rank reads its parts, or maps the copy that the ranks of a machine
share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from orchestrator.parallel.device import Device
from orchestrator.parallel.parallelize import Parallel
from orchestrator.parallel.parameter_shard import ParameterShard
from orchestrator.parallel.shared_base import SharedBase, share
from orchestrator.train.engines.state import initialise
from workloads.workload import Workload

T = TypeVar("T")
MAX_THREADS = 8
"""Most threads that draw initial values; each draws whole tensors."""


class FrozenWeights:
    """This rank's parts of a model's frozen parameters."""

    def __init__(self, workload: Workload, parallel: Parallel, device: Device, base: str) -> None:
        """Find the parameters; they stay uninitialised.

        Args:
            workload: the model.
            parallel: this rank's part of it.
            device: this rank's device.
            base: checksum of the weights if they are the same at every start, else empty. With it the ranks of a
                machine share one copy.
        """
        self._workload = workload
        self._parallel = parallel
        self._device = device
        self._base = base
        self._shared: SharedBase | None = None

    def fill(self, seed: int) -> None:
        """Fill the frozen parameters: read them, or map the copy that the ranks of this machine share."""
        self._fill_quantised(seed)
        frozen = self._parallel.frozen
        parameters = {name: p for stage in self._parallel.stages for name, p in stage.named_parameters()}
        own_parameters = [parameters[shard.name] for shard in frozen]
        if self._shared or not (self._base and own_parameters) or self._device.device.type != "cpu":
            if not self._shared:
                fill(self._workload, frozen, seed)
            return
        if any(
            isinstance(weight, DTensor) for weight in own_parameters
        ):  # ZeRO 3: every rank has a different part
            fill(self._workload, frozen, seed)
            return

        def fill_shared(tensors: Sequence[Tensor]) -> None:
            for shard, tensor in zip(frozen, tensors, strict=True):
                initialise(self._workload, shard.name, seed, shard.views(tensor))

        # Ranks share only what is cut alike: tensor-parallel ranks have different boxes of a weight.
        key = f"{self._base} {seed} {[(shard.name, shard.boxes) for shard in frozen]}"
        self._shared = share(key, [weight.shape for weight in own_parameters], fill_shared)
        if self._shared is None:
            fill(self._workload, frozen, seed)
            return
        for shard, parameter, tensor in zip(frozen, own_parameters, self._shared.tensors, strict=True):
            # The pages are mapped privately: a rank that writes to them by mistake gets its own copy.
            parameter.data = shard.parameter.data = tensor

    def close(self) -> None:
        """Give up the shared copy."""
        if self._shared:
            self._shared.close()

    def _fill_quantised(self, seed: int) -> None:
        def fill_one(name: str) -> None:
            cut, weight = self._parallel.quantised[name]
            stored = self._workload.stored(name, seed)
            assert stored is not None
            with torch.no_grad():
                weight.fill(stored, *cut.slices())

        _for_each(fill_one, self._parallel.quantised)


def fill(workload: Workload, shards: Iterable[ParameterShard], seed: int) -> None:
    """Fill a rank's parts of parameters with their initial values, several at once.

    Args:
        workload: draws or reads the values.
        shards: the parts to fill.
        seed: of values that are drawn.
    """

    def draw(shard: ParameterShard) -> None:
        with torch.no_grad():  # gradient mode is per thread
            initialise(workload, shard.name, seed, shard.views(shard.parameter))

    _for_each(draw, shards)


def _for_each(do: Callable[[T], None], tensors: Iterable[T]) -> None:
    """Call `do` for every tensor, in several threads. The order is free: no tensor's values depend on another's."""
    threads = min(torch.get_num_threads(), MAX_THREADS)
    if threads == 1:
        for tensor in tensors:
            do(tensor)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(do, tensors))
