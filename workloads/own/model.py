"""An own model as a workload: a plain module that is run as it is, under data parallelism and ZeRO."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.own.reference import call, load
from workloads.workload import Batch, Ended, Loss, Objective, Sampling, Vocabulary

NETWORK = "network."
"""What the names of the model's own tensors begin with in a commit."""
COUNTED = "counted"
"""The batch's entry that says which samples are ones: bool [B]."""
LABELS, IGNORED = "labels", -100


class Losses(NamedTuple):
    """What the forward pass of an own model gives: losses and further values, of each sample."""

    losses: Tensor
    values: dict[str, Tensor]


@dataclass(frozen=True)
class OwnModel:
    """The description of the model that `reference` names: made with `options`, a mapping as JSON."""

    reference: str
    options: str
    vocab_size: int
    architecture: str = "own"
    family: str = "own"
    hidden: int = 1
    max_positions: int = 2**62
    layers: int = 1
    decoder_layers: int = 0
    heads: int = 1
    kv_heads: int = 1
    intermediate: int = 1
    moe: None = None

    def make(self) -> nn.Module:
        """The module on the current default device. Raises WorkloadError."""
        kind, options = load(self.reference), json.loads(self.options)
        if "vocabulary_size" in _arguments(kind):
            options.setdefault("vocabulary_size", self.vocab_size)
        found = call(self.reference, kind, options)
        if not isinstance(found, nn.Module):
            raise WorkloadError(f"{self.reference} is no torch.nn.Module; name a class of one")
        if not callable(getattr(found, "loss", None)):
            raise WorkloadError(f"{self.reference} has no loss(batch); add it")
        return found

    @cached_property
    def bare(self) -> nn.Module:
        """The module on the meta device. Raises WorkloadError if it cannot be made there."""
        with torch.device("meta"):
            return self.make()

    @property
    def has_blocks(self) -> bool:
        """Whether it says which layers can be recomputed or compiled one by one."""
        return bool(blocks_of(self.bare))

    def parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.bare.parameters())

    def flops(self, sequence_length: int) -> float:
        """6 N FLOPs per token, or per sample that is no text; a layer that is used several times counts once."""
        return 6.0 * self.parameters()


