"""Other projects' names and row order for the tensors of a transformers class.

torchtitan: the `from_hf_map` of its state dict adapters (github.com/pytorch/torchtitan, torchtitan/models/llama3 and
qwen3, state_dict_adapter.py, August 2026). Names from before April 2026 (`attention.wq`, `output`) are read too. Its
Llama rotates neighbouring pairs of a head (Meta's order), so rows of queries and keys have another order; its Qwen 3
matches transformers. OLMo: OLMo-core's `HF_TO_OLMO_CORE_WEIGHT_MAPPINGS` (github.com/allenai/OLMo-core,
src/olmo_core/nn/hf/convert.py, June 2026), under `model.`, as its trainer stores them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from workloads.errors import WorkloadError

_LAYER = "model.layers.{n}."
_TITAN = "layers.{n}."
_TORCHTITAN = {
    "model.embed_tokens.weight": ("tok_embeddings.weight",),
    "model.norm.weight": ("norm.weight",),
    "lm_head.weight": ("lm_head.weight", "output.weight"),
    _LAYER + "self_attn.q_proj.weight": (_TITAN + "attention.qkv_linear.wq.weight", _TITAN + "attention.wq.weight"),
    _LAYER + "self_attn.k_proj.weight": (_TITAN + "attention.qkv_linear.wk.weight", _TITAN + "attention.wk.weight"),
    _LAYER + "self_attn.v_proj.weight": (_TITAN + "attention.qkv_linear.wv.weight", _TITAN + "attention.wv.weight"),
    _LAYER + "self_attn.o_proj.weight": (_TITAN + "attention.wo.weight",),
    _LAYER + "mlp.gate_proj.weight": (_TITAN + "feed_forward.w1.weight",),
    _LAYER + "mlp.up_proj.weight": (_TITAN + "feed_forward.w3.weight",),
    _LAYER + "mlp.down_proj.weight": (_TITAN + "feed_forward.w2.weight",),
    _LAYER + "input_layernorm.weight": (_TITAN + "attention_norm.weight",),
    _LAYER + "post_attention_layernorm.weight": (_TITAN + "ffn_norm.weight",),
}  # fmt: skip
_TITAN_NORMS = {
    _LAYER + "self_attn.q_norm.weight": (_TITAN + "attention.q_norm.weight",),
    _LAYER + "self_attn.k_norm.weight": (_TITAN + "attention.k_norm.weight",),
}
_EXPERTS = _LAYER + "mlp.experts.{e}."
_STACKS = _TITAN + "moe.routed_experts.inner_experts."
_TITAN_EXPERTS = {
    _EXPERTS + "gate_proj.weight": (_STACKS + "w1_EFD", _TITAN + "moe.experts.w1"),
    _EXPERTS + "up_proj.weight": (_STACKS + "w3_EFD", _TITAN + "moe.experts.w3"),
    _EXPERTS + "down_proj.weight": (_STACKS + "w2_EDF", _TITAN + "moe.experts.w2"),
    _LAYER + "mlp.gate.weight": (_TITAN + "moe.router.gate.weight",),
}
"""One tensor holds all experts: {e} is the index in its first dimension."""
_BLOCK = "blocks.{n}."
_OLMO = {
    "model.embed_tokens.weight": ("embeddings.weight",),
    "model.norm.weight": ("lm_head.norm.weight",),
    "lm_head.weight": ("lm_head.w_out.weight",),
    _LAYER + "self_attn.q_proj.weight": (_BLOCK + "attention.w_q.weight",),
    _LAYER + "self_attn.k_proj.weight": (_BLOCK + "attention.w_k.weight",),
    _LAYER + "self_attn.v_proj.weight": (_BLOCK + "attention.w_v.weight",),
    _LAYER + "self_attn.o_proj.weight": (_BLOCK + "attention.w_out.weight",),
    _LAYER + "mlp.gate_proj.weight": (_BLOCK + "feed_forward.w1.weight",),
    _LAYER + "mlp.down_proj.weight": (_BLOCK + "feed_forward.w2.weight",),
    _LAYER + "mlp.up_proj.weight": (_BLOCK + "feed_forward.w3.weight",),
}
_OLMO_NORMS = {
    _LAYER + "self_attn.q_norm.weight": (_BLOCK + "attention.q_norm.weight",),
    _LAYER + "self_attn.k_norm.weight": (_BLOCK + "attention.k_norm.weight",),
}
_BEFORE = {
    _LAYER + "input_layernorm.weight": (_BLOCK + "attention_norm.weight",),
    _LAYER + "post_attention_layernorm.weight": (_BLOCK + "feed_forward_norm.weight",),
}
_AFTER = {
    _LAYER + "post_attention_layernorm.weight": (_BLOCK + "attention_norm.weight",),
    _LAYER + "post_feedforward_layernorm.weight": (_BLOCK + "feed_forward_norm.weight",),
}

Table = Mapping[str, tuple[str, ...]]
"""Another project's names for a tensor of transformers, the current one first."""


