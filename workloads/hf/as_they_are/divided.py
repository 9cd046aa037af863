"""Cut an unchanged transformers class into pipeline stages, between any two layers of its list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class LayerList:
    """The list of layers of a class, by its name, and the names of the modules before and after it."""

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    gives_tuple: bool


def layer_list(bare: Any, blocks: list[nn.Module], run: Callable[[], object]) -> tuple[LayerList | None, str]:
    """Return where a class can be cut into layers, or None and the reason. `run` is a forward pass of `bare`."""
    lists = {id(m): n for n, m in bare.named_modules() if isinstance(m, nn.ModuleList)}
    holders = [m for m in bare.modules() if isinstance(m, nn.ModuleList) and any(b in set(m) for b in blocks)]
    if len(blocks) < 2 or len(holders) != 1 or list(holders[0]) != blocks:
        return None, "it has no single list of layers"
    inside = {id(m) for block in blocks for m in block.modules()}
    owners = {
        name: module
        for name, module in bare.named_modules()
        if id(module) not in inside and (list(module.parameters(False)) or _saved_buffers(module))
    }
    calls: list[str] = []
    tuples: set[bool] = set()
    hooks: list[RemovableHandle] = []
    for name, module in owners.items():
        hooks.append(module.register_forward_pre_hook(lambda _, __, name=name: calls.append(name)))
    for number, block in enumerate(blocks):
        hooks.append(block.register_forward_pre_hook(lambda _, __, number=number: calls.append(f"#{number}")))
        hooks.append(block.register_forward_hook(lambda _, __, out: tuples.add(_is_tuple(out))))
    try:
        run()
    except Exception:  # each class fails in its own way without data
        return None, "its layers cannot be followed without data"
    finally:
        for hook in hooks:
            hook.remove()
    order = [name for name in calls if name[0] == "#"]
    if order != [f"#{number}" for number in range(len(blocks))] or len(tuples) != 1:
        return None, "its layers are not called one after another"
    first, last = calls.index("#0"), calls.index(order[-1])
    before = tuple(dict.fromkeys(name for name in calls[:first]))
    after = tuple(dict.fromkeys(name for name in calls[last + 1 :]))
    between = set(calls[first:last]) - set(order)
    if between or set(before) & set(after) or {*before, *after} != set(owners):
        return None, "it has tensors between its layers"
    return LayerList(lists[id(holders[0])], before, after, tuples.pop()), ""


def _is_tuple(out: object) -> bool:
    if isinstance(out, tuple) and len(out) != 1:
        raise ValueError("a layer returns more than one value")
    return isinstance(out, tuple)


def _saved_buffers(module: nn.Module) -> list[str]:
    return [n for n in module._buffers if n not in module._non_persistent_buffers_set]


class Passing(nn.Module):
    """A layer of another stage: it returns its input, or what was `received` from the stage before."""

    def __init__(self, layer: nn.Module, gives_tuple: bool) -> None:
        super().__init__()
        # attributes that the class expects of its layers, such as their kind
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self._gives_tuple = gives_tuple
        self.received: Tensor | None = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the hidden states [B, L, hidden]."""
        hidden = inputs[0] if inputs else named["hidden_states"]
        output = hidden if self.received is None else self.received
        return (output,) if self._gives_tuple else output


class Absent(nn.Module):
    """A module of another stage, before or after its layers: it returns zeros [B, L, hidden] for tokens, else its
    input.

    It keeps its weight if another module shares it, so that the weight's name stays.
    """

    def __init__(self, module: nn.Module, hidden: int, keeps: bool) -> None:
        super().__init__()
        self._hidden = hidden
        if keeps:
            self.weight = module.weight

    def forward(self, tokens_or_hidden: Tensor, *_: object, **__: object) -> Tensor:
        """Return float [B, L, hidden]."""
        if tokens_or_hidden.is_floating_point():
            return tokens_or_hidden
        return torch.zeros(*tokens_or_hidden.shape, self._hidden, device=tokens_or_hidden.device)


def keep_layers(bare: nn.Module, listing: LayerList, hidden: int, start: int, stop: int) -> Passing | None:
    """Keep of a class the layers from `start` to before `stop` and what belongs to them. Return the module that
    receives the hidden states of another stage.
    """
    layers = bare.get_submodule(listing.name)
    assert isinstance(layers, nn.ModuleList)
    count = len(layers)
    entered = None
    for number in range(count):
        if not start <= number < stop:
            passing = Passing(layers[number], listing.gives_tuple)
            layers[number] = passing
            entered = passing if number == start - 1 else entered
    gone = [*(listing.before if start else ()), *(listing.after if stop < count else ())]
    shared = _shared(bare)
    left = {
        id(p)
        for n in {*listing.before, *listing.after} - {*gone}
        for p in bare.get_submodule(n).parameters(False)
    }
    for name in gone:
        module = bare.get_submodule(name)
        if any(True for _ in module.children()):  # their work is done by these
            module._parameters.update(dict.fromkeys(module._parameters))
            continue
        keeps = name in shared and any(id(p) in left for p in module.parameters(False))
        parent, _, leaf = name.rpartition(".")
        setattr(bare.get_submodule(parent), leaf, Absent(module, hidden, keeps))
    return entered


def _shared(bare: nn.Module) -> set[str]:
    """Return the modules whose weight is shared with another module."""
    names_by_weight: dict[int, list[str]] = {}
    for name, module in bare.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            names_by_weight.setdefault(id(weight), []).append(name)
    return {name for names in names_by_weight.values() if len(names) > 1 for name in names}
