"""Read the declarations of an own model: its layers, its pipeline stages, and the tensors that may be sharded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from workloads.errors import WorkloadError

STYLES = {"column": "column", "row": "row", "vocabulary": "vocab", "shared": "heads"}
"""Maps the words of `sharding()` to those of `Workload.sharding`."""
OF_BUFFERS = 0
"""The seed of the buffers that no checkpoint stores, in every run and export."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers that an own model names, each once.

    Raises WorkloadError if one is not a module of the model, or is inside another one.
    """
    blocks = list(dict.fromkeys(_modules_of(model, "blocks")))
    inner = {module for block in blocks for module in block.modules() if module is not block}
    if both := inner.intersection(blocks):
        name = next(name for name, module in model.named_modules() if module in both)
        raise WorkloadError(f"blocks() gives {name} and also a module that contains it; give one of the two")
    return blocks


def stages_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules between which a pipeline may cut, in order; empty if the model names none.

    Raises WorkloadError if one is not a module of the model.
    """
    return _modules_of(model, "stages")


def styles_of(model: nn.Module) -> dict[str, str]:
    """Return the declared style of each module name pattern. Raises WorkloadError for an unknown style."""
    styles = _declared(model, "sharding") or {}
    if not isinstance(styles, Mapping):
        raise WorkloadError("sharding() gives no mapping of patterns to styles; return one")
    for pattern, style in styles.items():
        if style not in STYLES:
            raise WorkloadError(
                f"sharding() gives {pattern} the style {style!r}; choose from {', '.join(STYLES)}"
            )
    return dict(styles)


def heads_of(model: nn.Module) -> int:
    """Return the attribute `heads` of an own model, 0 without it."""
    heads = getattr(model, "heads", 0)
    return heads if isinstance(heads, int) else 0


def cut_size(model: nn.Module) -> int:
    """Return the number that the tensor-parallel size must divide; 1 if no tensor is sharded.

    Raises WorkloadError for layers that cannot be sharded as declared.
    """
    styles, sizes = styles_of(model), 0
    used = set()
    for name, module in model.named_modules(remove_duplicate=False):
        pattern = next((each for each in styles if fnmatchcase(name, each)), None)
        if pattern is None:
            continue
        used.add(pattern)
        style = styles[pattern]
        _check_kind(name, module, style)
        if isinstance(module, nn.Linear):
            sizes = gcd(sizes, {"column": module.out_features, "row": module.in_features}.get(style, 0))
    if unused := [pattern for pattern in styles if pattern not in used]:
        raise WorkloadError(
            f"sharding() has the pattern {unused[0]}, which matches no module that earlier patterns leave; remove it"
        )
    return sizes or 1


def check_declared(model: nn.Module) -> None:
    """Raise WorkloadError for tensors that ranks cannot hold, and for invalid layers, stages and styles."""
    _check_tensors(model)
    blocks_of(model)
    _check_stages(model)
    cut_size(model)


def _check_stages(model: nn.Module) -> None:
    """Raise WorkloadError if the stages do not cover all tensors of the model, or if a buffer is in several stages."""
    stages = stages_of(model)
    if not stages:
        return
    if len(stages) < 2:
        raise WorkloadError("stages() gives one module, so there is nothing to cut; give two or more")
    inside = {id(t) for stage in stages for t in (*stage.parameters(), *stage.buffers())}
    left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if id(t) not in inside]
    if left:
        raise WorkloadError(
            f"{left[0]} is in none of the modules of stages(); put it into the one that uses it"
        )
    kept = model.state_dict().keys()
    saved = {id(buffer): name for name, buffer in model.named_buffers() if name in kept}
    stage_counts = Counter(i for stage in stages for i in {id(b) for b in stage.buffers()} if i in saved)
    if several := [saved[i] for i, count in stage_counts.items() if count > 1]:
        raise WorkloadError(f"the buffer {several[0]} is in several modules of stages(); give each its own")