@dataclass(frozen=True)
class NameMap:
    """The names of one project.

    Attributes:
        marker: the name of its word embeddings, which identifies the project.
        tables: the names by model_type.
        prefix: the prefix that it writes before all names.
        paired: the model types whose query and key rows are in Meta's order.
        unties: whether it stores the output projection even if that is tied to the embeddings.
    """

    marker: str
    tables: Mapping[str, Table]
    prefix: str = ""
    paired: frozenset[str] = field(default_factory=frozenset)
    unties: bool = False


MAPS: Mapping[str, NameMap] = MappingProxyType({
    "torchtitan": NameMap(
        "tok_embeddings.weight",
        {
            "llama": _TORCHTITAN,
            "qwen3": _TORCHTITAN | _TITAN_NORMS,
            "qwen3_moe": _TORCHTITAN | _TITAN_NORMS | _TITAN_EXPERTS,
        },
        paired=frozenset(("llama",)),
        unties=True,
    ),
    "olmo": NameMap(
        "embeddings.weight",
        {"olmo2": _OLMO | _OLMO_NORMS | _AFTER, "llama": _OLMO | _BEFORE, "qwen3": _OLMO | _OLMO_NORMS | _BEFORE},
        prefix="model.",
    ),
})  # fmt: skip
PREFIXES = ("", "model.", "module.", "model.module.", "state_dict.")
"""Prefixes of weight names in a checkpoint that also holds other state."""


