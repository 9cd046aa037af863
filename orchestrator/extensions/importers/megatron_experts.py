"""Experts in checkpoints of Megatron-LM, which become those of transformers' Mixtral.

Each expert-parallel rank has some of the experts, which it counts from 0, and all of the other tensors. They are stored
in one of three ways (github.com/NVIDIA/Megatron-LM: megatron/core/transformer/moe/experts.py): a module for each
(SequentialMLP), a parameter for each in one module (TEGroupedMLP), or all side by side in one (GroupedMLP).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestrator.extensions.importers.megatron_options import Options
from workloads.errors import WorkloadError

_PARTS = {"1": "up", "2": "down"}
_ALONE = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
_NUMBERED = re.compile(r"mlp\.experts\.linear_fc([12])\.weight(\d+)")
_TOGETHER = re.compile(r"mlp\.experts\.weight([12])")
_OURS = re.compile(r"(layers\.\d+\.experts)\.(\d+)\.(\w+\.weight)")
_OURS_TOGETHER = re.compile(r"(layers\.\d+\.experts)\.all_(up|down)")


def expert_name(rest: str) -> str | None:
    """Return the canonical name of an expert tensor of a layer; None for any other tensor."""
    if match := _ALONE.fullmatch(rest):
        return f"experts.{match[1]}.{_PARTS[match[2]]}.weight"
    if match := _NUMBERED.fullmatch(rest):
        return f"experts.{match[2]}.{_PARTS[match[1]]}.weight"
    if match := _TOGETHER.fullmatch(rest):
        return f"experts.all_{_PARTS[match[1]]}"
    return None


def with_all_experts(ranks: Sequence[Mapping[str, Tensor]], options: Options) -> dict[str, Tensor]:
    """The tensors of all expert-parallel `ranks` of a stage, in order, experts by their numbers in the layer. Raises
    WorkloadError for an expert too many, and if the ranks have other tensors of what all have."""
    result: dict[str, Tensor] = {}
    each = options.experts // len(ranks)
    for rank, model in enumerate(ranks):
        for name, tensor in _apart(model, each, options.hidden):
            ours = _OURS.fullmatch(name)
            if ours is None:
                if name in result and not torch.equal(result[name], tensor):
                    raise WorkloadError(f"{name} differs between expert-parallel ranks, but should be equal")
                result[name] = tensor
            elif int(ours[2]) >= each:
                raise WorkloadError(f"{name} is one too many: its options say {each} experts per rank")
            else:
                result[f"{ours[1]}.{rank * each + int(ours[2])}.{ours[3]}"] = tensor
    return result


def _apart(model: Mapping[str, Tensor], each: int, hidden: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors, where those of several experts are side by side one by one, as linear layers have them."""
    for name, tensor in model.items():
        together = _OURS_TOGETHER.fullmatch(name)
        if not together:
            yield name, tensor
            continue
        if tensor.dim() != 2 or not each or tensor.numel() % (each * hidden):
            raise WorkloadError(
                f"{name} is {list(tensor.shape)}, but its options say {each} experts per rank"
            )
        sizes = (each, hidden, -1) if together[2] == "up" else (each, -1, hidden)
        for number, part in enumerate(tensor.reshape(sizes)):
            yield f"{together[1]}.{number}.{together[2]}.weight", part.t()


def stored_shapes(shapes: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """The shapes of transformers' Mixtral by the names of its files, which have each expert alone."""
    result: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        layer, _, part = name.partition(".mlp.")
        to = f"{layer}.block_sparse_moe."
        if part == "gate.weight":
            result[f"{to}{part}"] = shape
        elif part == "experts.gate_up_proj":
            half = [shape[1] // 2, shape[2]]
            result |= {
                f"{to}experts.{number}.{w}.weight": half for number in range(shape[0]) for w in ("w1", "w3")
            }
        elif part == "experts.down_proj":
            result |= {f"{to}experts.{number}.w2.weight": shape[1:] for number in range(shape[0])}
        else:
            result[name] = shape
    return result


def mixtral_config(options: Options, llama: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' configuration of a `llama` with experts."""
    left = {key: value for key, value in llama.items() if key not in ("attention_bias", "mlp_bias")}
    return left | {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": options.experts,
        "num_experts_per_tok": options.chosen, "sliding_window": None,
    }  # fmt: skip
