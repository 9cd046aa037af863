"""The workload of a Hugging Face class that is run unchanged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from workloads.adapters.adapter import (
    LOW_RANK,
    Adapter,
    check_has_biases,
    linear_layers,
    merged_reader,
    styles_with,
)
from workloads.adapters.frozen import parameters_of
from workloads.errors import WorkloadError
from workloads.hf.as_they_are.generate import generate
from workloads.hf.as_they_are.hf_class import HuggingFaceModel, auto_class, blocks_of, build, training_config
from workloads.hf.as_they_are.network import HuggingFaceNetwork
from workloads.hf.as_they_are.tensor_plan import stacked
from workloads.hf.files.hf_config import root
from workloads.hf.files.meaning import (
    PROBLEMS,
    FolderMeaning,
    as_written,
    check_problem,
    compares_labels,
    folder_meaning,
    generates,
    names_of_outputs,
    notes_of_labels,
    rows_of_labels,
    write_settings,
)
from workloads.hf.files.older_form import write_both_forms
from workloads.hf.files.weight_files import Weights
from workloads.hf.files.weight_names import has_weights
from workloads.model import inside, losses
from workloads.model.stored import listed
from workloads.model.transformer import Output
from workloads.objectives.rewarded import answer_loss
from workloads.plain_module import depths_of, embeddings_of, initial_of, shapes_of
from workloads.workload import Batch, Ended, Generation, Loss, Objective, Sampling, Vocabulary

NETWORK = "network."


@dataclass(frozen=True)
class HuggingFaceWorkload:
    """`hf:<folder>` with any transformers class.

    Its tensors are sharded by the plan that transformers ships, and its layers are cut at their list, if these exist.
    Otherwise it supports only data parallelism and ZeRO.

    The initial weights are those of the folder or, if that has only a configuration, of the class's own
    initialisation under torch.manual_seed(seed). The latter runs through the whole model in order, so unlike
    elsewhere a tensor's value depends on the model as well as on (seed, name).

    `dropout` is the rate of its dropout modules, see `workloads.hf.as_they_are.dropout`. `meaning` is that of the
    folder, if it was read before. With `adapter`, its own weights are frozen, except new heads.
    """

    name: str
    config: HuggingFaceModel
    objective: Objective
    vocabulary: Vocabulary
    dropout: float = 0.0
    frozen: frozenset[str] = frozenset()
    quantised: frozenset[str] = frozenset()
    thawed_after: Mapping[str, int] = field(default_factory=dict, compare=False)
    adapter: Adapter | None = None
    generation: Generation = field(default=Generation(), compare=False)
    meaning: FolderMeaning | None = field(default=None, compare=False)

    def build(self) -> nn.Module:
        """Return the module on the current default device."""
        model = self.wrap(build(self.config))
        if self.adapter and self.adapter.kind in LOW_RANK:
            self.adapter.adapt(model, adaptable(model))
        return model

    def with_adapter(self, adapter: Adapter) -> HuggingFaceWorkload:
        """Return this workload with an adapter. Raises WorkloadError if there is nothing to adapt."""
        if adapter.kind not in (*LOW_RANK, "bitfit"):
            raise WorkloadError(
                f"{adapter.kind} adapters need a class of this project, and {self.name} runs as a class of "
                "transformers; use lora"
            )
        if adapter.quantise:
            raise WorkloadError(
                f"a base in 4 bits needs a class of this project, and {self.name} runs as a class of transformers; "
                "set workload.adapter.quantize to none"
            )
        check_has_biases(adapter.kind, self.shapes, self.name)
        adapted = replace(self, adapter=adapter)
        new = {f"{NETWORK}{name}" for name in self.new}
        names = [name for name in parameters_of(adapted) if not adapter.trains(name) and name not in new]
        return replace(adapted, frozen=frozenset(names))

    def showing(self, shows: inside.Shows) -> HuggingFaceWorkload:
        """Raise WorkloadError, see Workload.showing."""
        raise WorkloadError(
            f"{self.name} runs as a class of transformers, whose layers are not compared; learn only its logits"
        )

    @cached_property
    def new(self) -> Sequence[str]:
        """Return the parameters of the head that the checkpoint lacks, by transformers' names."""
        folder = str(root(self.config.folder))
        bare = self.config.bare
        if self.config.head == "language" or not has_weights(folder):
            return ()
        stored = set(Weights(folder).names)
        return [n for n, _ in bare.named_parameters() if is_of_head(bare, n) and n not in stored]

    @property
    def notes(self) -> Sequence[str]:
        """See Workload.notes."""
        new = (
            (f"{listed(self.new)} start from random values: {self.config.folder} has none",)
            if self.new
            else ()
        )
        about_labels = (
            notes_of_labels(self._meaning.labels, self._labels, self.config.folder) if self._rows else ()
        )
        return (*new, *about_labels, *self.generation.notes)

    def check_labels(self) -> None:
        """Raise WorkloadError if the folder's head predicts other labels than the objective, or was trained for
        another problem.
        """
        if self._rows is not None:
            check_problem(self._meaning.problem_type, self.objective.name, self.config.folder)

    @cached_property
    def _rows(self) -> tuple[int, ...] | None:
        """Return the row of the folder's head for each label; None without such a head. Raises WorkloadError for
        other labels.
        """
        if not compares_labels(self.objective) or not has_weights(str(root(self.config.folder))):
            return None
        new = {*self.new}  # the folder without weights has none of them, so nothing needs to be built
        if all(n in new for n, _ in self.config.bare.named_parameters() if is_of_head(self.config.bare, n)):
            return None
        outputs = self._outputs - new
        if not outputs:
            return None
        rows = Weights(str(root(self.config.folder))).blank(min(outputs)).shape[0]
        return rows_of_labels(self._meaning.labels, self._labels, self.config.folder, rows=rows)

    @property
    def _labels(self) -> Sequence[str]:
        return getattr(self.objective, "labels", ())

    @cached_property
    def _meaning(self) -> FolderMeaning:
        return self.meaning or folder_meaning(self.config.folder, self.config.kept)

    @cached_property
    def _outputs(self) -> frozenset[str]:
        """Return the head's tensors with a row for each label, by transformers' names.

        These are the tensors whose shapes change with one more label.
        """
        sizes = [
            {name: tensor.shape for name, tensor in config.bare.named_parameters()}
            for config in (self.config, replace(self.config, classes=self.config.classes + 1))
        ]
        return frozenset(name for name, shape in sizes[0].items() if sizes[1].get(name) != shape)

    @cached_property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Return the shape of every canonical tensor. A tied weight has the name under which it comes first."""
        return shapes_of(self)

    def stored(self, name: str, seed: int) -> None:
        """Return None: transformers reads the weights of its classes itself, all at once."""
        return

    def initial(self, name: str, seed: int) -> Tensor:
        """Return the initial value of `name`, fp32 on CPU. Raises WorkloadError if the model has no such tensor."""
        return initial_of(self, self.adapter, self._own_initial, name, seed)

    def _own_initial(self, name: str, seed: int) -> Tensor:
        tensor = _initialised(self.config, seed).state_dict()[name.removeprefix(NETWORK)].float()
        if self._rows and name.removeprefix(NETWORK) in self._outputs:
            return tensor[list(self._rows)]
        return tensor

    def lr_scale(self, name: str) -> float:
        """Return 1: muP does not apply to these classes."""
        return 1.0

    def depth(self, name: str) -> int:
        """See Workload.depth. Counts the layers that the class itself can recompute, in their order.

        Parameters before the first layer count as embeddings, all others as the head.
        """
        return self._depths[name]

    @cached_property
    def _depths(self) -> Mapping[str, int]:
        return depths_of(self)

    @property
    def embeddings(self) -> frozenset[str]:
        """See Workload.embeddings."""
        return embeddings_of(self)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Run the forward pass and return the loss of one micro-batch."""
        return self.criterion(model(batch), batch)

    def criterion(
        self, output: Output, batch: Batch, of_tokens: losses.TokenLoss = losses.token_loss
    ) -> Loss:
        """Return the loss of a forward pass's output."""
        if loss := answer_loss(self.objective, output, batch, of_tokens):
            return loss
        return losses.loss(self.config, output, batch, of_tokens)

    def balance(self, model: nn.Module, routed: Mapping[str, Tensor]) -> None:
        """Do nothing: the class balances its routers by its own loss."""

    def routing(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return an empty mapping: the routing of these classes is not known."""
        return {}

    def sharding(self) -> Mapping[str, str]:
        """See Workload.sharding: the plan that transformers ships with the class, without tables and heads."""
        styles = {f"{NETWORK}{name}": style for name, style in self.config.styles[0].items()}
        return styles_with(styles) if self.adapter else styles

    @cached_property
    def stacks(self) -> frozenset[str]:
        """See Workload.stacks."""
        return frozenset(f"{NETWORK}{name}" for name in stacked(self.config.bare))

    def stages(self) -> Sequence[str]:
        """See Workload.stages: all layers except the first."""
        layers = self.config.layer_list[0]
        if layers is None:
            return ()
        return [f"{NETWORK}{layers.name}.{number}" for number in range(1, len(blocks_of(self.config.bare)))]

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """See Workload.blocks: the layers that the class itself can recompute."""
        return blocks_of(model)

    @property
    def decoder_start(self) -> int | None:
        """See Workload.decoder_start."""
        start = getattr(self.objective, "decoder_start", None)
        return self.vocabulary.pad if start is None else start

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
        generation = self.generation.ending(self.vocabulary.eos)
        start = self.decoder_start
        return generate(
            model.network,
            self.config,
            prompts=prompts,
            max_tokens=max_tokens,
            generation=generation,
            start=start,
            sampling=sampling,
            ended=ended,
        )

    def check_hf(self) -> None:
        """Do nothing: the class itself writes the export."""

    def to_hf(self, read: Callable[[str], Tensor], folder: str) -> None:
        """Write config.json and the weights (fp32) as the class itself saves them, with the adapter merged."""
        self.base_to_hf(merged_reader(self.adapter, self.shapes, read) if self.adapter else read, folder)

    def base_to_hf(self, read: Callable[[str], Tensor], folder: str) -> None:
        """Like `to_hf`, for the model without its adapter."""
        hf_config = self._export_config()
        with torch.device("meta"):
            model = self.wrap(auto_class(self.config).from_config(hf_config, dtype=torch.float32))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name in self.shapes:
                    tensor.copy_(read(name))
        model.network.save_pretrained(folder)  # type: ignore[operator]
        write_both_forms(folder)
        if generates(self.config):
            write_settings(folder, self.generation, hf_config)

    compares: ClassVar[bool] = False
    has_own_values: ClassVar[bool] = False
    tables: ClassVar[frozenset[str]] = frozenset()
    begun_tables: ClassVar[Mapping[str, Sequence[int]]] = {}

    def compared(self, features: Tensor, counted: Tensor) -> Tensor:
        """See Workload.compared."""
        raise WorkloadError(f"{self.name} compares no samples")

    def check_form(self, form: str) -> None:
        """See Workload.check_form."""
        if form == "safetensors":
            raise WorkloadError(
                "safetensors is for own models, and transformers reads this one; set it to hf"
            )

    def hf_config(self) -> Mapping[str, Any]:
        """See Workload.hf_config."""
        # A folder may name the class without a head, or another head's.
        built = {"architectures": [type(self.config.bare).__name__]}
        settings: dict[str, Any] = self.config.hf_config().to_dict()
        return settings | built

    def hf_tensors(self) -> Collection[str]:
        """See Workload.hf_tensors."""
        names: Collection[str] = self.config.bare.state_dict()
        return names

    def hf_weights(self, chosen: Collection[str]) -> Mapping[str, Sequence[str]]:
        """See Workload.hf_weights."""
        return {name.removeprefix(NETWORK): (name,) for name in chosen}

    def _export_config(self) -> Any:
        """Return the folder's configuration, with the decoder's start token and the end tokens of a text."""
        hf_config = self.config.hf_config()
        start = getattr(self.objective, "decoder_start", None)
        if self.config.architecture == "encoder-decoder" and start is not None:
            hf_config.decoder_start_token_id = start
        if generates(self.config):
            hf_config.eos_token_id = as_written(self.generation.ending(self.vocabulary.eos).ends)
        if self.config.head != "language":
            names = names_of_outputs(self._labels, self._meaning, self.config.classes)
            hf_config.problem_type = PROBLEMS.get(self.objective.name)
            hf_config.id2label = dict(enumerate(names))
            hf_config.label2id = {name: number for number, name in enumerate(names)}
        return hf_config

    def wrap(self, bare: nn.Module) -> HuggingFaceNetwork:
        """Wrap a transformers model in our module."""
        causal = self.config.architecture == "decoder"
        ends = self.config.ends_in_head
        head = self.config.head
        network = HuggingFaceNetwork(
            bare, self._fixed_buffers, causal=causal, dropout=self.dropout, ends_in_head=ends, head=head
        )
        network.layer_list = self.config.layer_list[0]
        network.hidden = self.config.hidden
        return network

    @cached_property
    def _fixed_buffers(self) -> Mapping[str, Tensor]:
        """Return the values of the buffers that are not in the state, as computed when building on a real device."""
        model = _initialised(self.config, 0)
        kept = model.state_dict().keys()
        return {name: buffer.clone() for name, buffer in model.named_buffers() if name not in kept}


def _renamed(config: HuggingFaceModel) -> dict[str, str] | None:
    """Return the prefixes of the language model's checkpoint names in the class with the head, if they differ (as for
    Llama's question answering).
    """
    if config.head == "language":
        return None
    ours = config.bare.base_model_prefix
    theirs = replace(config, head="language").bare.base_model_prefix
    stored_names = Weights(str(root(config.folder))).names
    if ours == theirs or any(name.startswith(f"{ours}.") for name in stored_names):
        return None
    return {rf"^{theirs}\.": f"{ours}."}


def adaptable(model: nn.Module) -> list[str]:
    """Return the linear layers of our module that an adapter may target: all except those of heads."""
    bare = model.get_submodule(NETWORK.removesuffix("."))
    names = linear_layers(model)
    return [n for n in names if not is_of_head(bare, n.removeprefix(NETWORK) + ".weight")]


def is_of_head(bare: nn.Module, name: str) -> bool:
    """Return whether a tensor of a transformers class belongs to the part on top of its last hidden states.

    A checkpoint of the language model lacks these tensors, and some classes' pooler.
    """
    return not name.startswith(f"{bare.base_model_prefix}.") or ".pooler." in f".{name}"


@lru_cache(maxsize=1)
def _initialised(config: HuggingFaceModel, seed: int) -> nn.Module:
    """Return the model with its initial weights, on CPU. The last one is cached: it is read tensor by tensor."""
    import transformers

    folder = root(config.folder)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        if not has_weights(str(folder)):
            return build(config)
        transformers.logging.disable_progress_bar()  # in commands, among their own lines
        transformers.logging.set_verbosity_error()  # `notes` reports the newly initialised tensors
        try:
            model, loading_info = auto_class(config).from_pretrained(
                folder, config=training_config(config), dtype=torch.float32, local_files_only=True,
                trust_remote_code=False, use_safetensors=True, output_loading_info=True,
                key_mapping=_renamed(config),
            )  # fmt: skip
        except (RuntimeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise WorkloadError(f"the checkpoint in {folder} does not fit: {reason}") from error
    headed = config.head != "language"
    if missing := sorted(n for n in loading_info["missing_keys"] if not (headed and is_of_head(model, n))):
        named = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise WorkloadError(
            f"the checkpoint in {folder} does not fit: it lacks {named}; "
            "remove the changes of the model or give another checkpoint"
        )
    return model
