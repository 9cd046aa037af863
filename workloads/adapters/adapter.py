"""Adapters of this project's models: the tensors that they add, their initial values, and how they are sharded."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.adapters.frozen import matching
from workloads.adapters.lora import EXPERTS_A, EXPERTS_B, LoraLinear, add_to_experts, merged
from workloads.adapters.nf4 import BLOCK
from workloads.adapters.prompt import add_prompt
from workloads.errors import WorkloadError
from workloads.model.attention import Attention
from workloads.model.config import TransformerConfig
from workloads.model.initialise import normal
from workloads.model.moe import Experts
from workloads.model.stored import HEADS
from workloads.model.transformer import Layer, Transformer


class Prefix(nn.Module):
    """Learned keys and values, each [kv_heads * head_dim, count], that every token attends to.

    Column i belongs to position i. The tokens follow from position `count` on.
    """

    def __init__(self, width: int, head_dim: int, count: int) -> None:
        super().__init__()
        self.key = nn.Parameter(torch.empty(width, count))
        self.value = nn.Parameter(torch.empty(width, count))
        self.head_dim = head_dim

    def forward(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Prepend the prefix to the tokens' keys and values [B, kv_heads, L, D]."""
        return self._before(self.key, key), self._before(self.value, value)

    def _before(self, learned: Tensor, of_tokens: Tensor) -> Tensor:
        # A tensor-parallel rank has only some of the heads.
        heads = learned.unflatten(0, (-1, self.head_dim)).transpose(1, 2).to(of_tokens.dtype)
        return torch.cat((heads.expand(len(of_tokens), -1, -1, -1), of_tokens), dim=2)


def add_prefixes(model: nn.Module, config: TransformerConfig, count: int) -> None:
    """Add a prefix to each attention of a model. Raises WorkloadError if the model does not support prefixes."""
    for reason, wrong in (
        ("it has two stacks", config.architecture == "encoder-decoder" or bool(config.generator)),
        ("its layers share weights", config.shared_layers),
        ("its attention is latent", config.latent is not None),
        ("its attention has a window", bool(config.window)),
        ("its positions are not absolute", config.positions not in ("learned", "rotary")),
        ("its scores depend on distances", config.biased_by_distance or bool(config.disentangled)),
        ("it has block positions", config.block_positions),
    ):
        if wrong:
            raise WorkloadError(f"this model can have no prefix: {reason}; use lora")
    assert isinstance(model, Transformer)
    model.prefix_length = count
    for module in model.modules():
        if isinstance(module, Attention):
            width = config.kv_heads * config.head_dim
            module.prefix = Prefix(width, config.head_dim, count)


