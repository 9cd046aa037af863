"""The names and the layout of Megatron-LM's tensors (github.com/NVIDIA/Megatron-LM: megatron/legacy/model, and
megatron/core/models/gpt for its later names), and what transformers calls them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestrator.extensions.importers.megatron_experts import expert_name, mixtral_config
from orchestrator.extensions.importers.megatron_options import Options
from workloads.errors import WorkloadError

Ranks = Mapping[tuple[int, int], Mapping[str, Tensor]]
"""Tensors by canonical names, by tensor and pipeline rank."""
_FLAT = {
    "language_model.embedding.word_embeddings.weight": "words",
    "language_model.embedding.position_embeddings.weight": "positions",
    "language_model.output_layer.weight": "head",
    "word_embeddings_for_head.weight": "tied_head",
    "embedding.word_embeddings.weight": "words",
    "embedding.position_embeddings.weight": "positions",
    "output_layer.weight": "head",
}
_PARTS = {
    "self_attention.query_key_value": "qkv", "attention.query_key_value": "qkv", "self_attention.linear_qkv": "qkv",
    "self_attention.dense": "out", "attention.dense": "out", "self_attention.linear_proj": "out",
    "mlp.dense_h_to_4h": "up", "mlp.linear_fc1": "up", "mlp.dense_4h_to_h": "down", "mlp.linear_fc2": "down",
    "input_layernorm": "first_norm", "input_norm": "first_norm",
    "post_attention_layernorm": "second_norm", "post_attention_norm": "second_norm",
    "pre_mlp_layernorm": "second_norm", "mlp.router": "router",
}  # fmt: skip
_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "first_norm.",
    "mlp.linear_fc1.layer_norm_": "second_norm.",
}
_BODY = re.compile(r"(?:language_model\.(?:encoder|transformer)|decoder)\.(?:layers\.(\d+)\.)?(.+)")
_FINAL = re.compile(r"final_(?:layernorm|norm)\.(weight|bias)")
_NOT_NEEDED = re.compile(r".*(_extra_state|inv_freq)")


def canonical(model: Mapping[str, Any], max_bytes: int) -> dict[str, Tensor]:
    """Return the tensors of a rank, whose file has `max_bytes` bytes, by canonical names.

    Raises WorkloadError for one that is not known, is named twice, or is not a plain tensor of its own.
    """
    result: dict[str, Tensor] = {}
    taken = 0
    for name, tensor in _flat(model, "", set()):
        if not isinstance(tensor, Tensor) or _NOT_NEEDED.fullmatch(name):
            continue
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.is_floating_point()
        if not plain or tensor.is_quantized:
            raise WorkloadError(f"{name} is not a plain tensor of real numbers")
        taken += tensor.numel() * tensor.element_size()
        if taken > max_bytes:
            raise WorkloadError(f"{name} ends beyond the end of its file")
        if (ours := canonical_name(name)) in result:
            raise WorkloadError(f"{name} is stored under two names")
        result[ours] = tensor.detach()
    return result


def _flat(tree: Mapping[Any, Any], before: str, visited: set[int]) -> Iterator[tuple[str, Any]]:
    if id(tree) in visited:
        raise WorkloadError(f"{before or 'its model'} is in there twice")
    visited.add(id(tree))
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.", visited)
        else:
            yield f"{before}{name}", value


def canonical_name(name: str) -> str:
    """Return the canonical name of a tensor. Raises WorkloadError for one that is not known."""
    if name in _FLAT:
        return _FLAT[name]
    if body := _BODY.fullmatch(name):
        number, rest = body.groups()
        if number is None and (final := _FINAL.fullmatch(rest)):
            return f"final_norm.{final[1]}"
        for theirs, ours in _FUSED.items():
            if number is not None and rest.startswith(theirs):
                return f"layers.{number}.{ours}{rest.removeprefix(theirs)}"
        if number is not None and (of_experts := expert_name(rest)):
            return f"layers.{number}.{of_experts}"
        part, _, leaf = rest.rpartition(".")
        if number is not None and part in _PARTS and leaf in ("weight", "bias"):
            return f"layers.{number}.{_PARTS[part]}.{leaf}"
    raise WorkloadError(f"{name} is not a tensor of GPT that is known here, and would be lost")


def merged(
    ranks: Ranks, options: Options, vocabulary: int | None
) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Return the configuration and the tensors of transformers' class. Each tensor is made when it is needed.

    Both raise WorkloadError if parts are missing, do not fit, or would be lost.
    """
    model = _Whole(ranks, options, set())
    rows = sum(len(part) for part in model.parts(0, "words"))
    if vocabulary is not None and not 0 < vocabulary <= rows:
        raise WorkloadError(f"it has {rows} rows of tokens, but {vocabulary} are requested")
    kept = vocabulary or rows
    layers = list(model.layers())
    if options.rotary:
        llama = _llama_config(options, kept)
        config = mixtral_config(options, llama) if options.experts else llama
        return config, _checked(model, _llama(model, layers, kept), kept)
    if not options.tied:
        raise WorkloadError("its head is not tied to its table, as GPT-2's is")
    return _gpt2_config(options, kept), _checked(model, _gpt2(model, layers, kept), kept)


