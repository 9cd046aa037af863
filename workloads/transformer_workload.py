"""The project's own transformers as workloads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from workloads.adapters.adapter import Adapter, check_has_biases, merged_reader, quantised, styles_with
from workloads.adapters.frozen import parameters_of
from workloads.adapters.nf4 import RoundedTensor
from workloads.errors import WorkloadError
from workloads.hf.files.meaning import FolderMeaning
from workloads.model import inside, losses, shown, text_pooling
from workloads.model.config import TransformerConfig
from workloads.model.depth import depth, layer_count
from workloads.model.electra import Electra, ElectraOutput
from workloads.model.generate import generate
from workloads.model.initialise import drawn, initial, new_rows
from workloads.model.moe import MixtureOfExperts
from workloads.model.mup import lr_scale
from workloads.model.seq2seq import EncoderDecoder
from workloads.model.stored import ExtendedTable, StoredTensor, StoredWeights, whole
from workloads.model.transformer import Output, Transformer
from workloads.objectives import rewarded, supervised
from workloads.workload import COUNTED, Batch, Ended, Generation, Loss, Objective, Sampling, Vocabulary


def build_model(config: TransformerConfig) -> nn.Module:
    """Return the module of `config` on the current default device."""
    if config.architecture == "encoder-decoder":
        return EncoderDecoder(config)
    return Electra(config) if config.generator else Transformer(config)


@dataclass(frozen=True)
class TransformerWorkload:
    """A transformer and an objective. The contract is `workloads.workload.Workload`.

    `pretrained` holds the initial weights, None to initialise randomly. `frozen` are the parameters that are not
    trained. `meaning` is what the pretrained folder defines besides its weights. `shows` is what its layers show, see
    `workloads.model.shown`.
    """

    name: str
    config: TransformerConfig
    objective: Objective
    vocabulary: Vocabulary
    pretrained: StoredWeights | None = None
    frozen: frozenset[str] = frozenset()
    adapter: Adapter | None = None
    thawed_after: Mapping[str, int] = field(default_factory=dict, compare=False)
    meaning: FolderMeaning | None = field(default=None, compare=False)
    generation: Generation = field(default=Generation(), compare=False)
    shows: inside.Shows | None = None

    def build(self) -> nn.Module:
        """Return the plain module on the current default device."""
        model = build_model(self.config)
        if self.adapter:
            self.adapter.apply(model, self.config)
        if self.shows:
            shown.show(model, self.shows)
        if isinstance(self.objective, supervised.SentenceEmbeddings):
            model.text_pooling = text_pooling.TextPooling(self.objective.parts, self.objective.pooling)
        return model

    def showing(self, shows: inside.Shows) -> TransformerWorkload:
        """See Workload.showing."""
        if self.config.architecture == "encoder-decoder" or self.config.generator:
            raise WorkloadError(
                f"{self.name} has two stacks of layers, which are not compared layer by layer"
            )
        if self.config.shared_layers and shows.relations:
            raise WorkloadError(
                f"{self.name} has layers that share weights, whose relations are not compared"
            )
        return replace(self, shows=shows)

    @cached_property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Return the shape of every canonical tensor, parameters and buffers."""
        with torch.device("meta"):
            return {name: tensor.shape for name, tensor in self.build().state_dict().items()}

    @cached_property
    def base_shapes(self) -> Mapping[str, torch.Size]:
        """Return the shapes in the muP base model; those of this model without a base."""
        return self.shapes if self.config.base is None else shapes_of(self.config.base)

    def initial(self, name: str, seed: int) -> Tensor:
        """Return the initial value of `name`, fp32 on CPU: the checkpoint's if there is one, else from (seed, name).

        Raises WorkloadError if the model has no tensor `name`.
        """
        if name not in self.shapes:
            raise WorkloadError(f"{self.name} has no tensor {name!r}; its names are those of state_dict()")
        if inside.is_map(name):
            return initial(self.config, name, self.shapes[name], seed)
        if self.adapter and self.adapter.adds(name):
            return self.adapter.initial(name, self.shapes[name], seed, partial(self.initial, seed=seed))
        tensor = self.stored(name, seed)
        if tensor is not None:
            return tensor[whole(self.shapes[name])].float()
        return initial(self.config, name, self.shapes[name], seed, self.base_shapes[name])

    def stored(self, name: str, seed: int) -> StoredTensor | None:
        """See Workload.stored. The rows of added tokens depend only on (seed, name, row)."""
        added = inside.is_map(name) or (self.adapter is not None and self.adapter.adds(name))
        tensor = self.pretrained.find(name) if self.pretrained and not added else None
        shape = self.shapes[name]
        if tensor is not None and name in self.quantised:
            return RoundedTensor(tensor)
        if tensor is None:
            return None if added else drawn(self.config, name, shape, seed, self.base_shapes[name])
        if tensor.shape == shape:
            return tensor
        new = partial(new_rows, self.config, name, shape, seed=seed, base=self.base_shapes[name])
        return ExtendedTable(tensor, shape, new)

    @cached_property
    def quantised(self) -> frozenset[str]:
        """See Workload.quantised."""
        if self.adapter is None or not self.adapter.quantise:
            return frozenset()
        with torch.device("meta"):
            return quantised(build_model(self.config))

    @property
    def notes(self) -> Sequence[str]:
        """See Workload.notes."""
        return (*(self.pretrained.notes if self.pretrained else ()), *self.generation.notes)

    @property
    def tables(self) -> frozenset[str]:
        """Return the tensors with one row per token."""
        styles = self.sharding()
        return frozenset(n for n in self.shapes if styles.get(n.rpartition(".")[0]) == "vocab")

    @property
    def begun_tables(self) -> Mapping[str, Sequence[int]]:
        """See Workload.begun_tables."""
        tables = {name: self.pretrained.find(name) for name in self.tables} if self.pretrained else {}
        return {name: stored.shape for name, stored in tables.items() if stored is not None}

    def lr_scale(self, name: str) -> float:
        """See Workload.lr_scale."""
        return 1.0 if inside.is_map(name) else lr_scale(name, self.shapes[name], self.base_shapes[name])

    def with_adapter(self, adapter: Adapter) -> TransformerWorkload:
        """Return this workload with an adapter. Only newly initialised heads of the base are trained.

        Raises WorkloadError if there is nothing to adapt.
        """
        check_has_biases(adapter.kind, self.shapes, self.name)
        base = self.pretrained
        new = {n for n in self.shapes if base is not None and base.find(n) is None}
        adapted = replace(self, adapter=adapter)
        if beginning := adapted.quantised & new:
            raise WorkloadError(f"cannot store {min(beginning)} in 4 bits: it starts from random values")
        names = [name for name in parameters_of(adapted) if not adapter.trains(name) and name not in new]
        return replace(adapted, frozen=frozenset(names))

    def depth(self, name: str) -> int:
        """See Workload.depth."""
        return 0 if inside.is_map(name) else depth(self.config, name)

    @property
    def embeddings(self) -> frozenset[str]:
        """See Workload.embeddings: all stand before the first layer of a stack."""
        return frozenset(name for name in self.shapes if self.depth(name) > layer_count(self.config))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Run the forward pass and return the loss of one micro-batch. Compared texts are compared only within it."""
        output = model(batch)
        if self.compares:
            output = output._replace(losses=self.compared(output.losses, batch[COUNTED]))
        return self.criterion(output, batch)

    def criterion(
        self,
        output: Output | ElectraOutput,
        batch: Batch,
        of_tokens: losses.TokenLoss = losses.token_loss,
    ) -> Loss:
        """Return the loss of a forward pass's output (on the last pipeline stage)."""
        if isinstance(self.objective, supervised.SentenceEmbeddings):
            assert isinstance(output, Output)
            assert output.losses is not None
            counted = batch[COUNTED]
            return Loss(
                output.losses.masked_fill(~counted, 0.0).sum(), counted.sum().float(), extra=output.extra
            )
        if loss := rewarded.answer_loss(self.objective, output, batch, of_tokens):
            return loss
        return losses.loss(self.config, output, batch, of_tokens)

    def balance(self, model: nn.Module, routed: Mapping[str, Tensor]) -> None:
        """See Workload.balance (auxiliary-loss-free balancing)."""
        for name, module in model.named_modules():
            if isinstance(module, MixtureOfExperts) and module.moe.bias_rate is not None:
                module.update(routed[f"{name}.router.weight"][1:-2])

    def routing(self, model: nn.Module) -> Mapping[str, Tensor]:
        """See Workload.routing."""
        statistics = {}
        for name, module in model.named_modules():
            if isinstance(module, MixtureOfExperts):
                if module.routing_statistics is not None:
                    statistics[f"{name}.router.weight"] = module.routing_statistics
                module.routing_statistics = None
        return statistics

    def sharding(self) -> Mapping[str, str]:
        """See Workload.sharding. 'heads' marks norms inside a head.

        Their weight is replicated, but a rank sees only its own heads, so its gradient is summed over the
        tensor-parallel group. Latent attention is not sharded, because all heads share its rotated key.
        """
        styles = _sharding(self.config)
        return styles_with(styles) if self.adapter else styles

    @property
    def stacks(self) -> frozenset[str]:
        """See Workload.stacks."""
        return frozenset(name for name in self.shapes if ".feedforward.experts." in name)

    def stages(self) -> Sequence[str]:
        """Return layers 1 to the last; empty if layers are shared or if there are two networks."""
        config = self.config
        if config.generator or config.shared_layers:
            return ()
        if config.architecture == "encoder-decoder":
            encoder = [f"encoder.layers.{i}" for i in range(1, config.layers)]
            return (*encoder, *(f"decoder.layers.{i}" for i in range(config.decoder_layers)))
        return tuple(f"layers.{i}" for i in range(1, config.layers))

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """See Workload.blocks: the layers of all stacks."""
        stacks = [module for module in model.modules() if isinstance(module, nn.ModuleDict)]
        return [layer for stack in stacks for layer in stack.values()]

    def asking_logits(self, batch: Batch) -> Batch:
        """See Workload.asking_logits."""
        return batch

    def generate(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        ended: Ended | None = None,
    ) -> list[list[int]]:
        """See Workload.generate."""
        taken = self.adapter.positions if self.adapter else 0
        config = replace(self.config, max_positions=self.config.max_positions - taken)
        generation = self.generation.ending(self.vocabulary.eos)
        return generate(
            model,
            config,
            prompts=prompts,
            max_tokens=max_tokens,
            generation=generation,
            start=self.decoder_start,
            sampling=sampling,
            ended=ended,
        )

    has_own_values: ClassVar[bool] = False

    @property
    def compares(self) -> bool:
        """See Workload.compares."""
        return isinstance(self.objective, supervised.SentenceEmbeddings)

    def compared(self, features: Tensor, counted: Tensor) -> Tensor:
        """See Workload.compared."""
        if isinstance(self.objective, supervised.SentenceEmbeddings):
            return self.objective.among(features, counted)
        raise WorkloadError(f"{self.name} compares no samples")

    def check_form(self, form: str) -> None:
        """See Workload.check_form."""
        if form == "safetensors":
            raise WorkloadError(
                "safetensors is for own models, and transformers reads this one; set it to hf"
            )

    def hf_config(self) -> Mapping[str, Any]:
        """See Workload.hf_config. For a pair of networks, that of the main one."""
        from workloads.hf.convert.write_folder import hf_config_of

        alone = self.config.changed({"generator": 0}) if self.config.generator else self.config
        settings: Mapping[str, Any] = hf_config_of(alone, self.vocabulary, self.decoder_start).to_dict()
        return settings

    def hf_tensors(self) -> Collection[str]:
        """See Workload.hf_tensors."""
        from workloads.hf.convert.write_folder import hf_names

        return hf_names(self._plain, shapes_of(self._plain))

    def hf_weights(self, chosen: Collection[str]) -> Mapping[str, Sequence[str]]:
        """See Workload.hf_weights."""
        from workloads.hf.convert.write_folder import hf_weights

        if self.config.generator:
            raise WorkloadError("a generator and its discriminator can be exported only in full precision")
        return hf_weights(self._plain, shapes_of(self._plain), chosen)

    def check_hf(self) -> None:
        """Raise WorkloadError if transformers has no class for this model, as `to_hf` would."""
        from workloads.hf.convert.write_folder import check_export

        self._check_merges()
        self._check_last_token()
        check_export(self._plain, self.vocabulary, shapes_of(self._plain), self._decoder_start)

    def _check_last_token(self) -> None:
        known = self.vocabulary
        if not (self.config.causal and self.config.head == "sequence") or known.pad != known.eos:
            return
        ends_in_eos = getattr(self.objective, "name", "") == "reward" or (
            known.frame is not None
            and any(after[-1:] == (known.eos,) for _, *_, after in (known.frame.single, known.frame.pair))
        )
        if ends_in_eos:
            raise WorkloadError(
                "cannot export: transformers finds the last token of a text by its padding, and this tokenizer pads "
                "with its end token; add a separate pad token, or set checkpoint.export to null"
            )

    def to_hf(self, read: Callable[[str], Tensor], folder: str) -> None:
        """Write config.json and model.safetensors (fp32) in transformers' format, with the adapter merged into the
        base.

        Raises WorkloadError.
        """

        self._check_merges()
        if self.adapter:
            read = merged_reader(self.adapter, self.shapes, read)
        self.base_to_hf(read, folder)

    def hf_state(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that `to_hf` writes, by name. The model has one network. Raises WorkloadError."""
        from workloads.hf.convert.write_folder import state

        self._check_merges()
        if self.adapter:
            read = merged_reader(self.adapter, self.shapes, read)
        return state(self._plain, shapes_of(self._plain), self._without_gates(read))

    def _check_merges(self) -> None:
        if self.adapter and not self.adapter.merges:
            raise WorkloadError(
                f"transformers has no class with {self.adapter.kind} adapters, and they cannot be merged; set "
                "checkpoint.export to null"
            )

    def base_to_hf(self, read: Callable[[str], Tensor], folder: str) -> None:
        """Like `to_hf`, for the model without its adapter. Gates of heads are folded into the weights."""
        from workloads.hf.convert.write_folder import export
        from workloads.hf.files.meaning import PROBLEMS

        export(
            self._plain,
            self.vocabulary,
            shapes=shapes_of(self._plain),
            read=self._without_gates(read),
            folder=folder,
            decoder_start=self._decoder_start,
            labels=self._output_names(),
            problem=PROBLEMS.get(getattr(self.objective, "name", "")),
            generation=self.generation,
        )
        if isinstance(self.objective, supervised.SentenceEmbeddings):
            from workloads.hf.convert.sentence_transformers import write_modules

            write_modules(folder, self.objective, self.config.hidden)

    @property
    def _plain(self) -> TransformerConfig:
        """The model that is exported, whose heads have no gates."""
        return replace(self.config, head_gates=False)

    def _without_gates(self, read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
        """Return a reader of the tensors of the exported model, given one of this model without its adapter."""
        from workloads.model.head_gates import folded_reader

        return folded_reader(self.shapes, read) if self.config.head_gates else read

    def _output_names(self) -> Sequence[str]:
        """Return the names of a classification head's labels; empty for other heads."""
        from workloads.hf.files.meaning import names_of_outputs

        if self.config.head not in ("sequence", "token"):
            return ()
        theirs = self.meaning or FolderMeaning()
        return names_of_outputs(getattr(self.objective, "labels", ()), theirs, self.config.classes)

    @property
    def decoder_start(self) -> int | None:
        """See Workload.decoder_start."""
        return self.vocabulary.pad if self._decoder_start is None else self._decoder_start

    @property
    def _decoder_start(self) -> int | None:
        return getattr(self.objective, "decoder_start", None)


def shapes_of(config: TransformerConfig) -> dict[str, torch.Size]:
    """Return the shape of every tensor of a model."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in build_model(config).state_dict().items()}


def _sharding(config: TransformerConfig) -> dict[str, str]:
    seq2seq = config.architecture == "encoder-decoder"
    styles = {"tokens": "vocab"}
    if config.head == "language":
        styles["head"] = "vocab"
    elif config.head == "masked":
        styles["head.output"] = "vocab"
    elif config.generator:
        styles["generator.head.output"] = "vocab"
    if config.biased_by_distance:
        styles["*relative_bias"] = "column"
    if config.disentangled:  # each rank's gradients of these cover only its own heads
        styles |= {"distances": "heads", "distances.norm": "heads"}
    layer = "*layers.*."
    names = ["attention", "cross_attention"] if seq2seq else ["attention"]
    cut_over_heads = ("query", "key", "value", *["gates"] * config.head_gates)
    for name in names if not config.latent else []:
        styles |= {f"{layer}{name}.{part}": "column" for part in cut_over_heads}
        styles[f"{layer}{name}.output"] = "row"
    if config.positions == "relative_keys":
        styles |= {f"{layer}attention.distance": "column", f"{layer}attention.relative": "column"}
    if config.qk_norm:
        style = "column" if config.qk_norm_whole else "heads"
        styles |= {f"{layer}attention.query_norm": style, f"{layer}attention.key_norm": style}
    if config.sinks:
        styles[f"{layer}attention.sinks"] = "column"
    styles |= _feedforward_sharding(config, layer)
    norms = [] if config.norm_position == "branch" else ["attention_norm", "feedforward_norm"]
    norms += ["cross_norm"] if seq2seq else []
    if config.norm_position in ("both", "branch"):
        norms += ["attention_out_norm", "feedforward_out_norm"]
    styles |= {layer + name: "sequence" for name in norms}
    if config.final_norm:
        styles |= (
            {"encoder.norm": "sequence", "decoder.norm": "sequence"} if seq2seq else {"norm": "sequence"}
        )
    return styles


def _feedforward_sharding(config: TransformerConfig, layer: str) -> dict[str, str]:
    moe = config.moe
    dense = moe is None or any(not moe.at(i) for i in range(config.layers))
    parents = ["feedforward"] if dense else []
    if moe and moe.shared:
        parents.append("feedforward.shared")
    styles: dict[str, str] = {}
    for parent in parents:
        styles |= {f"{layer}{parent}.up": "column", f"{layer}{parent}.down": "row"}
        if config.gated:
            styles[f"{layer}{parent}.gate"] = "column"
    if moe:
        styles[f"{layer}feedforward.experts"] = "expert"
    return styles