class Bottleneck(nn.Module):
    """Computes x + up(gelu(down(x))) on a sub-layer's output, before the residual addition."""

    def __init__(self, size: int, narrow: int) -> None:
        super().__init__()
        self.down = nn.Linear(size, narrow)
        self.up = nn.Linear(narrow, size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, L, size] to [B, L, size]."""
        return x + self.up(F.gelu(self.down(x)))


def add_bottlenecks(model: nn.Module, hidden: int, narrow: int) -> None:
    """Add two bottlenecks to each layer of a model: after its attention and after its feed-forward network."""
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.attention_adapter = Bottleneck(hidden, narrow)
            layer.feedforward_adapter = Bottleneck(hidden, narrow)


LOW_RANK = ("lora", "rslora", "dora")
A = ".lora_a.weight"
B = ".lora_b.weight"
LENGTH = ".magnitude.weight"
"""Suffixes of the tensors that a low-rank adapter adds to a linear layer."""
PROMPTS = ("prompt", "p_tuning")
"""The kinds that put vectors before the tokens at the input only."""
PROMPT = "prompt.weight"
KEY, VALUE = ".prefix.key", ".prefix.value"
PREFIX_STD = 0.02
LAYER_NORM = re.compile(r"layers\.\d+\.(attention|cross|feedforward)_norm\.")
LAYER = re.compile(r"(^|\.)layers\.")
Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Adapter:
    """A set of trained parameters on top of a frozen base model.

    Attributes:
        kind: one of LOW_RANK; `prefix`, `rank` keys and values in every layer; one of PROMPTS, `rank` vectors at the
            input; `houlsby`, bottlenecks of width `rank`, which also trains the layers' norms; or `bitfit`, which adds
            nothing and trains the biases (Ben Zaken et al., 2022).
        targets: name patterns of linear layers. A low-rank adapter scales its product by alpha / rank, or by alpha /
            sqrt(rank) if it is rank-stabilised.
        quantise: whether the base's linear layers are stored in 4 bits, see `workloads.adapters.nf4`.
    """

    kind: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    quantise: bool = False

    @property
    def scale(self) -> float:
        """Return the factor of the product B A."""
        return self.alpha / (self.rank**0.5 if self.kind == "rslora" else self.rank)

    def apply(self, model: nn.Module, config: TransformerConfig) -> None:
        """Add the adapter to a model of that configuration.

        Raises WorkloadError if a pattern matches no linear layer, or if the model does not support this kind.
        """
        if self.kind not in LOW_RANK:
            if self.kind == "houlsby":
                add_bottlenecks(model, config.hidden, self.rank)
            elif self.kind == "prefix":
                add_prefixes(model, config, self.rank)
            elif self.kind in PROMPTS:
                add_prompt(model, config, self.rank, self.kind == "p_tuning")
            return
        stacked = [pattern for pattern in self.targets if "experts" in pattern]
        if stacked:
            self._adapt_experts(model, stacked)
        if plain := [pattern for pattern in self.targets if pattern not in stacked]:
            layers = [name for name in linear_layers(model) if not f"{name}.".startswith(HEADS)]
            replace(self, targets=tuple(plain)).adapt(model, layers)

    def _adapt_experts(self, model: nn.Module, patterns: Sequence[str]) -> None:
        """Add low-rank pairs to the stacked expert weights that the patterns match, as in `experts`."""
        if self.kind == "dora":
            raise WorkloadError("dora does not support stacked experts; use lora")
        stacks = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
        names = [
            f"{stack}.{part}"
            for stack, module in stacks.items()
            for part, parameter in module.named_parameters()
            if parameter.dim() > 2
        ]
        for name in sorted(matching(patterns, names, "stacked weight of experts")):
            stack, _, part = name.rpartition(".")
            add_to_experts(stacks[stack], part, self.rank, self.scale)

    def adapt(self, model: nn.Module, layers: Collection[str]) -> None:
        """Add low-rank pairs to the targets among these linear layers. Raises WorkloadError if a pattern matches no
        layer.
        """
        for name in sorted(matching(self.targets, layers, "linear layer")):
            parent, _, leaf = name.rpartition(".")
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            adapted = LoraLinear(layer, self.rank, self.scale, self.kind == "dora")
            setattr(model.get_submodule(parent), leaf, adapted)

    def trains(self, name: str) -> bool:
        """Return whether the adapter trains the parameter `name`. Newly initialised heads are trained in any case."""
        if self.kind == "bitfit":
            return name.endswith("bias")
        return self.adds(name) or (self.kind == "houlsby" and LAYER_NORM.search(name) is not None)

    def adds(self, name: str) -> bool:
        """Return whether the tensor `name` belongs to the adapter and not to the base."""
        if self.kind == "houlsby":
            return "_adapter." in name
        if self.kind == "prefix":
            return name.endswith((KEY, VALUE))
        if self.kind in PROMPTS:
            return name.startswith("prompt.")
        return self.kind in LOW_RANK and name.endswith((A, B, LENGTH, EXPERTS_A, EXPERTS_B))

    @property
    def positions(self) -> int:
        """Return the number of positions that the adapter takes from the tokens."""
        return self.rank if self.kind in ("prefix", *PROMPTS) else 0

    @property
    def merges(self) -> bool:
        """Return whether the adapter can be merged into a plain model that computes the same."""
        return self.kind not in ("houlsby", "prefix", *PROMPTS)

    def initial(self, name: str, shape: torch.Size, seed: int, base: Read) -> Tensor:
        """Return the initial value of an added tensor, fp32 on CPU. The model's outputs change little or not at all.

        B is zero. A is normal with the variance of peft's uniform values, kaiming_uniform with a = sqrt(5): 1 / (3 *
        inputs). Bottlenecks begin near the identity, with a standard deviation of 0.01 (Houlsby et al., section 3.6).
        Prompts begin as the vectors of randomly drawn tokens (Lester et al., section 3.2). `base` returns the tensors
        of the base.
        """
        if self.kind == "prefix":
            return normal(seed, name, shape).mul_(PREFIX_STD)
        if name == PROMPT:
            table = base("tokens.weight")
            drawn = np.random.Generator(np.random.Philox(key=seed)).integers(len(table), size=shape[0])
            return table[torch.from_numpy(drawn)].clone()
        if self.kind == "p_tuning":
            return (
                torch.zeros(shape)
                if len(shape) == 1
                else normal(seed, name, shape).mul_((2 / shape[1]) ** 0.5)
            )
        if self.kind == "houlsby":
            return torch.zeros(shape) if len(shape) == 1 else normal(seed, name, shape, 2.0).mul_(0.01)
        if name.endswith((B, EXPERTS_B)):
            return torch.zeros(shape)
        if name.endswith((A, EXPERTS_A)):
            return normal(seed, name, shape).mul_((3 * shape[-1]) ** -0.5)
        return base(name.removesuffix(LENGTH) + ".weight").norm(dim=1)

    def merged(self, name: str, names: Mapping[str, object], read: Read) -> Tensor:
        """Return the tensor `name` of the merged model. `names` are the tensors of the adapted model."""
        module, weight = name.removesuffix(".weight"), read(name)
        if f"{name}{EXPERTS_A}" in names:
            return merged(weight, read(f"{name}{EXPERTS_A}"), read(f"{name}{EXPERTS_B}"), self.scale, None)
        if f"{module}{A}" not in names:
            return weight
        length = read(f"{module}{LENGTH}") if f"{module}{LENGTH}" in names else None
        return merged(weight, read(f"{module}{A}"), read(f"{module}{B}"), self.scale, length)


def quantised(model: nn.Module) -> frozenset[str]:
    """Return the weights of the linear layers in a model's blocks, which a quantised base stores in 4 bits.

    Raises WorkloadError if they cannot be quantised.
    """
    if any(isinstance(module, Experts) for module in model.modules()):
        raise WorkloadError(
            "most of its weights are stacked experts, which cannot be stored in 4 bits; set "
            "workload.adapter.quantize to none"
        )
    layers = {each: model.get_submodule(each) for each in linear_layers(model) if LAYER.search(each)}
    for each, layer in layers.items():
        assert isinstance(layer, nn.Linear)
        if layer.in_features % BLOCK:
            raise WorkloadError(
                f"{each} has {layer.in_features} inputs, and weights in 4 bits have blocks of {BLOCK}; set "
                "workload.adapter.quantize to none"
            )
    return frozenset(f"{each}.weight" for each in layers)


def linear_layers(model: nn.Module) -> list[str]:
    """Return the names of a model's plain linear layers."""
    return [name for name, module in model.named_modules() if type(module) is nn.Linear]