def _checked(model: _Whole, tensors: Iterator[tuple[str, Tensor]], kept: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors. Then raise WorkloadError if a tensor of the files was not read and is no copy of the table."""
    yield from tensors
    last = model.options.pipeline - 1
    for name in ("tied_head", "head", "words"):
        if not model.options.tied or name not in model.ranks[0, last]:
            continue
        if not torch.equal(model.joined(last, name, 0)[:kept], model.joined(0, "words", 0)[:kept]):
            raise WorkloadError(
                f"the {name} of pipeline rank {last} differs from the table of rank 0, but should be equal"
            )
    for (tp, stage), held in model.ranks.items():
        if left := sorted(name for name in held if (stage, name) not in model.used):
            raise WorkloadError(
                f"{left[0]} of tensor-parallel rank {tp}, pipeline rank {stage} has no place in the model of its "
                "options, and would be lost"
            )


def _gpt2_config(options: Options, rows: int) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": rows,
        "n_positions": options.positions, "n_embd": options.hidden, "n_layer": options.layers, "n_head": options.heads,
        "n_inner": options.feedforward, "activation_function": options.activation,
        "layer_norm_epsilon": options.eps, "tie_word_embeddings": True,
    }  # fmt: skip


def _gpt2(model: _Whole, layers: list[tuple[int, str]], rows: int) -> Iterator[tuple[str, Tensor]]:
    yield "transformer.wte.weight", model.joined(0, "words", 0)[:rows]
    yield "transformer.wpe.weight", model.alike(0, "positions")
    for number, (stage, prefix) in enumerate(layers):
        to = f"transformer.h.{number}."
        for leaf in ("weight", "bias"):
            for name, tensor in (
                ("attn.c_attn", torch.cat(model.query_key_value(stage, f"{prefix}qkv.{leaf}"))),
                ("attn.c_proj", model.row(stage, f"{prefix}out.{leaf}")),
                ("mlp.c_fc", model.joined(stage, f"{prefix}up.{leaf}", 0)),
                ("mlp.c_proj", model.row(stage, f"{prefix}down.{leaf}")),
            ):
                yield f"{to}{name}.{leaf}", tensor.t().contiguous() if leaf == "weight" else tensor
            yield f"{to}ln_1.{leaf}", model.alike(stage, f"{prefix}first_norm.{leaf}")
            yield f"{to}ln_2.{leaf}", model.alike(stage, f"{prefix}second_norm.{leaf}")
    for leaf in ("weight", "bias"):
        yield f"transformer.ln_f.{leaf}", model.alike(model.options.pipeline - 1, f"final_norm.{leaf}")


def _llama_config(options: Options, rows: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": rows,
        "max_position_embeddings": options.positions, "hidden_size": options.hidden,
        "num_hidden_layers": options.layers, "num_attention_heads": options.heads,
        "num_key_value_heads": options.groups, "head_dim": options.head_size, "intermediate_size": options.feedforward,
        "hidden_act": "silu", "rms_norm_eps": options.eps, "tie_word_embeddings": options.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": options.theta},
        "rope_theta": options.theta,  # as transformers 4 reads it
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


def _llama(model: _Whole, layers: list[tuple[int, str]], rows: int) -> Iterator[tuple[str, Tensor]]:
    last = model.options.pipeline - 1
    yield "model.embed_tokens.weight", model.joined(0, "words", 0)[:rows]
    for number, (stage, prefix) in enumerate(layers):
        to = f"model.layers.{number}."
        projections = model.query_key_value(stage, f"{prefix}qkv.weight")
        for name, tensor in zip("qkv", projections, strict=True):
            yield f"{to}self_attn.{name}_proj.weight", tensor
        yield f"{to}self_attn.o_proj.weight", model.row(stage, f"{prefix}out.weight")
        if model.options.experts:
            yield f"{to}block_sparse_moe.gate.weight", model.alike(stage, f"{prefix}router.weight")
        for part, names in _feed_forwards(model.options.experts):
            gate, up = model.gate_up(stage, f"{prefix}{part}up.weight")
            yield f"{to}{names[0]}.weight", gate
            yield f"{to}{names[1]}.weight", up
            yield f"{to}{names[2]}.weight", model.row(stage, f"{prefix}{part}down.weight")
        yield f"{to}input_layernorm.weight", model.alike(stage, f"{prefix}first_norm.weight")
        yield f"{to}post_attention_layernorm.weight", model.alike(stage, f"{prefix}second_norm.weight")
    yield "model.norm.weight", model.alike(last, "final_norm.weight")
    if not model.options.tied:
        yield "lm_head.weight", model.joined(last, "head", 0)[:rows]


def _feed_forwards(experts: int) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Return the prefix of the tensors of a layer's feed-forward block or of its experts, and transformers' names of
    gate, up and down projections."""
    if not experts:
        yield "", ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    for number in range(experts):
        to = f"block_sparse_moe.experts.{number}.w"
        yield f"experts.{number}.", (f"{to}1", f"{to}3", f"{to}2")


@dataclass(frozen=True)
class _Whole:
    """Tensors put together from those of the tensor-parallel ranks of a pipeline stage. used: what was asked for."""

    ranks: Ranks
    options: Options
    used: set[tuple[int, str]]

    def layers(self) -> Iterator[tuple[int, str]]:
        """Each layer's stage, and what its names begin with there: a stage counts its own from 0."""
        count = 0
        for stage in range(self.options.pipeline):
            numbers = {int(n.split(".")[1]) for n in self.ranks[0, stage] if n.startswith("layers.")}
            if numbers != set(range(len(numbers))):
                raise WorkloadError(
                    f"pipeline rank {stage} has layers {sorted(numbers)}, and not 0, 1, 2, ..."
                )
            yield from ((stage, f"layers.{number}.") for number in sorted(numbers))
            count += len(numbers)
        if count != self.options.layers:
            raise WorkloadError(
                f"its ranks have {count} layers together, but its options say {self.options.layers}"
            )

    def parts(self, stage: int, name: str) -> list[Tensor]:
        """The parts of a tensor, by rank."""
        pieces = [self.ranks[tp, stage].get(name) for tp in range(self.options.tensor)]
        present = [part for part in pieces if part is not None]
        self.used.add((stage, name))
        if len(present) != len(pieces):
            raise WorkloadError(
                f"{name} is missing on tensor-parallel rank {pieces.index(None)}, pipeline rank {stage}"
            )
        if len({(part.shape, part.dtype) for part in present}) > 1:
            raise WorkloadError(f"{name} of pipeline rank {stage} has other shapes or types on other ranks")
        return present

    def joined(self, stage: int, name: str, dim: int) -> Tensor:
        """A tensor that is cut along a dimension."""
        return torch.cat(self.parts(stage, name), dim)

    def row(self, stage: int, name: str) -> Tensor:
        """A tensor of a layer that is cut over its inputs: its bias is whole everywhere."""
        return self.joined(stage, name, 1) if name.endswith("weight") else self.alike(stage, name)

    def alike(self, stage: int, name: str) -> Tensor:
        """A tensor that all ranks have."""
        first, *others = self.parts(stage, name)
        if any(not torch.equal(first, other) for other in others):
            raise WorkloadError(f"{name} of pipeline rank {stage} differs between ranks, but should be equal")
        return first.clone()

    def gate_up(self, stage: int, name: str) -> tuple[Tensor, Tensor]:
        """Both halves of a gated feed-forward's first matrix, which each rank has one over the other."""
        halves = [part.chunk(2) for part in self.parts(stage, name)]
        return torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])

    def query_key_value(self, stage: int, name: str) -> list[Tensor]:
        """Queries, keys and values, each of all heads in order."""
        split = [self._split(part, name) for part in self.parts(stage, name)]
        return [torch.cat(parts) for parts in zip(*split, strict=True)]

    def _split(self, part: Tensor, name: str) -> list[Tensor]:
        """Queries, keys and values of a rank's heads. Rows are [3, heads, size] before version 1, [heads, size, 3] in
        it, and from version 2 on [groups, queries of a group + 2, size]."""
        options, rest = self.options, part.shape[1:]
        heads, groups = options.heads // options.tensor, options.groups // options.tensor
        size, each = options.head_size, options.heads // options.groups
        fit = (heads + 2 * groups) * size
        if len(part) != fit:
            raise WorkloadError(f"{name} has {len(part)} rows on a rank, but its options say {fit}")
        result: list[Tensor]
        if options.version >= 2.0:
            rows = part.view(groups, each + 2, size, *rest)
            result = [rows[:, :each], rows[:, each], rows[:, each + 1]]
        elif each != 1:
            raise WorkloadError(
                f"version {options.version} has no groups of queries; its options say {groups}"
            )
        elif options.version >= 1.0:
            result = list(part.view(heads, size, 3, *rest).unbind(2))
        else:
            result = list(part.view(3, heads, size, *rest))
        return [each.reshape(-1, *rest) for each in result]
