"""The names and the layout of Megatron-LM's tensors (github.com/NVIDIA/Megatron-LM: megatron/legacy/model, and
megatron/core/models/gpt for its later names), and what transformers calls them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    "pre_mlp_layernorm": "second_norm",
}  # fmt: skip
_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "first_norm.",
    "mlp.linear_fc1.layer_norm_": "second_norm.",
}
_BODY = re.compile(r"(?:language_model\.(?:encoder|transformer)|decoder)\.(?:layers\.(\d+)\.)?(.+)")
_FINAL = re.compile(r"final_(?:layernorm|norm)\.(weight|bias)")
_NOT_NEEDED = re.compile(r".*(_extra_state|inv_freq)")


@dataclass(frozen=True)
class Options:
    """What of a run's options decides the layout of its tensors, and what they compute. groups: key-value heads."""

    version: float
    tensor: int
    pipeline: int
    layers: int
    hidden: int
    heads: int
    groups: int
    head_size: int
    feedforward: int
    positions: int
    eps: float
    gated: bool
    rotary: bool
    theta: float
    tied: bool
    activation: str


def options_of(args: Mapping[str, Any], version: float) -> Options:
    """Those of a run. Raises WorkloadError for a model that neither GPT-2 nor Llama computes."""

    def said(name: str, missing: Any) -> Any:
        found = args.get(name, missing)
        return missing if found is None else found

    rotary = (
        bool(said("use_rotary_position_embeddings", False)) or said("position_embedding_type", "") == "rope"
    )
    gated, rms = bool(said("swiglu", False)), said("normalization", "LayerNorm") == "RMSNorm"
    biases = bool(said("add_bias_linear", True)) or bool(said("add_qkv_bias", False))
    for name, found, wanted in (
        ("num_experts", said("num_experts", 0), 0),
        ("apply_layernorm_1p", bool(said("apply_layernorm_1p", False)), False),
        ("apply_residual_connection_post_layernorm",
         bool(said("apply_residual_connection_post_layernorm", False)), False),
        ("rotary_interleaved", bool(said("rotary_interleaved", False)), False),
        ("rotary_percent", float(said("rotary_percent", 1.0)), 1.0),
        ("rotary_seq_len_interpolation_factor", said("rotary_seq_len_interpolation_factor", 1), 1),
        ("use_rope_scaling", bool(said("use_rope_scaling", False)), False),
        ("qk_layernorm", bool(said("qk_layernorm", False)), False),
        ("squared_relu", bool(said("squared_relu", False)), False),
        ("multi_latent_attention", bool(said("multi_latent_attention", False)), False),
    ):  # fmt: skip
        if found != wanted:
            raise WorkloadError(f"{name} {found!r} is not imported, only {wanted!r}")
    if not (rotary == gated == rms != biases):
        kinds = f"rotary positions {rotary}, swiglu {gated}, RMSNorm {rms} and biases {biases}"
        raise WorkloadError(
            f"{kinds} are neither GPT-2's (none but biases) nor Llama's (all but biases), which are imported"
        )
    hidden, heads = args["hidden_size"], args["num_attention_heads"]
    groups = said("num_query_groups", heads) if said("group_query_attention", False) else heads
    tanh = bool(said("bias_gelu_fusion", False)) or bool(said("openai_gelu", False))
    return Options(
        version,
        said("tensor_model_parallel_size", 1),
        said("pipeline_model_parallel_size", 1),
        args["num_layers"],
        hidden,
        heads,
        groups,
        said("kv_channels", hidden // heads),
        said("ffn_hidden_size", 4 * hidden),
        said("max_position_embeddings", said("seq_length", 0)),
        said("norm_epsilon", said("layernorm_epsilon", 1e-5)),
        gated,
        rotary,
        float(said("rotary_base", 10000)),
        not said("untie_embeddings_and_output_weights", False),
        "gelu_new" if tanh else "gelu",
    )


def canonical(model: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a rank by canonical names. Raises WorkloadError for one that is not known."""
    found = {}
    for name, tensor in _flat(model, ""):
        if not isinstance(tensor, Tensor) or _NOT_NEEDED.fullmatch(name):
            continue
        found[_canonical(name)] = tensor
    return found


def _flat(tree: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _canonical(name: str) -> str:
    if name in _FLAT:
        return _FLAT[name]
    if body := _BODY.fullmatch(name):
        number, rest = body.groups()
        if number is None and (final := _FINAL.fullmatch(rest)):
            return f"final_norm.{final[1]}"
        for theirs, ours in _FUSED.items():
            if number is not None and rest.startswith(theirs):
                return f"layers.{number}.{ours}{rest.removeprefix(theirs)}"
        part, _, leaf = rest.rpartition(".")
        if number is not None and part in _PARTS and leaf in ("weight", "bias"):
            return f"layers.{number}.{_PARTS[part]}.{leaf}"
    raise WorkloadError(f"{name} is no tensor of GPT that is known here, and would be lost")


def merged(
    ranks: Ranks, options: Options, vocabulary: int | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors of transformers' class. Raises WorkloadError if parts are missing or do not
    fit."""
    whole = _Whole(ranks, options)
    last = options.pipeline - 1
    words = whole.joined(0, "words", 0)
    if vocabulary is not None and not 0 < vocabulary <= len(words):
        raise WorkloadError(f"it has {len(words)} rows of tokens, and {vocabulary} are asked for")
    words = words[:vocabulary]
    if options.rotary:
        config, tensors = _llama(whole, options, words)
        tensors["model.norm.weight"] = whole.alike(last, "final_norm.weight")
        if not options.tied:
            tensors["lm_head.weight"] = whole.joined(last, "head", 0)[:vocabulary]
        return config, tensors
    if not options.tied:
        raise WorkloadError("its head is not tied to its table, as GPT-2's is")
    config, tensors = _gpt2(whole, options, words)
    for leaf in ("weight", "bias"):
        tensors[f"transformer.ln_f.{leaf}"] = whole.alike(last, f"final_norm.{leaf}")
    return config, tensors


def _gpt2(whole: _Whole, options: Options, words: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    positions = whole.alike(0, "positions")
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": len(words),
        "n_positions": len(positions), "n_embd": options.hidden, "n_layer": options.layers, "n_head": options.heads,
        "n_inner": options.feedforward, "activation_function": options.activation,
        "layer_norm_epsilon": options.eps, "tie_word_embeddings": True,
    }  # fmt: skip
    tensors = {"transformer.wte.weight": words, "transformer.wpe.weight": positions}
    for number, (stage, here) in enumerate(whole.layers()):
        to = f"transformer.h.{number}."
        for leaf in ("weight", "bias"):
            qkv = torch.cat(whole.query_key_value(stage, f"{here}qkv.{leaf}"))
            up = whole.joined(stage, f"{here}up.{leaf}", 0)
            out, down = (whole.row(stage, f"{here}{part}.{leaf}") for part in ("out", "down"))
            for name, tensor in (
                ("attn.c_attn", qkv),
                ("attn.c_proj", out),
                ("mlp.c_fc", up),
                ("mlp.c_proj", down),
            ):
                tensors[f"{to}{name}.{leaf}"] = tensor.t().contiguous() if leaf == "weight" else tensor
            tensors[f"{to}ln_1.{leaf}"] = whole.alike(stage, f"{here}first_norm.{leaf}")
            tensors[f"{to}ln_2.{leaf}"] = whole.alike(stage, f"{here}second_norm.{leaf}")
    return config, tensors


def _llama(whole: _Whole, options: Options, words: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(words),
        "max_position_embeddings": options.positions, "hidden_size": options.hidden,
        "num_hidden_layers": options.layers, "num_attention_heads": options.heads,
        "num_key_value_heads": options.groups, "head_dim": options.head_size, "intermediate_size": options.feedforward,
        "hidden_act": "silu", "rms_norm_eps": options.eps, "tie_word_embeddings": options.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": options.theta},
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": words}
    for number, (stage, here) in enumerate(whole.layers()):
        to = f"model.layers.{number}."
        projections = whole.query_key_value(stage, f"{here}qkv.weight")
        for name, tensor in zip("qkv", projections, strict=True):
            tensors[f"{to}self_attn.{name}_proj.weight"] = tensor
        gate, up = whole.gate_up(stage, f"{here}up.weight")
        tensors |= {
            f"{to}self_attn.o_proj.weight": whole.row(stage, f"{here}out.weight"),
            f"{to}mlp.gate_proj.weight": gate,
            f"{to}mlp.up_proj.weight": up,
            f"{to}mlp.down_proj.weight": whole.row(stage, f"{here}down.weight"),
            f"{to}input_layernorm.weight": whole.alike(stage, f"{here}first_norm.weight"),
            f"{to}post_attention_layernorm.weight": whole.alike(stage, f"{here}second_norm.weight"),
        }
    return config, tensors


@dataclass(frozen=True)
class _Whole:
    """Tensors put together from those of the tensor-parallel ranks of a pipeline stage."""

    ranks: Ranks
    options: Options

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
                f"its ranks have {count} layers together, and its options say {self.options.layers}"
            )

    def parts(self, stage: int, name: str) -> list[Tensor]:
        """What each rank has of a tensor."""
        found = [self.ranks[tp, stage].get(name) for tp in range(self.options.tensor)]
        there = [part for part in found if part is not None]
        if len(there) != len(found):
            raise WorkloadError(
                f"{name} is missing on tensor-parallel rank {found.index(None)}, pipeline rank {stage}"
            )
        return there

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
            raise WorkloadError(f"{name} of pipeline rank {stage} is to be the same on all ranks, and is not")
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
            raise WorkloadError(f"{name} has {len(part)} rows on a rank, and its options say {fit}")
        found: list[Tensor]
        if options.version >= 2.0:
            rows = part.view(groups, each + 2, size, *rest)
            found = [rows[:, :each], rows[:, each], rows[:, each + 1]]
        elif each != 1:
            raise WorkloadError(
                f"version {options.version} has no groups of queries; its options say {groups}"
            )
        elif options.version >= 1.0:
            found = list(part.view(heads, size, 3, *rest).unbind(2))
        else:
            found = list(part.view(3, heads, size, *rest))
        return [each.reshape(-1, *rest) for each in found]
