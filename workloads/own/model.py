"""The workload of an own model: a plain module, sharded only as it declares."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from workloads.adapters.adapter import LOW_RANK, Adapter, check_has_biases, linear_layers, styles_with
from workloads.adapters.frozen import parameters_of
from workloads.errors import WorkloadError
from workloads.own.declared import (
    OF_BUFFERS,
    STYLES,
    blocks_of,
    check_declared,
    checked,
    compares,
    cut_size,
    heads_of,
    is_of_hf,
    stages_of,
    styles_of,
)
from workloads.own.flat_code import flat_code
from workloads.own.generate import generate, logits_of, reads_length
from workloads.own.network import ASKED, Logits, Losses, OwnNetwork
from workloads.own.object_reference import call, load
from workloads.own.rows import LABELS, sample_rows
from workloads.plain_module import depths_of, embeddings_in, embeddings_of, initial_of, shapes_of
from workloads.workload import (
    COUNTED,
    IGNORED,
    Batch,
    Ended,
    Generation,
    Loss,
    Objective,
    Sampling,
    Vocabulary,
)

if TYPE_CHECKING:
    from workloads.model.inside import Shows
    from workloads.model.stored import StoredTensor, StoredWeights

NETWORK = "network."
"""The prefix of the model's own tensors in a checkpoint."""


@dataclass(frozen=True)
class OwnModel:
    """The description of the model that `reference` names. `options` are its constructor's arguments, a mapping as
    JSON.
    """

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

    divided_by: ClassVar[Literal["declaration"]] = "declaration"
    as_transformer: ClassVar[None] = None
    tied: ClassVar[None] = None
    ends_in_head: ClassVar[bool] = False

    def training_notes(self, name: str, length: int, dropout: float) -> list[str]:
        """Return no lines: an own model trains as written."""
        return []

    def make(self) -> nn.Module:
        """Return the module on the current default device. Raises WorkloadError."""
        kind, options = load(self.reference), json.loads(self.options)
        # A stored folder may have named it, and anything else that is called with options could do anything.
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise WorkloadError(f"{self.reference} is not a torch.nn.Module; name a class of one")
        if "vocabulary_size" in _arguments(kind):
            options.setdefault("vocabulary_size", self.vocab_size)
        return checked(self.reference, call(self.reference, kind, options))

    @cached_property
    def bare(self) -> nn.Module:
        """Return the module on the meta device. Raises WorkloadError if it cannot be made there."""
        with torch.device("meta"):
            module = self.make()
        try:
            check_declared(module)
        except WorkloadError as error:
            raise WorkloadError(f"{self.reference}: {error}") from None
        return module

    @cached_property
    def compares(self) -> bool:
        """Return whether losses depend on the features of the whole global batch."""
        return compares(self.bare)

    @property
    def gives_logits(self) -> bool:
        """Return whether the model continues texts, by its method `logits`."""
        return logits_of(self.bare) is not None

    def reads_length(self, length: int) -> bool:
        """Return whether the model gives logits of texts of that many tokens."""
        return reads_length(self.reference, self.bare, length)

    @property
    def stages(self) -> int:
        """Return the number of modules between which a pipeline may cut; 0 if the model names none."""
        return len(stages_of(self.bare))

    @property
    def is_sharded(self) -> bool:
        """Return whether the model declares which of its tensors may be sharded."""
        return bool(styles_of(self.bare))

    @property
    def cut(self) -> int:
        """Return the number that the tensor-parallel size must divide."""
        return cut_size(self.bare)

    @property
    def whole_heads(self) -> int:
        """Return the number of attention heads, which sharding must not split; 1 if the model has none."""
        return heads_of(self.bare) or self.cut

    @property
    def depth(self) -> int:
        """Return the number of layers that the model names."""
        return max(len(blocks_of(self.bare)), self.stages - 2, 1)

    @property
    def has_blocks(self) -> bool:
        """Return whether the model names the layers that can be recomputed or compiled one by one."""
        return bool(blocks_of(self.bare))

    @property
    def embedded(self) -> int:
        """Return the number of parameters of `Workload.embeddings`."""
        names = embeddings_in(self.bare, blocks_of(self.bare))
        return sum(p.numel() for name, p in self.bare.named_parameters() if name in names)

    def parameters(self) -> int:
        """Return the number of parameters."""
        return sum(parameter.numel() for parameter in self.bare.parameters())

    def flops(self, sequence_length: int) -> float:
        """Return 6 N FLOPs per token, or per sample without text. A layer that runs several times counts once."""
        return 6.0 * self.parameters()


