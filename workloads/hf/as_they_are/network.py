"""The module that trains a transformers model: it takes our batches and returns our outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workloads.hf.as_they_are.divided import LayerList, Passing, keep_layers
from workloads.hf.as_they_are.dropout import counted
from workloads.hf.as_they_are.routers import balance_of
from workloads.model.chunked_loss import ChunkedLoss
from workloads.model.dropout import KEYS
from workloads.model.masks import SEGMENTS
from workloads.model.transformer import Output
from workloads.own.network import Handed, apply_tied
from workloads.workload import Batch

ARGUMENTS = {"tokens": "input_ids", "padding": "attention_mask", "token_types": "token_type_ids",
             "positions": "position_ids", "decoder_tokens": "decoder_input_ids"}  # fmt: skip


class HuggingFaceNetwork(nn.Module):
    """A transformers model (`network`) behind our batch and output. Its tensors have the prefix `network.`.

    Attributes:
        fixed_buffers: values of buffers outside the state (rotary frequencies). Moving the model to another device
            would lose them and untie tied weights, so both are restored after every move.
        causal: whether it is a decoder.
        dropout: the rate of its dropout modules.
        ends_in_head: whether its logits are the unchanged results of its output embeddings.
        head: the head of the `HuggingFaceModel`.
    """

    def __init__(
        self,
        network: nn.Module,
        fixed_buffers: Mapping[str, Tensor],
        causal: bool,
        dropout: float = 0.0,
        ends_in_head: bool = False,
        head: str = "language",
    ) -> None:
        super().__init__()
        self._head = head
        self._ends_in_head = ends_in_head
        self._dropouts = counted(network, dropout) if dropout else []
        self.network = network
        self.layer_list: LayerList | None = None
        self.hidden = 0
        self._entered: Passing | None = None
        self._last: nn.Module | None = None
        self._cut = False
        self._fixed_buffers = fixed_buffers
        self._causal = causal
        # As in transformers, where classes with other heads have no such loss.
        self.balance = balance_of(network) if head == "language" else None

    def keep(self, start: int, stop: int) -> None:
        """Become a pipeline stage with the layers from `start` to before `stop`."""
        assert self.layer_list is not None
        entered = keep_layers(self.network, self.layer_list, self.hidden, start, stop)
        layers = self.network.get_submodule(self.layer_list.name)
        # not as modules, which would add names
        self.__dict__.update(_entered=entered, _cut=True)
        if stop < len(layers):  # type: ignore[arg-type]
            self.__dict__["_last"] = layers[stop - 1]  # type: ignore[index]

    def forward(
        self, batch: Batch, in_chunks: ChunkedLoss | None = None, handed: tuple[Tensor, ...] = ()
    ) -> Output | Handed:
        """Like `whole`, for the hidden states that another stage has `handed` on. Unless this is the last stage,
        returns its hidden states.
        """
        block_outputs: list[Tensor] = []
        hook = None
        if self._entered is not None:
            self._entered.received = handed[0]
        if self._last is not None:
            hook = self._last.register_forward_hook(lambda _, __, out: block_outputs.append(out))
        try:
            output = self.whole(batch, in_chunks if self._last is None else None)
        finally:
            if hook is not None:
                hook.remove()
            if self._entered is not None:
                self._entered.received = None
        if self._last is None:
            return output
        (hidden,) = block_outputs
        return Handed(((hidden[0] if isinstance(hidden, tuple) else hidden).float(),))

    def whole(self, batch: Batch, in_chunks: ChunkedLoss | None = None) -> Output:
        """Return logits [B, L, vocabulary] of the batch, or the sums of `in_chunks` if the class allows it, and the
        routers' loss if the class has one. Other heads fill other fields of `Output`.
        """
        arguments: dict[str, Any] = {
            hf_name: batch[name] for name, hf_name in ARGUMENTS.items() if name in batch
        }
        if "padding" in batch:
            arguments["attention_mask"] = batch["padding"].long()
        if batch.keys() & {"attention", SEGMENTS} and self._causal:
            # Without a mask, the class derives its own from the positions, windows included: a document begins where
            # positions restart.
            arguments.pop("attention_mask", None)
        elif "attention" in batch:
            arguments["attention_mask"] = _additive(batch["attention"])
        if self._dropouts and self.training:
            for module in self._dropouts:
                module.rows = batch[KEYS]
        extra = None
        if self.balance is not None:
            arguments["output_router_logits"] = True
        sums = None
        if in_chunks is not None and self._ends_in_head:
            output, sums = self._in_chunks(arguments, batch["labels"], in_chunks)
        else:
            output = self.network(**arguments, use_cache=False)
        if self.balance is not None:
            extra = self.balance(output.router_logits, len(batch["tokens"]))
        if self._head == "sequence":
            return Output(output.logits, extra, sentence=output.logits)
        if self._head == "span":
            ends = torch.stack((output.start_logits, output.end_logits), -1)
            return Output(ends, extra, ends)
        return Output(output.logits, extra, None if sums else output.logits, sums=sums)

    def _in_chunks(
        self, arguments: Mapping[str, Any], labels: Tensor, in_chunks: ChunkedLoss
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """Return the output of the class with the sum of the loss in place of each token's logits, and all sums."""
        head: Any = self.network.get_output_embeddings()  # type: ignore[operator]
        others: list[Tensor] = []

        def read(hidden: Tensor) -> Tensor:
            total, *rest = in_chunks(hidden, head.weight, head.bias, labels)
            others.extend(rest)
            # The module returns its loss, so that hooks on its output see the backward pass.
            return total.expand(*hidden.shape[:-1], 1)

        plain = head.forward
        head.forward = read
        try:
            output = self.network(**arguments, use_cache=False)
        finally:
            head.forward = plain
        return output, (output.logits.flatten()[0], *others)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HuggingFaceNetwork:
        if self._cut:
            apply_tied(self, lambda: super(HuggingFaceNetwork, self)._apply(fn, recurse))
        else:
            super()._apply(fn, recurse)
            self.network.tie_weights()  # type: ignore[operator]
        for name, buffer in self.network.named_buffers():
            if name in self._fixed_buffers and not buffer.is_meta:
                buffer.copy_(self._fixed_buffers[name])
        return self


def _additive(allowed: Tensor) -> Tensor:
    """Return an additive mask [B, 1, L, L] of `allowed` bool [B, L, L]. All attention implementations accept this
    form.
    """
    mask = torch.zeros(allowed.shape, device=allowed.device)
    return mask.masked_fill(~allowed, torch.finfo(mask.dtype).min).unsqueeze(1)
