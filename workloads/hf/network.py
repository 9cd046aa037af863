"""The bare network of a class of transformers, between a batch and an output of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workloads.hf.dropout import counted
from workloads.hf.routers import balance_of
from workloads.model.dropout import KEYS
from workloads.model.transformer import Output
from workloads.workload import Batch

ARGUMENTS = {"tokens": "input_ids", "padding": "attention_mask", "token_types": "token_type_ids",
             "positions": "position_ids", "decoder_tokens": "decoder_input_ids"}  # fmt: skip


class HuggingFaceNetwork(nn.Module):
    """A model of transformers that takes a batch of ours and gives an output of ours.

    Its tensors have the prefix `network.`. What moving a model to another device would break is mended there:
    tied weights are tied again, and tables that are no part of the state (rotary frequencies) are put back.
    """

    def __init__(
        self, network: nn.Module, tables: Mapping[str, Tensor], causal: bool, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self._dropouts = counted(network, dropout) if dropout else []
        self.network = network
        self._tables, self._causal, self.balance = tables, causal, balance_of(network)

    def forward(self, batch: Batch) -> Output:
        """Logits [B, L, vocabulary] for the batch, and the routers' loss if the class has one."""
        arguments: dict[str, Any] = {
            theirs: batch[ours] for ours, theirs in ARGUMENTS.items() if ours in batch
        }
        if "padding" in batch:
            arguments["attention_mask"] = batch["padding"].long()
        if "attention" in batch and self._causal:
            # Positions that begin anew tell the class where a document begins, and it makes its own masks of that,
            # windows included, as long as it is given none.
            arguments.pop("attention_mask", None)
        elif "attention" in batch:
            arguments["attention_mask"] = _added(batch["attention"])
        if self._dropouts and self.training:
            for module in self._dropouts:
                module.rows = batch[KEYS]
        extra = None
        if self.balance is not None:
            arguments["output_router_logits"] = True
        output = self.network(**arguments, use_cache=False)
        if self.balance is not None:
            extra = self.balance(output.router_logits, len(batch["tokens"]))
        return Output(output.logits, extra, output.logits)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HuggingFaceNetwork:
        super()._apply(fn, recurse)
        self.network.tie_weights()  # type: ignore[operator]
        for name, buffer in self.network.named_buffers():
            if name in self._tables and not buffer.is_meta:
                buffer.copy_(self._tables[name])
        return self


def _added(allowed: Tensor) -> Tensor:
    """A mask that is added to the scores, [B, 1, L, L]: every implementation of attention takes that one alike."""
    mask = torch.zeros(allowed.shape, device=allowed.device)
    return mask.masked_fill(~allowed, torch.finfo(mask.dtype).min).unsqueeze(1)