def describe_own(reference: str, changes: Mapping[str, Any], vocab_size: int | None) -> OwnModel:
    """Return the description of the model that `reference` names."""
    return OwnModel(reference, json.dumps(dict(changes), sort_keys=True), vocab_size or 1)


def _arguments(kind: Any) -> set[str]:
    try:
        return set(inspect.signature(kind).parameters)
    except (TypeError, ValueError):
        return set()


@dataclass(frozen=True)
class OwnWorkload:
    """An own model with the data that it reads.

    It is sharded as it declares; without a declaration it supports only data parallelism and ZeRO. Its initial weights
    are those of the constructor under torch.manual_seed(seed), which every rank makes in full, or those in `begun`.
    With an `adapter`, its own weights are frozen.
    """

    name: str
    config: OwnModel
    objective: Objective
    vocabulary: Vocabulary
    frozen: frozenset[str] = frozenset()
    quantised: frozenset[str] = frozenset()
    thawed_after: Mapping[str, int] = field(default_factory=dict, compare=False)
    notes: Sequence[str] = ()
    adapter: Adapter | None = None
    begun: StoredWeights | None = field(default=None, compare=False)

    def build(self) -> nn.Module:
        """Return the module on the current default device."""
        model = OwnNetwork(self.config.make(), self._fixed)
        _put_in_order(model)
        if self.adapter and self.adapter.kind in LOW_RANK:
            self.adapter.adapt(model, adaptable(model))
        return model

    def with_adapter(self, adapter: Adapter) -> OwnWorkload:
        """Return this workload with an adapter. Raises WorkloadError if it does not support the kind or has nothing to
        adapt.
        """
        if adapter.kind not in (*LOW_RANK, "bitfit") or adapter.quantise:
            unsupported = "bases in 4 bits" if adapter.quantise else f"{adapter.kind} adapters"
            raise WorkloadError(
                f"{unsupported} are for models of this project, and {self.name} is an own one; use lora without "
                "quantize"
            )
        check_has_biases(adapter.kind, self.shapes, self.name)
        adapted = replace(self, adapter=adapter)
        return replace(adapted, frozen=frozenset(n for n in parameters_of(adapted) if not adapter.trains(n)))

    def showing(self, shows: Shows) -> OwnWorkload:
        """Raise WorkloadError, see Workload.showing."""
        raise WorkloadError(f"{self.name} is an own model, whose layers are not compared")

    @cached_property
    def _fixed(self) -> Mapping[str, Tensor]:
        """Return the values of the buffers that are not in the state."""
        model = _initialised(self.config, OF_BUFFERS)
        kept = model.state_dict().keys()
        return {name: buffer.clone() for name, buffer in model.named_buffers() if name not in kept}

    @cached_property
    def shapes(self) -> Mapping[str, torch.Size]:
        """See Workload.shapes. A shared tensor has the name under which it comes first."""
        return shapes_of(self)

    def stored(self, name: str, seed: int) -> StoredTensor | None:
        """See Workload.stored."""
        return self.begun.find(name) if self.begun else None

    def initial(self, name: str, seed: int) -> Tensor:
        """Return an initial value, fp32 on CPU.

        Args:
            name: the name of a parameter or buffer.
            seed: the seed of the run.

        Raises:
            WorkloadError: the model has no such tensor.
        """
        return initial_of(self, self.adapter, self._own_initial, name, seed)

    def _own_initial(self, name: str, seed: int) -> Tensor:
        if (begun := self.stored(name, seed)) is not None:
            tensor = begun[tuple(slice(0, size) for size in self.shapes[name])]
            return tensor.float() if tensor.is_floating_point() else tensor
        tensor = _initialised(self.config, seed).state_dict()[name.removeprefix(NETWORK)]
        return tensor.float() if tensor.is_floating_point() else tensor

    def lr_scale(self, name: str) -> float:
        """Return 1: muP applies only to this project's models."""
        return 1.0

    def depth(self, name: str) -> int:
        """See Workload.depth. Counts the layers that the model names."""
        return self._depths[name]

    @cached_property
    def _depths(self) -> Mapping[str, int]:
        return depths_of(self)

    @property
    def embeddings(self) -> frozenset[str]:
        """See Workload.embeddings."""
        return embeddings_of(self)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Run the forward pass and return the loss of one micro-batch. A comparing model compares only samples within
        it.

        Args:
            model: the module.
            batch: the arrays of the micro-batch by name, [B, ...] each.
        """
        output = model(batch)
        if self.compares:
            output = output._replace(losses=self.compared(output.losses, batch[COUNTED]))
        return self.criterion(output, batch)

    @property
    def compares(self) -> bool:
        """Return whether losses depend on the features of the whole global batch."""
        return self.config.compares

    def compared(self, features: Tensor, counted: Tensor) -> Tensor:
        """Return the losses of compared samples, [G].

        Args:
            features: the features of the global batch, fp32 [G, E].
            counted: bool [G]; False for rows that only fill up a batch.

        Raises:
            WorkloadError: the model does not return one loss per sample.
        """
        losses: Tensor = self.config.bare.compare(features, counted)  # type: ignore[operator]
        if losses.shape != counted.shape:
            shape = tuple(losses.shape)
            raise WorkloadError(
                f"{self.name}: compare gives {shape} for {len(counted)} samples; return one value for each sample"
            )
        return losses

    def asking_logits(self, batch: Batch) -> Batch:
        """See Workload.asking_logits. The model reads the tokens alone."""
        return {**batch, ASKED: batch["tokens"]}

    def criterion(
        self,
        output: Losses | Logits,
        batch: Batch,
        of_tokens: Callable[[Tensor, Tensor], Loss] | None = None,
    ) -> Loss:
        """Return the loss of a forward pass's output.

        Args:
            output: the losses or logits that the model returned.
            batch: the arrays of the micro-batch by name, [B, ...] each.
            of_tokens: computes the token loss from (logits, labels); None for a model that returns losses.

        Raises:
            WorkloadError: the shape of the output does not fit the samples.
        """
        if isinstance(output, Logits):
            assert of_tokens is not None
            return of_tokens(output.logits, batch["labels"])
        counted = self._counted(output.losses, batch)
        shape, rows = output.losses.shape, sample_rows(batch)
        weight = counted.view(*counted.shape, *[1] * (len(shape) - counted.dim())).expand(shape)
        total = output.losses.float().masked_fill(~weight, 0.0).sum()
        sums = {}
        for name, value in output.values.items():
            if value.shape != rows.shape:
                raise WorkloadError(
                    f"{self.name}: {name} has shape {tuple(value.shape)}; give a number for each sample"
                )
            real = rows & ~value.isnan()
            sums[name] = (value.detach().float().masked_fill(~real, 0.0).sum(), real.sum().float())
        return Loss(total, weight.sum().float(), sums=sums)

    def _counted(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return which of the losses count; for text, those with a label."""
        if COUNTED in batch:
            expected, counted = batch[COUNTED].shape, batch[COUNTED]
        elif LABELS in batch:
            expected, counted = batch[LABELS].shape, batch[LABELS] != IGNORED
        else:
            raise WorkloadError(
                f"{self.name}: {self.objective.name} gives no labels, whose losses would be counted"
            )
        if losses.shape[: len(expected)] != expected:
            unit = "each sample" if COUNTED in batch else "each label"
            raise WorkloadError(
                f"{self.name}: the loss has shape {tuple(losses.shape)} for {tuple(expected)}; give that of {unit}, "
                "not their mean"
            )
        return counted

    def balance(self, model: nn.Module, routed: Mapping[str, Tensor]) -> None:
        """Do nothing: an own model balances its routers by its loss."""

    def routing(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return an empty mapping: the routing of own models is not known."""
        return {}

    def sharding(self) -> Mapping[str, str]:
        """See Workload.sharding. Follows the model's declaration."""
        return styles_with(self._declared) if self.adapter else self._declared

    @property
    def _declared(self) -> dict[str, str]:
        return {f"{NETWORK}{name}": STYLES[style] for name, style in styles_of(self.config.bare).items()}

    @property
    def stacks(self) -> frozenset[str]:
        """Return an empty set: own models do not declare stacks of experts."""
        return frozenset()

    def stages(self) -> Sequence[str]:
        """See Workload.stages: every module that the model names except the first; empty if it names none."""
        bare = self.config.bare
        names = {id(module): name for name, module in bare.named_modules()}
        return [f"{NETWORK}{names[id(stage)]}" for stage in stages_of(bare)[1:]]

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """See Workload.blocks."""
        assert isinstance(model, OwnNetwork)
        return model.blocks()

    decoder_start: int | None = None
    generation: Generation = field(default=Generation(), compare=False)

    def generate(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        ended: Ended | None = None,
    ) -> list[list[int]]:
        """See Workload.generate. Raises WorkloadError if the model gives no logits."""
        assert isinstance(model, OwnNetwork)
        generation = self.generation.ending(self.vocabulary.eos)
        return generate(
            self.name,
            model.network,
            prompts,
            max_tokens,
            generation=generation,
            sampling=sampling,
            ended=ended,
        )

    has_own_values: ClassVar[bool] = True
    tables: ClassVar[frozenset[str]] = frozenset()
    begun_tables: ClassVar[Mapping[str, Sequence[int]]] = {}

    def check_form(self, form: str) -> None:
        """See Workload.check_form."""
        if form not in ("hf", "safetensors"):
            raise WorkloadError(
                f"{form} is not for own models, which are exported whole; set it to safetensors"
            )

    def hf_config(self) -> Mapping[str, Any]:
        """See Workload.hf_config."""
        raise WorkloadError(f"{self.name} is exported as an own model")

    def hf_tensors(self) -> Collection[str]:
        """See Workload.hf_tensors."""
        raise WorkloadError(f"{self.name} is exported as an own model")

    def hf_weights(self, chosen: Collection[str]) -> Mapping[str, Sequence[str]]:
        """See Workload.hf_weights."""
        raise WorkloadError(f"{self.name} is an own model, and those are exported in full precision")

    def check_hf(self) -> None:
        """Raise WorkloadError if transformers has no class for the model, and its code cannot travel with it."""
        if is_of_hf(self.config.bare):
            return
        try:
            flat_code(self.config.reference)
        except WorkloadError as error:
            raise WorkloadError(f"{error}; or set checkpoint.export to safetensors") from None

    def to_hf(self, read: Callable[[str], Tensor], folder: str) -> None:
        """Raise WorkloadError: see `orchestrator.export.own_model`."""
        raise WorkloadError(f"{self.name} is exported as an own model")


def adaptable(model: OwnNetwork) -> list[str]:
    """Return the linear layers that an adapter may target: all except those declared as vocabulary-parallel."""
    over = [pattern for pattern, style in styles_of(model.network).items() if style == "vocabulary"]
    return [
        name
        for name in linear_layers(model)
        if not any(fnmatchcase(name.removeprefix(NETWORK), pattern) for pattern in over)
    ]


@lru_cache(maxsize=1)
def _initialised(config: OwnModel, seed: int) -> nn.Module:
    """Return the model with its initial weights, on CPU. The last one is cached, because it is
    read tensor by tensor.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        return config.make()


def _put_in_order(model: nn.Module) -> None:
    """Make all parameters contiguous, because ranks shard a parameter in the order of its elements."""
    made = dict[nn.Parameter, nn.Parameter]()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.is_contiguous():
                if parameter not in made:
                    made[parameter] = nn.Parameter(parameter.detach().contiguous(), parameter.requires_grad)
                setattr(module, name, made[parameter])