def describe_own(reference: str, changes: Mapping[str, Any], vocab_size: int | None) -> OwnModel:
    """The description of the model that `reference` names."""
    return OwnModel(reference, json.dumps(dict(changes), sort_keys=True), vocab_size or 1)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers that an own model names. Raises WorkloadError if they are none of its modules."""
    named = getattr(model, "blocks", None)
    found = list(named()) if callable(named) and not isinstance(named, nn.Module) else []
    inside = set(map(id, model.modules()))
    if any(id(block) not in inside for block in found):
        raise WorkloadError("blocks() gives what is no module of the model; give layers that it has")
    return found


def _arguments(kind: Any) -> set[str]:
    try:
        return set(inspect.signature(kind).parameters)
    except (TypeError, ValueError):
        return set()


class OwnNetwork(nn.Module):
    """An own model (`network`) behind our forward pass; its tensors have the prefix `network.`.

    Moving a model from the meta device unties what shares a tensor and loses what is outside its state, so both are
    restored after every move.
    """

    def __init__(self, network: nn.Module, fixed: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.network, self._fixed = network, fixed

    def forward(self, batch: Batch, in_chunks: object = None) -> Losses:
        """The losses of the batch."""
        found = self.network.loss(batch)  # type: ignore[operator]
        losses, values = found if isinstance(found, tuple) else (found, {})
        return Losses(losses, dict(values))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OwnNetwork:
        tied: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    tied.setdefault(id(parameter), []).append((module, name))
        super()._apply(fn, recurse)
        for (first, name), *others in tied.values():
            for module, other in others:
                module._parameters[other] = first._parameters[name]
        for name, buffer in self.network.named_buffers():
            if name in self._fixed and not buffer.is_meta:
                buffer.copy_(self._fixed[name])
        return self


@dataclass(frozen=True)
class OwnWorkload:
    """An own model with what it reads. It cannot be split: data parallelism and ZeRO only. `metrics` are functions by
    name, see `workloads.own.protocols.Metric`.

    Its weights are those of the constructor under torch.manual_seed(seed), which every rank makes as a whole.
    """

    name: str
    config: OwnModel
    objective: Objective
    vocabulary: Vocabulary
    frozen: frozenset[str] = frozenset()
    quantised: frozenset[str] = frozenset()
    thawed_after: Mapping[str, int] = field(default_factory=dict, compare=False)
    notes: Sequence[str] = ()

    def build(self) -> nn.Module:
        """The module on the current default device."""
        return OwnNetwork(self.config.make(), self._fixed)

    @cached_property
    def _fixed(self) -> Mapping[str, Tensor]:
        """The values of the buffers that are not in the state."""
        model = _initialised(self.config, 0)
        kept = model.state_dict().keys()
        return {name: buffer.clone() for name, buffer in model.named_buffers() if name not in kept}

    @cached_property
    def shapes(self) -> Mapping[str, torch.Size]:
        """See Workload.shapes; a shared tensor has the name under which it comes first."""
        model = self.config.bare
        kept = model.state_dict().keys()
        named = [*model.named_parameters(), *model.named_buffers()]
        return {f"{NETWORK}{name}": tensor.shape for name, tensor in named if name in kept}

    def stored(self, name: str, seed: int) -> None:
        """None: it begins anew."""
        return

    def initial(self, name: str, seed: int) -> Tensor:
        """The initial value of `name`, fp32 on CPU. Raises WorkloadError if the model has no such tensor."""
        if name not in self.shapes:
            raise WorkloadError(
                f"{self.name} has no tensor {name!r}; its names are those of named_parameters()"
            )
        found = _initialised(self.config, seed).state_dict()[name.removeprefix(NETWORK)]
        return found.float() if found.is_floating_point() else found

    def lr_scale(self, name: str) -> float:
        """1: muP is of models of this project."""
        return 1.0

    def depth(self, name: str) -> int:
        """See Workload.depth, by the layers that the model names."""
        return self._depths[name]

    @cached_property
    def _depths(self) -> Mapping[str, int]:
        model = self.config.bare
        blocks = blocks_of(model)
        number = {id(p): i for i, block in enumerate(blocks) for p in block.parameters()}
        found, seen = {}, False
        for name, parameter in model.named_parameters():
            seen |= id(parameter) in number
            place = number.get(id(parameter), len(blocks) if seen else -1)
            found[f"{NETWORK}{name}"] = len(blocks) - place
        return dict.fromkeys(self.shapes, 0) | found

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Forward pass and loss of one micro-batch."""
        return self.criterion(model(batch), batch)

    def criterion(self, output: Losses, batch: Batch, of_tokens: object = None) -> Loss:
        """The loss of the output of a forward pass. Raises WorkloadError for one that is of no shape of samples."""
        counted = self._counted(output.losses, batch)
        shape, rows = output.losses.shape, batch.get(COUNTED)
        weight = counted.view(*counted.shape, *[1] * (len(shape) - counted.dim())).expand(shape)
        total = output.losses.float().masked_fill(~weight, 0.0).sum()
        sums = {}
        for name, value in output.values.items():
            keep = rows if rows is not None else torch.ones(len(value), dtype=torch.bool, device=value.device)
            if value.shape != keep.shape:
                raise WorkloadError(
                    f"{self.name}: {name} has shape {tuple(value.shape)}; give a number for each sample"
                )
            sums[name] = (value.detach().float().masked_fill(~keep, 0.0).sum(), keep.sum().float())
        return Loss(total, weight.sum().float(), sums=sums)

    def _counted(self, losses: Tensor, batch: Batch) -> Tensor:
        """Which of the losses count: of text those of labels."""
        if COUNTED in batch:
            expected, counted = batch[COUNTED].shape, batch[COUNTED]
        elif LABELS in batch:
            expected, counted = batch[LABELS].shape, batch[LABELS] != IGNORED
        else:
            raise WorkloadError(
                f"{self.name}: {self.objective.name} gives no labels, whose losses would be counted"
            )
        if losses.shape[: len(expected)] != expected:
            what = "each sample" if COUNTED in batch else "each label"
            raise WorkloadError(
                f"{self.name}: the loss has shape {tuple(losses.shape)} for {tuple(expected)}; give that of {what}, "
                "not their mean"
            )
        return counted

    def balance(self, model: nn.Module, routed: Mapping[str, Tensor]) -> None:
        """Nothing: what it does with routers is in its loss."""

    def routing(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Empty: what routers do is not known."""
        return {}

    def sharding(self) -> Mapping[str, str]:
        """Empty: no module can be split."""
        return {}

    def stages(self) -> Sequence[str]:
        """Empty: a pipeline cannot cut it."""
        return ()

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """See Workload.blocks."""
        network = model.network
        assert isinstance(network, nn.Module)
        return blocks_of(network)

    def flops(self, sequence_length: int) -> float:
        """See `OwnModel.flops`."""
        return self.config.flops(sequence_length)

    decoder_start: int | None = None

    def generate(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        ended: Ended | None = None,
    ) -> list[list[int]]:
        """Raise WorkloadError: how it generates is not known."""
        raise WorkloadError(f"{self.name} is an own model, of which nothing is generated")

    def check_hf(self) -> None:
        """Raise WorkloadError: transformers has no class for it."""
        raise WorkloadError(
            f"transformers has no class for {self.name}; set checkpoint.export to safetensors, or to null"
        )

    def to_hf(self, read: Callable[[str], Tensor], folder: str) -> None:
        """Raise WorkloadError, see `check_hf`."""
        self.check_hf()


@lru_cache(maxsize=1)
def _initialised(config: OwnModel, seed: int) -> nn.Module:
    """The model with its initial weights, on CPU; the last one is kept, since it is read tensor by tensor."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        return config.make()
