"""Tensor parallelism of own models: each layer that is cut has its own collectives, since nothing is known of what is
around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.train.parallel.collectives import join
from orchestrator.train.parallel.mesh import ProcessGroup
from orchestrator.train.parallel.partition import span, style_of
from orchestrator.train.parallel.tensor import RowLinear, VocabularyEmbedding, copy_first, sum_rows
from workloads.adapters.lora import LoraLinear


def apply_own_tensor(model: nn.Module, styles: Mapping[str, str], tp: ProcessGroup) -> None:
    """Insert the collectives into a model whose parameters are sharded already.

    A column-cut layer gives the part of its outputs that this rank has, a row-cut one takes such a part and gives the
    sum over all ranks; logits over a vocabulary are put together again, since the loss is the model's own.
    """
    replaced: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        style, (parent, _, leaf) = style_of(styles, name), name.rpartition(".")
        again = module in replaced
        if style == "row" and type(module) is nn.Linear:
            replaced.setdefault(module, RowLinear(module, tp, False))
        elif style == "vocab" and isinstance(module, nn.Embedding):
            replaced.setdefault(module, VocabularyEmbedding(module, tp))
        elif style in ("column", "vocab") and isinstance(module, nn.Linear | LoraLinear):
            replaced.setdefault(module, module)
            if not again:
                module.register_forward_pre_hook(copy_first(tp))
                if style == "vocab":
                    module.register_forward_hook(_whole(module.out_features, tp))
        elif style == "row" and isinstance(module, LoraLinear) and not again:
            replaced[module] = module
            sum_rows(module, tp, False)
        if module in replaced:
            setattr(model.get_submodule(parent), leaf, replaced[module])


def _whole(size: int | Any, tp: ProcessGroup) -> Callable[..., Tensor]:
    """Join outputs of `size` numbers, of which ranks may have one more or less than others."""
    parts = [span(size, index, tp.size)[1] for index in range(tp.size)]
    widest = max(parts)

    def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        if widest == min(parts):
            return join(out, -1, tp)
        every = join(F.pad(out, (0, widest - out.shape[-1])), -1, tp).split(widest, -1)
        return torch.cat([each[..., :part] for each, part in zip(every, parts, strict=True)], -1)

    return hook
