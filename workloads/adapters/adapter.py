"""An adapter of a model of this project: which tensors it adds, how they begin, and how they may be cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from workloads.adapters.bottleneck import add_bottlenecks
from workloads.adapters.frozen import matching
from workloads.adapters.lora import EXPERTS_A, EXPERTS_B, LoraLinear, add_to_experts, merged
from workloads.adapters.nf4 import BLOCK
from workloads.adapters.prefix import add_prefixes
from workloads.adapters.prompt import add_prompt
from workloads.errors import WorkloadError
from workloads.model.config import TransformerConfig
from workloads.model.initialise import normal
from workloads.model.moe import Experts
from workloads.model.stored import HEADS

LOW_RANK = ("lora", "rslora", "dora")
A, B, LENGTH = ".lora_a.weight", ".lora_b.weight", ".magnitude.weight"
"""How the names of the tensors end that a low-rank adapter adds to a linear layer."""
PROMPTS = ("prompt", "p_tuning")
"""Kinds with vectors before the tokens, at the input alone."""
PROMPT = "prompt.weight"
KEY, VALUE = ".prefix.key", ".prefix.value"
PREFIX_STD = 0.02
LAYER_NORM = re.compile(r"layers\.\d+\.(attention|cross|feedforward)_norm\.")
LAYER = re.compile(r"(^|\.)layers\.")
Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Adapter:
    """What is trained beside a base whose own weights are not.

    kind: one of LOW_RANK; prefix, `rank` keys and values in every layer; one of PROMPTS, `rank` vectors at the input;
    houlsby, bottlenecks of width `rank`, beside which the layers' norms are trained; or bitfit, which adds nothing and
    trains the biases (Ben Zaken et al., 2022). targets are patterns of names of linear layers; what a low-rank adapter
    adds is scaled by alpha / rank, or alpha / sqrt(rank) if it is rank-stabilised. quantise: whether the linear layers
    of the base are in 4 bits, see `workloads.adapters.nf4`.
    """

    kind: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    quantise: bool = False

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (self.rank**0.5 if self.kind == "rslora" else self.rank)

    def apply(self, model: nn.Module, config: TransformerConfig) -> None:
        """Put it into a model of that configuration. Raises WorkloadError if a pattern matches no linear layer, or the
        model can have none of its kind."""
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
        """Give matrices to the stacked weights of experts that patterns match, which say `experts`."""
        if self.kind == "dora":
            raise WorkloadError("dora has no lengths of the rows of stacked experts; use lora")
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
        """Give matrices to those of these linear layers of a model that are targets. Raises WorkloadError if a pattern
        matches none."""
        for name in sorted(matching(self.targets, layers, "linear layer")):
            parent, _, leaf = name.rpartition(".")
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            adapted = LoraLinear(layer, self.rank, self.scale, self.kind == "dora")
            setattr(model.get_submodule(parent), leaf, adapted)

    def trains(self, name: str) -> bool:
        """Whether it trains the parameter `name`, other than a head that is new."""
        if self.kind == "bitfit":
            return name.endswith("bias")
        return self.adds(name) or (self.kind == "houlsby" and LAYER_NORM.search(name) is not None)

    def adds(self, name: str) -> bool:
        """Whether the tensor `name` is no tensor of the base."""
        if self.kind == "houlsby":
            return "_adapter." in name
        if self.kind == "prefix":
            return name.endswith((KEY, VALUE))
        if self.kind in PROMPTS:
            return name.startswith("prompt.")
        return self.kind in LOW_RANK and name.endswith((A, B, LENGTH, EXPERTS_A, EXPERTS_B))

    @property
    def positions(self) -> int:
        """Positions that it takes from the tokens."""
        return self.rank if self.kind in ("prefix", *PROMPTS) else 0

    @property
    def merges(self) -> bool:
        """Whether there is a plain model that computes the same."""
        return self.kind not in ("houlsby", "prefix", *PROMPTS)

    def initial(self, name: str, shape: torch.Size, seed: int, base: Read) -> Tensor:
        """The initial value of a tensor that it adds, fp32 on CPU: what the model computes does not change, or hardly.

        B is zero, and A normal with the variance of the reference implementation's uniform values (peft's
        kaiming_uniform with a = sqrt(5)): one in three times the inputs. Bottlenecks begin near the identity, with a
        standard deviation of 0.01 (Houlsby et al., section 3.6). Prompts begin as vectors of drawn tokens (Lester et
        al., section 3.2). `base` gives the tensors of the base.
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
        """The tensor `name` of a plain model that computes what the adapted one does, whose tensors are `names`."""
        module, weight = name.removesuffix(".weight"), read(name)
        if f"{name}{EXPERTS_A}" in names:
            return merged(weight, read(f"{name}{EXPERTS_A}"), read(f"{name}{EXPERTS_B}"), self.scale, None)
        if f"{module}{A}" not in names:
            return weight
        length = read(f"{module}{LENGTH}") if f"{module}{LENGTH}" in names else None
        return merged(weight, read(f"{module}{A}"), read(f"{module}{B}"), self.scale, length)


def quantised(model: nn.Module) -> frozenset[str]:
    """The weights of the linear layers of a model's blocks, which a base has in 4 bits.

    Raises WorkloadError if they cannot be.
    """
    if any(isinstance(module, Experts) for module in model.modules()):
        raise WorkloadError(
            "most of it are stacked experts, which are not kept in 4 bits; set workload.adapter.quantize to none"
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
    """The names of the plain linear layers of a model."""
    return [name for name, module in model.named_modules() if type(module) is nn.Linear]


def styles_with(styles: Mapping[str, str]) -> dict[str, str]:
    """The styles of a workload with those of adapters, see `Workload.sharding`.

    Of a layer that is cut over its outputs B is cut so too, over its inputs A. The other one every rank has whole, and
    sees a part of its gradient.
    """
    found = {**styles, "*layers.*_adapter.*": "sequence", "*attention.prefix": "column"}
    for pattern, style in styles.items():
        if style in ("column", "joined"):
            found |= {f"{pattern}.lora_a": "heads", f"{pattern}.lora_b": "column"}
            found[f"{pattern}.magnitude"] = "column"
        elif style == "row":
            found |= {f"{pattern}.lora_a": "row", f"{pattern}.lora_b": "heads"}
            found[f"{pattern}.magnitude"] = "heads"
    return found


def check_has_biases(kind: str, names: Mapping[str, object], model: str) -> None:
    """Raise WorkloadError if the model has no biases that BitFit could train."""
    if kind == "bitfit" and not any(name.endswith("bias") for name in names):
        raise WorkloadError(f"{model} has no biases, which are all that bitfit trains; use lora")


def merged_reader(adapter: Adapter, names: Mapping[str, object], read: Read) -> Read:
    """Reads the tensors of the plain model, see `Adapter.merged`."""
    return partial(adapter.merged, names=names, read=read)
