"""How to shard the tensors of an unchanged transformers class: by the plan that transformers ships."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from math import gcd
from typing import Any

from torch import nn

STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "rowwise_split_input": "row",
    "colwise_gather_output": "joined",
    "replicated_with_grad_allreduce": "heads",
    "moe_tp_experts": "stack",
    "local_params": "own",
    "mla_kv_a_proj": "latent",
}
"""The styles in transformers' plans for modules, and the corresponding ones of `Workload.sharding`."""
WHOLE = {"embedding_rowwise", "embedding_colwise", "replicate"}
"""Styles whose modules every rank keeps whole here: tables, whose result is whole in any case."""
LINEAR = ("column", "row", "joined", "latent")
"""Styles of linear layers only."""
ROTATED = "qk_rope_head_dim"
"""A layer's name for the last elements of its latent vector, which all heads read unchanged."""


def tensor_styles(bare: Any) -> tuple[Mapping[str, str], str]:
    """Return the style for each pattern of module names, or nothing and the reason.

    The language model's head stays whole, as tables do. Stacks of experts are sharded by expert, even if the
    plan shards their weights: each rank has some experts, and processes the tokens that choose them.
    """
    plan: dict[str, str] = dict(getattr(bare, "tp_plan", None) or {})
    if not plan:
        return {}, "transformers ships no plan for it"
    stacks = [name for name, style in plan.items() if STYLES.get(style) in ("stack", "own")]
    modules = {_starred(name) for name, _ in bare.named_modules()}
    inside = {
        name for name in plan.keys() - modules if name.startswith(tuple(f"{stack}." for stack in stacks))
    }
    outer_plan = {name: style for name, style in plan.items() if name not in inside}
    if odd := sorted({style for style in outer_plan.values() if style not in STYLES.keys() | WHOLE}):
        return {}, f"transformers' plan for it has {odd[0]}, which is not known here"
    head = bare.get_output_embeddings()
    style_by_pattern: dict[str, str] = {}
    for name, module in bare.named_modules():
        pattern = next((p for p in outer_plan if fnmatchcase(name, p)), None)
        style = STYLES.get(outer_plan[pattern]) if pattern is not None else None
        if style is None or module is head:
            continue
        if pattern != _starred(name):  # transformers puts numbers alone for a star
            return {}, f"transformers' plan for it is not clear about {name}"
        if why := _unfit(bare, name, module, style, plan):
            return {}, why
        style_by_pattern[pattern] = style
    if not {"row", "stack"} & set(style_by_pattern.values()):
        return {}, "transformers' plan for it names none of its layers"
    return {name: style_by_pattern[name] for name in outer_plan if name in style_by_pattern}, ""


def _unfit(bare: Any, name: str, module: nn.Module, style: str, plan: Mapping[str, str]) -> str:
    """Return why a module cannot be sharded by a style; empty if it can."""
    if style in LINEAR and type(module) is not nn.Linear:
        return f"{name} is a {type(module).__name__}"
    if style == "stack" and not is_stack(module):
        return f"{name} is not a plain stack of experts"
    if style == "own" and any(plan.get(f"{_starred(name)}.{n}") != "colwise" for n in module._parameters):
        return f"transformers' plan for it is not clear about {name}"
    if style == "latent" and type(getattr(_parent(bare, name), ROTATED, None)) is not int:
        return f"it does not say which outputs of {name} all heads share"
    return ""


def _parent(bare: nn.Module, name: str) -> nn.Module:
    return bare.get_submodule(name.rpartition(".")[0])


def is_stack(module: nn.Module) -> bool:
    """Return whether a module consists of experts, each a slice of all its tensors, and is called as (hidden [T,
    hidden], chosen [T, k], weights [T, k]).
    """
    count = getattr(module, "num_experts", None)
    sizes = {p.shape[0] for p in module.parameters() if p.dim()} | {
        0 for p in module.parameters() if not p.dim()
    }
    has_no_children = len(list(module.parameters())) == len(list(module.parameters(recurse=False)))
    return has_no_children and sizes == {count} and len(inspect.signature(module.forward).parameters) == 3


def stacked(bare: nn.Module) -> Iterator[str]:
    """Return the parameters of a transformers class that are stacks of experts.

    These are tensors with one slice for each expert, held by a module that states its number of experts, if some of
    them are matrices. A router has one table for all.
    """
    for name, module in bare.named_modules():
        counts = {n for key, n in vars(module).items() if "experts" in key and type(n) is int}
        matrices = {leaf: p for leaf, p in module._parameters.items() if p is not None and p.dim() > 1}
        matrices = {leaf: p for leaf, p in matrices.items() if p.shape[0] in counts}
        if any(p.dim() > 2 for p in matrices.values()):
            yield from (f"{name}.{leaf}" for leaf in matrices)


def _starred(name: str) -> str:
    """Return a module's name as in plans: with a star for each number of a list."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def cut_size(bare: nn.Module, styles: Mapping[str, str]) -> int:
    """Return the number that every count of ranks which shards tensors of these styles must divide."""
    return gcd(*_sizes(bare, styles)) or 1


def _sizes(bare: nn.Module, styles: Mapping[str, str]) -> Iterator[int]:
    for name, module in bare.named_modules():
        style = styles.get(_starred(name))
        if isinstance(module, nn.Linear) and style in ("column", "joined"):
            yield module.out_features
        elif isinstance(module, nn.Linear) and style == "row":
            yield module.in_features
        elif style in ("stack", "own"):
            yield from (p.shape[0] for p in module.parameters(recurse=False))