def _check_kind(name: str, module: nn.Module, style: str) -> None:
    if style == "shared":
        return
    is_table = type(module) is nn.Embedding and style == "vocabulary"
    if not (is_table or type(module) is nn.Linear):
        wanted = "an nn.Linear or nn.Embedding" if style == "vocabulary" else "an nn.Linear"
        raise WorkloadError(
            f"sharding() calls {name} {style}, but it is a {type(module).__name__}; that is for {wanted}"
        )
    if isinstance(module, nn.Embedding) and (module.padding_idx is not None or module.max_norm is not None):
        raise WorkloadError(
            f"{name} cannot be sharded, because it has padding_idx or max_norm; leave them out"
        )


def _modules_of(model: nn.Module, method: str) -> list[nn.Module]:
    modules = _declared(model, method)
    if modules is None:
        return []
    if not isinstance(modules, list | tuple | nn.ModuleList):
        raise WorkloadError(f"{method}() gives a {type(modules).__name__}; return a list of modules")
    inside = set(map(id, model.modules()))
    if any(id(each) not in inside for each in modules):
        raise WorkloadError(f"{method}() gives what is not a module of the model; give layers that it has")
    return list(modules)


def _declared(model: nn.Module, method: str) -> Any:
    named = getattr(model, method, None)
    if not callable(named) or isinstance(named, nn.Module):
        return None
    try:
        return named()
    except Exception as error:  # whatever the user's code raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise WorkloadError(f"{method}() fails ({reason}); fix it") from None


def _check_tensors(model: nn.Module) -> None:
    """Raise WorkloadError for tensors that ranks cannot hold.

    These are tensors whose shapes are not known yet, parameters that are not fp32 or are empty, and tensors that are
    neither parameters nor buffers, because a move to a device leaves those behind.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise WorkloadError(
                f"{name} is lazy: its shape depends on the first batch; give its layer all sizes"
            )
        if not parameter.is_floating_point():
            raise WorkloadError(f"the parameter {name} is of {parameter.dtype}; make it of real numbers")
        if parameter.dtype is not torch.float32:
            raise WorkloadError(
                f"the parameter {name} is of {parameter.dtype}, but weights are kept in fp32; make it fp32; "
                "train.precision sets the dtype of computation"
            )
        if not parameter.numel():
            raise WorkloadError(
                f"the parameter {name} of shape {tuple(parameter.shape)} has no numbers; leave it out"
            )
    for name, module in model.named_modules():
        for leaf, value in vars(module).items():
            if isinstance(value, Tensor):
                where = f"{name}.{leaf}".lstrip(".")
                raise WorkloadError(f"{where} is neither a parameter nor a buffer; use register_buffer")


def compares(model: nn.Module) -> bool:
    """Return whether a sample's loss depends on the others in the global batch, see `protocols.ComparingModel`."""
    return callable(getattr(model, "compare", None))


def is_of_hf(model: nn.Module) -> bool:
    """Return whether transformers has the model's class, see `protocols.Model.to_hf`."""
    return callable(getattr(model, "to_hf", None))


def checked(reference: str, model: nn.Module) -> nn.Module:
    """Check the model that the user's class made, and return it.

    Args:
        reference: the class as module:name, for messages.
        model: the module.

    Raises:
        WorkloadError: it has neither a loss nor features, or both compares samples and is sharded.
    """
    if not compares(model):
        if not callable(getattr(model, "loss", None)) and not stages_of(model):
            raise WorkloadError(f"{reference} has no loss(batch); add it, or stages()")
        return model
    if not callable(getattr(model, "embed", None)):
        raise WorkloadError(f"{reference} has compare(), but no embed(batch); add it")
    for name, declared in (("stages", stages_of(model)), ("sharding", styles_of(model))):
        if declared:
            raise WorkloadError(
                f"{reference} compares samples, which data parallelism and ZeRO alone can do; take out {name}()"
            )
    return model
