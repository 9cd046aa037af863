"""What goes from one stage of a pipeline to the next: how it is packed, and its shapes."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from workloads.hf.hf_class import HuggingFaceModel
from workloads.own.declared import stages_of
from workloads.own.model import OwnModel
from workloads.own.network import Handed, through
from workloads.workload import Batch


class BetweenStages(Protocol):
    """What a kind of model hands on."""

    def pack(self, output: Any) -> tuple[Tensor, ...]:
        """The tensors of a stage's output that are sent; neither views nor what was received, which the schedules
        detach in place."""

    def unpack(self, received: tuple[Tensor, ...]) -> dict[str, Any]:
        """The arguments of the next stage's forward pass, besides the batch."""

    def carried(self, layer: int, batch: Batch) -> tuple[Tensor, ...]:
        """What enters a stage that begins with this layer, on the meta device. It is fp32 under any compute type."""

    def shapes(self, batch: Batch) -> tuple[Any, ...]:
        """What of a batch decides the shapes of `carried`."""


class OfTransformer:
    """Hidden states, the routers' loss if there are experts, the decoder's memory."""

    def __init__(self, config: Any, ways: int, prompt: int) -> None:
        """Sequences are cut into `ways`, and `prompt` positions stand before them."""
        self._config, self._ways, self._prompt = config, ways, prompt

    def pack(self, output: Any) -> tuple[Tensor, ...]:
        """See `BetweenStages`."""
        extra = output.extra
        if self._config.moe:
            if (
                extra is None
            ):  # no layer so far has experts; the sum starts at zero, and gradients may come back
                extra = 0.0 * output.hidden.flatten()[0].float()
            extra = torch.stack([extra])
        memory = None if output.memory is None else output.memory.clone()
        return tuple(t for t in (output.hidden, extra, memory) if t is not None)

    def unpack(self, received: tuple[Tensor, ...]) -> dict[str, Any]:
        """See `BetweenStages`."""
        parts = list(received)
        found = {"hidden": parts.pop(0)}
        if self._config.moe:
            found["extra"] = parts.pop(0).reshape(())
        return found | ({"memory": parts.pop()} if parts else {})

    def carried(self, layer: int, batch: Batch) -> tuple[Tensor, ...]:
        """See `BetweenStages`."""
        config = self._config
        size, length = batch["tokens"].shape[:2]
        first = torch.empty(size, length // self._ways + self._prompt, config.hidden, device="meta")
        extra = (torch.empty(1, device="meta"),) if config.moe else ()
        if config.architecture == "encoder-decoder" and layer > config.layers:
            hidden = torch.empty(size, batch["decoder_tokens"].shape[1], config.hidden, device="meta")
            carried = (hidden, *extra, first)
        else:
            carried = (first, *extra)
        return tuple(t.requires_grad_() for t in carried)

    def shapes(self, batch: Batch) -> tuple[Any, ...]:
        """See `BetweenStages`."""
        return tuple(batch[name].shape for name in ("tokens", "decoder_tokens") if name in batch)


class OfOwnModel:
    """What its modules return, found by running them without memory."""

    def __init__(self, config: OwnModel) -> None:
        self._config = config

    def pack(self, output: Handed) -> tuple[Tensor, ...]:
        """See `BetweenStages`."""
        return tuple(
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
            found = through(stages_of(self._config.bare), empty, 0, layer)
        return tuple(torch.empty(t.shape, device="meta").requires_grad_() for t in found)

    def shapes(self, batch: Batch) -> tuple[Any, ...]:
        """See `BetweenStages`."""
        return tuple((name, tensor.shape) for name, tensor in sorted(batch.items()))


class OfHuggingFaceClass(OfOwnModel):
    """Hidden states [B, L, hidden]."""

    def __init__(self, config: HuggingFaceModel) -> None:
        self._hidden = config.hidden

    def carried(self, layer: int, batch: Batch) -> tuple[Tensor, ...]:
        """See `BetweenStages`."""
        return (torch.empty(*batch["tokens"].shape[:2], self._hidden, device="meta").requires_grad_(),)


def between_stages(config: Any, ways: int, prompt: int) -> BetweenStages:
    """That of a model, see `OfTransformer`."""
    if isinstance(config, HuggingFaceModel):
        return OfHuggingFaceClass(config)
    return OfOwnModel(config) if isinstance(config, OwnModel) else OfTransformer(config, ways, prompt)
