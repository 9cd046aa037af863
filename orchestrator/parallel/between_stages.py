"""The tensors that a model passes from one pipeline stage to the next, by what divides the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from workloads.own.declared import stages_of
from workloads.own.network import Handed, through
from workloads.workload import Batch

if TYPE_CHECKING:
    from workloads.hf.as_they_are.hf_class import HuggingFaceModel
    from workloads.own.model import OwnModel


class BetweenStages(Protocol):
    """The tensors that a kind of model passes from one stage to the next."""

    def pack(self, output: Any) -> tuple[Tensor, ...]:
        """Return the tensors of a stage's output to send.

        They must be neither views nor received tensors, because torch's schedules detach them in place.
        """

    def unpack(self, received: tuple[Tensor, ...]) -> dict[str, Any]:
        """Return the arguments of the next stage's forward pass, besides the batch."""

    def carried(self, layer: int, batch: Batch) -> tuple[Tensor, ...]:
        """Return what enters a stage whose first layer is `layer`, on the meta device; fp32 under any compute dtype.

        Args:
            layer: number of the stage's first layer in the whole model.
            batch: a micro-batch; only its shapes are read.
        """

    def shapes(self, batch: Batch) -> tuple[Any, ...]:
        """Return the shapes of a batch that decide those of `carried`."""


class BetweenTransformerStages:
    """Hidden states [B, L, hidden], with experts the routers' loss [1], in a decoder the encoder's output."""

    def __init__(self, config: Any, ways: int, prompt: int) -> None:
        """`ways`: parts that sequence parallelism cuts sequences into. `prompt`: positions of a trained prompt."""
        self._config = config
        self._ways = ways
        self._prompt = prompt

    def pack(self, output: Any) -> tuple[Tensor, ...]:
        """See `BetweenStages`."""
        extra = output.extra
        if self._config.moe:
            if extra is None:
                # No layer so far has experts. Start the sum at zero, but with a graph, since the next stage returns a
                # gradient for every tensor.
                extra = 0.0 * output.hidden.flatten()[0].float()
            extra = torch.stack([extra])
        # Cloned, because the decoder's stages pass the encoder's output on unchanged, and a received tensor must not be
        # sent again: torch's schedules detach what they send in place.
        memory = None if output.memory is None else output.memory.clone()
        return tuple(t for t in (output.hidden, extra, memory) if t is not None)

    def unpack(self, received: tuple[Tensor, ...]) -> dict[str, Any]:
        """See `BetweenStages`."""
        parts = list(received)
        arguments = {"hidden": parts.pop(0)}
        if self._config.moe:
            arguments["extra"] = parts.pop(0).reshape(())
        if parts:
            arguments["memory"] = parts.pop()
        return arguments

    def carried(self, layer: int, batch: Batch) -> tuple[Tensor, ...]:
        """See `BetweenStages`."""
        config = self._config
        size, length = batch["tokens"].shape[:2]
        # Under sequence parallelism a rank sends its slice [B, L / tp, hidden]. The prompt's positions stand before the
        # sequence.
        first = torch.empty(size, length // self._ways + self._prompt, config.hidden, device="meta")
        extra = (torch.empty(1, device="meta"),) if config.moe else ()
        # Decoder stages need the encoder's output for cross-attention, so each one passes it on behind its own hidden
        # states.
        if config.architecture == "encoder-decoder" and layer > config.layers:
            hidden = torch.empty(size, batch["decoder_tokens"].shape[1], config.hidden, device="meta")
            carried = (hidden, *extra, first)
        else:
            carried = (first, *extra)
        return tuple(t.requires_grad_() for t in carried)

    def shapes(self, batch: Batch) -> tuple[Any, ...]:
        """See `BetweenStages`."""
        return tuple(batch[name].shape for name in ("tokens", "decoder_tokens") if name in batch)


class BetweenOwnStages:
    """The tensors that the modules of a user's model return; running them on the meta device finds their shapes."""

    def __init__(self, config: OwnModel) -> None:
        self._config = config

    def pack(self, output: Handed) -> tuple[Tensor, ...]:
        """See `BetweenStages`."""
        return tuple(
            # A leaf is a tensor that came from the stage before: a module may return its input as it is.
            t.clone(memory_format=torch.contiguous_format)
            if t._is_view() or t.is_leaf or not t.is_contiguous()
            else t
            for t in output.tensors
        )

    def unpack(self, received: tuple[Tensor, ...]) -> dict[str, Any]:
        """See `BetweenStages`."""
        return {"handed": received}

    def carried(self, layer: int, batch: Batch) -> tuple[Tensor, ...]:
        """See `BetweenStages`."""
        with torch.no_grad(), torch.device("meta"):
            empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in batch.items()}
            outputs = through(stages_of(self._config.bare), empty, 0, layer)
        return tuple(torch.empty(t.shape, device="meta").requires_grad_() for t in outputs)

    def shapes(self, batch: Batch) -> tuple[Any, ...]:
        """See `BetweenStages`."""
        return tuple((name, tensor.shape) for name, tensor in sorted(batch.items()))


class BetweenHuggingFaceStages(BetweenOwnStages):
    """Hidden states [B, L, hidden]."""

    def __init__(self, config: HuggingFaceModel) -> None:
        self._hidden = config.hidden

    def carried(self, layer: int, batch: Batch) -> tuple[Tensor, ...]:
        """See `BetweenStages`."""
        return (torch.empty(*batch["tokens"].shape[:2], self._hidden, device="meta").requires_grad_(),)


def between_stages(config: Any, ways: int, prompt: int) -> BetweenStages:
    """Return what a model passes between stages; `ways` and `prompt` as in `BetweenTransformerStages`.

    Args:
        config: the model's configuration; `divided_by` tells what divides it.
        ways: see `BetweenTransformerStages`.
        prompt: see `BetweenTransformerStages`.
    """
    if config.divided_by == "rules":
        return BetweenTransformerStages(config, ways, prompt)
    return BetweenHuggingFaceStages(config) if config.divided_by == "plan" else BetweenOwnStages(config)
