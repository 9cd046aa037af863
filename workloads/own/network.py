"""The module that trains an own model: it takes our batches, and may be one stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.own.declared import blocks_of, compares, stages_of
from workloads.own.generate import next_logits
from workloads.workload import Batch

ASKED = "asked"
"""The key of a batch whose logits are wanted instead of its losses."""
Hidden = Tensor | tuple[Tensor, ...]
"""The value that one stage of an own model hands to the next."""


class Losses(NamedTuple):
    """The output of an own model's forward pass: losses and other values, one per sample.

    For a comparing model, the first field holds features, [B, E], instead of losses, see `OwnWorkload.compared`.
    """

    losses: Tensor
    values: dict[str, Tensor]


class Logits(NamedTuple):
    """The logits of the token after each, [B, L, vocabulary], of a batch by `OwnWorkload.asking_logits`."""

    logits: Tensor


class Handed(NamedTuple):
    """The tensors that a pipeline stage, other than the last, hands to the next."""

    tensors: tuple[Tensor, ...]


class OwnNetwork(nn.Module):
    """Wraps an own model (`network`) for our forward pass. Its tensors have the prefix `network.`.

    Moving a model from the meta device unties shared tensors and loses what is outside the state, so both are restored
    after every move.
    """

    def __init__(self, network: nn.Module, fixed: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.network, self._fixed = network, fixed
        self._span: tuple[int, int] | None = None

    def keep(self, start: int, stop: int) -> None:
        """Keep only the tensors of stages start to stop - 1.

        Args:
            start: number of the first stage, from 0.
            stop: number of the stage after the last one.
        """
        self._span = start, stop
        kept = self._kept()
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in kept:
                    module._parameters[name] = None
            for name, buffer in module._buffers.items():
                is_saved = name not in module._non_persistent_buffers_set
                if buffer is not None and is_saved and id(buffer) not in kept:
                    module._buffers[name] = None

    def _kept(self) -> set[int]:
        start, stop = self._span or (0, None)
        stages = stages_of(self.network)[start:stop]
        return {id(t) for stage in stages for t in (*stage.parameters(), *stage.buffers())}

    def blocks(self) -> list[nn.Module]:
        """Return the layers that the model names and that this stage has."""
        named = blocks_of(self.network)
        if self._span is None:
            return named
        inside = {id(m) for stage in stages_of(self.network)[slice(*self._span)] for m in stage.modules()}
        return [block for block in named if id(block) in inside]

    def forward(
        self, batch: Batch, handed: tuple[Tensor, ...] = (), in_chunks: object = None
    ) -> Losses | Logits | Handed:
        """Return the losses of the batch, its logits if it asks for them, or the tensors for the next stage."""
        if ASKED in batch:
            return Logits(next_logits(type(self.network).__name__, self.network, batch["tokens"]))
        stages = stages_of(self.network)
        if compares(self.network):
            return losses_of(self.network.embed(batch))  # type: ignore[operator]
        if not stages:
            return losses_of(self.network.loss(batch))  # type: ignore[operator]
        start, stop = self._span or (0, len(stages))
        hidden = through(stages, batch, start, min(stop, len(stages) - 1), handed)
        if stop < len(stages):
            return Handed(hidden)
        return losses_of(stages[-1](_given(hidden), batch))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OwnNetwork:
        apply_tied(self, lambda: super(OwnNetwork, self)._apply(fn, recurse))
        for name, buffer in self.network.named_buffers():
            if name in self._fixed and not buffer.is_meta:
                buffer.copy_(self._fixed[name])
        return self


def apply_tied(model: nn.Module, apply: Callable[[], object]) -> None:
    """Move a model by `apply`, and tie again the parameters that were tied before."""
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                tied.setdefault(id(parameter), []).append((module, name))
    apply()
    for (first, name), *others in tied.values():
        for module, other in others:
            module._parameters[other] = first._parameters[name]


def through(
    stages: list[nn.Module], batch: Batch, start: int, stop: int, handed: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...]:
    """Run stages start to stop - 1.

    Args:
        stages: the modules of the forward pass, in order.
        batch: the arrays of the micro-batch by name, [B, ...] each.
        start: number of the first stage, from 0.
        stop: number of the stage after the last one.
        handed: the input of the first stage; empty for stage 0, which reads the batch alone.

    Returns:
        The input of stage `stop`, as fp32 tensors.

    Raises:
        WorkloadError: a stage does not return float tensors.
    """
    for number in range(start, stop):
        output = stages[number](_given(handed), batch) if number else stages[0](batch)
        tensors = output if isinstance(output, tuple) else (output,)
        if not tensors or not all(isinstance(t, Tensor) and t.is_floating_point() for t in tensors):
            raise WorkloadError(
                f"stage {number} of stages() returns something other than a floating-point tensor; let the next "
                "stage read everything else from the batch"
            )
        handed = tuple(t.float() for t in tensors)
    return handed


def losses_of(result: Tensor | tuple[Tensor, Mapping[str, Tensor]]) -> Losses:
    """Return the losses from the result of `loss(batch)`, `embed(batch)` or the last stage."""
    losses, values = result if isinstance(result, tuple) else (result, {})
    return Losses(losses, dict(values))


def _given(handed: tuple[Tensor, ...]) -> Hidden:
    return handed[0] if len(handed) == 1 else handed
