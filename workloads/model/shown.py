"""The inner states that a transformer's layers return besides the results: hidden states, and relations within
attention.

A student is compared with its teacher by them. They leave the model with its output, so that sharding hooks on the
model see their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workloads.model.attention import AttentionCore
from workloads.model.inside import MAPS, Relation, Shows
from workloads.model.masks import Mask

HIDDEN = -1e9
"""The log-probability of a pair that attention does not see; a finite number, whose probability is 0."""


class Maps(nn.Module):
    """Learned linear maps of hidden states, without a bias, by layer (TinyBERT; Jiao et al., 2020, equation 8)."""

    def __init__(self, width: int, maps: Mapping[int, int]) -> None:
        """`width` is that of the model; `maps` as in `Shows`."""
        super().__init__()
        self.hidden = nn.ModuleDict(
            {str(layer): nn.Linear(width, to, bias=False) for layer, to in maps.items()}
        )

    def forward(self, hidden: Tensor, layer: int) -> Tensor:
        """Map the output [B, L, width] of a layer; without a map for it, return it unchanged.

        Args:
            hidden: [B, L, width].
            layer: number of the layer, from 1.
        """
        return self.hidden[str(layer)](hidden) if str(layer) in self.hidden else hidden


def show(model: Any, shows: Shows) -> None:
    """Let a transformer of this project return `shows` in its output, by hooks; adds the learned maps to it.

    Args:
        model: the transformer; changed in place.
        shows: what to return.
    """
    capture = _Capture(shows, model.config.heads)
    if shows.maps:
        setattr(model, MAPS, Maps(model.config.hidden, shows.maps))
    model.register_forward_pre_hook(capture.begin)
    for number, layer in enumerate(model.layers.values(), start=1):
        layer.register_forward_pre_hook(capture.enter)
        layer.register_forward_hook(capture.leave)
        of_layer = [each for each in shows.relations if each[1] == number]
        for module in layer.modules():
            if of_layer and isinstance(module, AttentionCore):
                module.register_forward_pre_hook(partial(capture.attend, of_layer), with_kwargs=True)
    model.register_forward_hook(capture.end)


class _Capture:
    """Takes what the layers show in one forward pass. Layers run in order; shared ones run several times."""

    def __init__(self, shows: Shows, heads: int) -> None:
        self._shows = shows
        self._heads = heads
        self._layers: list[Tensor] = []
        self._relations: dict[tuple[Relation, int], Tensor] = {}
        self._is_running = False

    def begin(self, _: nn.Module, __: Any) -> None:
        self._layers = []
        self._relations = {}
        self._is_running = True

    def enter(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._is_running and not self._layers:
            self._layers.append(inputs[0])

    def leave(self, _: nn.Module, __: Any, output: tuple[Any, ...]) -> None:
        if self._is_running:
            self._layers.append(output[0])

    def attend(
        self,
        relation_names: Sequence[tuple[Relation, int]],
        core: AttentionCore,
        inputs: tuple[Any, ...],
        _: Any,
    ) -> None:
        # Recomputation in the backward pass runs this again, and must save as many tensors as the first pass.
        # A tensor-parallel rank has its share of the attention heads, and of the relation heads made of them.
        heads = self._shows.heads * inputs[0].shape[1] // self._heads
        relations = {each: relation_of(each[0], core.scale, inputs, heads) for each in relation_names}
        if self._is_running:
            self._relations |= relations

    def end(self, model: Any, _: Any, output: Any) -> Any:
        self._is_running = False
        maps = getattr(model, MAPS, None)
        tensors = [
            self._layers[layer] if maps is None else maps(self._layers[layer], layer)
            for layer in self._shows.hidden
        ]
        tensors += [self._relations[each] for each in self._shows.relations]
        self._layers = []
        self._relations = {}
        return output._replace(shown=tuple(tensors))


def relation_of(kind: Relation, scale: float, inputs: tuple[Any, ...], heads: int = 0) -> Tensor:
    """Return a relation of the tokens of each text, fp32 [B, heads, L, L].

    attention: log softmax(q k^T scale + bias). scores: the same before the softmax, 0 where attention does not see.
    queries, keys, values: log softmax(x x^T / sqrt(width of a head)) (MiniLM; Wang et al., 2020, equation 7), of
    `heads` relation heads into which all heads are regrouped (MiniLMv2; Wang et al., 2021, section 3.1).

    Args:
        kind: the relation.
        scale: factor of attention's scores.
        inputs: query [B, heads, L, D], key and value [B, kv_heads, L, D], mask and bias, as attention gets them.
        heads: number of relation heads; 0 for the heads as they are.
    """
    query, key, value, mask, bias, *_ = inputs
    length = query.shape[2]
    sees = _visible(mask, bias, length, query.device)
    if kind in ("attention", "scores"):
        if key.shape[1] < query.shape[1]:
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = query.float() @ key.float().transpose(-1, -2) * scale
        if bias is not None:
            scores = scores + bias.float().masked_fill(bias == -torch.inf, 0.0)
        if kind == "scores":
            return scores if sees is None else scores.masked_fill(~sees, 0.0)
    else:
        each = {"queries": query, "keys": key, "values": value}[kind].float()
        if heads:
            each = each.transpose(1, 2).flatten(2).unflatten(-1, (heads, -1)).transpose(1, 2)
        scores = each @ each.transpose(-1, -2) / each.shape[-1] ** 0.5
    if sees is None:
        return scores.log_softmax(-1)
    return scores.masked_fill(~sees, -torch.inf).log_softmax(-1).masked_fill(~sees, HIDDEN)


def _visible(mask: Mask, bias: Tensor | None, length: int, device: torch.device) -> Tensor | None:
    """Return which pairs attention sees, bool [1 or B, 1, 1 or L, L]; None for all."""
    if bias is not None:
        return (bias != -torch.inf).any(1, keepdim=True)
    return mask.dense(length, device)