@dataclass(frozen=True)
class Place:
    """Where a tensor of a transformers class is stored.

    Attributes:
        head: rows of a head in Meta's order; 0 for transformers' order.
        expert: its index in the first dimension of a stack; None if it is stored alone.
    """

    name: str
    head: int = 0
    expert: int | None = None

    def rows(self, wanted: range) -> tuple[range, Tensor | None]:
        """Return the stored rows that contain the `wanted` ones, and their positions among them; None for all of
        them.
        """
        if not self.head:
            return wanted, None
        low = wanted.start // self.head * self.head
        high = -(-wanted.stop // self.head) * self.head
        numbers = torch.arange(wanted.start, wanted.stop)
        inside = numbers % self.head
        half = self.head // 2
        return range(low, high), numbers - inside + 2 * (inside % half) + inside // half - low


@dataclass(frozen=True)
class Stored:
    """The transformers tensors that form one tensor of another project: one tensor, or a stack's experts in order.
    `head` is as in `Place`.
    """

    names: tuple[str, ...]
    head: int = 0
    stacked: bool = False


def places(
    stored: Mapping[str, Sequence[int]], config: Mapping[str, Any], word_embeddings: str
) -> dict[str, Place]:
    """Return where the tensors of transformers are in a checkpoint, under a project's names in `MAPS` or
    transformers' own.

    Args:
        stored: the shapes of the checkpoint's tensors. Other content, such as optimizer state, is left out.
        config: the model's config.json.
        word_embeddings: their name in transformers; '' if unknown.

    Raises WorkloadError if a project's names for this class are unknown.
    """
    for project, known in MAPS.items():
        for prefix in PREFIXES:
            if f"{prefix}{known.marker}" in stored:
                table = _table(project, str(config.get("model_type")))
                return dict(_found(table, known, prefix, stored, config))
    bare = word_embeddings.split(".", 1)[-1]
    prefix = next((p for p in PREFIXES for n in (word_embeddings, bare) if f"{p}{n}" in stored), "")
    names = [n for n in stored if n.startswith(prefix)]
    return {n.removeprefix(prefix): Place(n) for n in names if prefix or not _is_state(n)}


def written(project: str, names: Collection[str], config: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors that a project stores, by its names.

    `names` are those of an export for transformers. Raises WorkloadError if the project has no name for a tensor.
    """
    known = MAPS[project]
    table = _table(project, str(config.get("model_type")))
    stored: dict[str, Stored] = {}
    stacks: dict[str, dict[int, str]] = {}
    for name in names:
        pattern, number, expert = _pattern(name)
        if pattern not in table:
            raise WorkloadError(f"{project} has no name for {name}; use the names of transformers")
        theirs = known.prefix + table[pattern][0].replace("{n}", number)
        if expert:
            stacks.setdefault(theirs, {})[int(expert)] = name
        else:
            stored[theirs] = Stored((name,), _head(known, pattern, config))
    for theirs, experts in stacks.items():
        stored[theirs] = Stored(tuple(experts[number] for number in sorted(experts)), stacked=True)
    if known.unties and "lm_head.weight" not in names:
        stored[known.prefix + table["lm_head.weight"][0]] = Stored(("model.embed_tokens.weight",))
    return stored


def to_pairs(tensor: Tensor, head: int) -> Tensor:
    """Return the rows of a transformers tensor in Meta's order, for heads of `head` rows."""
    return tensor.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).flatten(0, 2) if head else tensor


def _table(project: str, model_type: str) -> Table:
    tables = MAPS[project].tables
    if model_type not in tables:
        raise WorkloadError(
            f"the names of {project} are known for {', '.join(tables)}, but this model is {model_type}; "
            "use the names of transformers"
        )
    return tables[model_type]


def _found(
    table: Table, known: NameMap, prefix: str, stored: Mapping[str, Sequence[int]], config: Mapping[str, Any]
) -> Iterator[tuple[str, Place]]:
    mine = {theirs: name for name, all_ in table.items() for theirs in all_}
    for name in stored:
        inside = name.removeprefix(prefix)
        if not name.startswith(prefix) or (not prefix and _is_state(name)) or inside.endswith("freqs_cis"):
            continue
        pattern, number, _ = _pattern(inside)
        if pattern in mine and "{e}" in mine[pattern]:
            of_layer = mine[pattern].replace("{n}", number)
            for expert in range(stored[name][0]):
                yield of_layer.replace("{e}", str(expert)), Place(name, expert=expert)
        elif pattern in mine:
            hf_name = mine[pattern]
            yield hf_name.replace("{n}", number), Place(name, _head(known, hf_name, config))
        else:
            yield inside, Place(name)  # refused by this name: the model has no place for it


def _head(known: NameMap, pattern: str, config: Mapping[str, Any]) -> int:
    if config.get("model_type") not in known.paired or not re.search(r"self_attn\.[qk]_proj", pattern):
        return 0
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _pattern(name: str) -> tuple[str, str, str]:
    """Return a name with {n} and {e} for its layer's and its expert's number, and these numbers."""
    layer = re.search(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", name)
    if not layer:
        return name, "", ""
    rest = name[layer.end() :]
    expert = re.search(r"(?<=\.experts\.)\d+(?=\.)", rest)
    if expert:
        rest = rest[: expert.start()] + "{e}" + rest[expert.end() :]
    return name[: layer.start()] + "{n}" + rest, layer.group(), expert.group() if expert else ""


def _is_state(name: str) -> bool:
    """Return whether a tensor belongs to the state of an optimizer, a schedule or a data loader."""
    return name.startswith(("optim", "lr_scheduler", "scheduler", "dataloader", "train_state", "rng", "ema"))