def styles_with(styles: Mapping[str, str]) -> dict[str, str]:
    """Add the adapter's sharding styles to those of a workload, see `Workload.sharding`.

    If a layer is sharded over its outputs, so is B; if over its inputs, so is A. The other factor is replicated, and
    each rank computes only a part of its gradient.
    """
    extended = {**styles, "*layers.*_adapter.*": "sequence", "*attention.prefix": "column"}
    for pattern, style in styles.items():
        if style in ("column", "joined"):
            extended |= {f"{pattern}.lora_a": "heads", f"{pattern}.lora_b": "column"}
            extended[f"{pattern}.magnitude"] = "column"
        elif style == "row":
            extended |= {f"{pattern}.lora_a": "row", f"{pattern}.lora_b": "heads"}
            extended[f"{pattern}.magnitude"] = "heads"
    return extended


def check_has_biases(kind: str, names: Mapping[str, object], model: str) -> None:
    """Raise WorkloadError if the model has no biases that BitFit could train."""
    if kind == "bitfit" and not any(name.endswith("bias") for name in names):
        raise WorkloadError(f"{model} has no biases, which are all that bitfit trains; use lora")


def merged_reader(adapter: Adapter, names: Mapping[str, object], read: Read) -> Read:
    """Return a reader of the merged model's tensors, see `Adapter.merged`."""
    return partial(adapter.merged, names=names, read=read)
