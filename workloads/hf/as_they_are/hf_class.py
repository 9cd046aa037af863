"""A Hugging Face class without a conversion here, which is run unchanged: its description, and how it is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from workloads.errors import WorkloadError
from workloads.hf.as_they_are.divided import LayerList, layer_list
from workloads.hf.as_they_are.routers import balance_of, chosen_of
from workloads.hf.as_they_are.tensor_plan import cut_size, is_stack, tensor_styles
from workloads.hf.files.hf_config import (
    FolderConfig,
    folder_config,
    nested_configs,
    random_attributes,
    read_hf_config,
)

HEADED = {
    "sequence": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
    "span": "AutoModelForQuestionAnswering",
}
"""transformers' Auto class for each head of supervised objectives."""


@dataclass(frozen=True)
class HuggingFaceModel:
    """The model in `folder`, of a class without a conversion table here, with the sizes that planning needs.

    It is run unchanged, so it counts as one layer with one head; `styles` and `layer_list` say what can be sharded or
    cut.

    Attributes:
        changes: changed attributes of its configuration.
        zeroed: attributes that training sets to zero, because random numbers drawn with them would depend on the
            layout.
        head: the part on top of its last hidden states, as in `TransformerConfig`: the language model's own, or one
            of HEADED.
        classes: number of classes of such a head.
        kept: the configuration files that everything is read from; those in the folder if None.
    """

    folder: str
    architecture: str
    vocab_size: int
    hidden: int
    max_positions: int
    changes: tuple[tuple[str, Any], ...] = ()
    zeroed: tuple[str, ...] = ()
    head: str = "language"
    classes: int = 0
    token_types: int = 0
    sentence_head: bool = False
    family: str = "transformers"
    layers: int = 1
    decoder_layers: int = 0
    heads: int = 1
    kv_heads: int = 1
    intermediate: int = 1
    moe: None = None
    kept: FolderConfig | None = None

    divided_by: ClassVar[Literal["plan"]] = "plan"
    as_transformer: ClassVar[None] = None
    tied: ClassVar[None] = None

    def training_notes(self, name: str, length: int, dropout: float) -> list[str]:
        """Return one line if the class draws numbers of its own in training, which are left out.

        See `workloads.describe.Description`.
        """
        if not self.zeroed:
            return []
        instead = (
            f"workload.dropout {dropout:g} is drawn by sample" if dropout else "workload.dropout would not"
        )
        return [
            f"{name} is trained without {', '.join(self.zeroed)}: what a class draws at random depends on "
            f"the layout; {instead}"
        ]

    def hf_config(self) -> Any:
        """Return transformers' configuration object, with the changes."""
        return read_hf_config(self.folder, dict(self.changes), kept=self.kept)

    def changed(self, changes: Mapping[str, Any]) -> HuggingFaceModel:
        """Return a copy with changed attributes of its configuration. Raises WorkloadError for an unknown attribute."""
        if not changes:
            return self
        hf_config = read_hf_config(self.folder, kept=self.kept)
        for name in changes:
            if not hasattr(hf_config, name):
                raise WorkloadError(f"the configuration in {self.folder} has no {name}; change one it has")
        return replace(describe_hf_class(self.folder, changes, self.kept), changes=tuple(changes.items()))

    def with_head(self, head: str, classes: int) -> HuggingFaceModel:
        """Return a copy with a head of HEADED. Raises WorkloadError if transformers has no such class for it."""
        from transformers.models.auto import modeling_auto

        kind = HEADED[head].removeprefix("AutoModelFor")
        tables = {
            "SequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
            "TokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
            "QuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
        }
        model_type = self.hf_config().model_type
        if model_type not in tables[kind]:
            raise WorkloadError(
                f"transformers has no {kind} class for {model_type} in {self.folder}; give another class"
            )
        return replace(self, head=head, classes=classes)

    def padded_with(self, padding: int) -> HuggingFaceModel:
        """Return a copy with this padding token, if the class needs it to find the token that its head reads.

        Raises WorkloadError if its configuration names another.
        """
        if self.head != "sequence" or self.architecture == "encoder":
            return self
        known = self.hf_config().get_text_config().pad_token_id
        if known is None:
            return replace(self, changes=(*self.changes, ("pad_token_id", padding)))
        if known != padding:
            raise WorkloadError(
                f"the model in {self.folder} finds the last token by pad_token_id {known}, and the tokenizer pads with "
                f"{padding}; set workload.changes.pad_token_id to {padding}"
            )
        return self

    @cached_property
    def bare(self) -> Any:
        """Return the transformers model on the meta device. Raises WorkloadError if its class cannot build it."""
        try:
            return build(self, meta=True)
        except Exception as error:  # each class fails in its own way on a configuration that it cannot have
            line = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            raise WorkloadError(
                f"transformers cannot build the model in {self.folder}: {line}; fix its config.json"
            ) from error

    @cached_property
    def balanced(self) -> bool:
        """Return whether the class adds a loss that balances routers."""
        return balance_of(self.bare) is not None

    @cached_property
    def blocks(self) -> int:
        """Return the number of layers that it can recompute."""
        return len(blocks_of(self.bare))

    @cached_property
    def has_blocks(self) -> bool:
        """Return whether it has layers that can be recomputed or compiled one by one."""
        return bool(blocks_of(self.bare))

    @cached_property
    def styles(self) -> tuple[Mapping[str, str], str]:
        """Return how its tensors may be sharded, by names in the class, or nothing and the reason."""
        if self.architecture == "encoder-decoder":
            return {}, "transformers ships no plan for pairs"
        return tensor_styles(self.bare)

    @property
    def cut(self) -> int:
        """Return the number that every count of ranks which shards its tensors must divide."""
        return cut_size(self.bare, self.styles[0])

    @cached_property
    def head_counts(self) -> tuple[int, int]:
        """Return the attention heads, and those of keys and values, which a count of ranks that shards tensors must
        divide.
        """
        text = self.hf_config().get_text_config()
        heads = getattr(text, "num_attention_heads", None) or self.cut
        return heads, getattr(text, "num_key_value_heads", None) or heads

    @cached_property
    def layer_list(self) -> tuple[LayerList | None, str]:
        """Return where a pipeline may cut it, or None and the reason why not."""
        if self.architecture == "encoder-decoder":
            return None, "it has two lists of layers"
        if self.balanced:
            return None, "the loss of its routers needs all layers at once"
        tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")

        def run() -> None:
            with torch.no_grad(), _NoData(), _no_experts(self.bare):
                self.bare(input_ids=tokens, use_cache=False)

        return layer_list(self.bare, blocks_of(self.bare), run)

    @cached_property
    def ends_in_head(self) -> bool:
        """Return whether its logits are the unchanged results of its output embeddings for a hidden state."""
        head = self.bare.get_output_embeddings() if self.head == "language" else None
        if type(head) is not nn.Linear:
            return False
        tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
        pair = {"decoder_input_ids": tokens} if self.architecture == "encoder-decoder" else {}
        outputs: list[torch.Tensor] = []
        handle = head.register_forward_hook(lambda _, __, out: outputs.append(out))
        try:
            with torch.no_grad(), _NoData():
                logits = self.bare(input_ids=tokens, use_cache=False, **pair).logits
        except Exception:  # each class fails in its own way without data
            return False
        finally:
            handle.remove()
        return len(outputs) == 1 and logits is outputs[0]

    def parameters(self) -> int:
        """Return the number of trained parameters."""
        return sum(parameter.numel() for parameter in self.bare.parameters())

    def flops(self, sequence_length: int) -> float:
        """Return the FLOPs of a forward and backward pass per token: three times the products of a forward pass over a
        row, which runs without data. Each token counts the experts that it chooses.

        If the class cannot run without data: 6 N (PaLM, appendix B), without attention and without input embeddings.
        """
        if sequence_length not in self._flops_by_length:
            self._flops_by_length[sequence_length] = self._count_flops(sequence_length)
        return self._flops_by_length[sequence_length]

    @cached_property
    def _flops_by_length(self) -> dict[int, float]:
        return {}

    def _count_flops(self, length: int) -> float:
        tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
        asked = {} if self.architecture == "encoder" else {"use_cache": False}
        pair = {"decoder_input_ids": tokens} if self.architecture == "encoder-decoder" else {}
        counter = FlopCounterMode(display=False)
        try:
            with torch.no_grad(), _NoData(), _no_experts(self.bare), counter:
                self.bare(input_ids=tokens, **asked, **pair)
        except Exception:  # each class fails in its own way without data
            return 6.0 * (self.parameters() - self._looked_up)
        return 3.0 * counter.get_total_flops() / length + 6.0 * self._chosen_experts

    @property
    def _looked_up(self) -> int:
        """Return the parameters of input embeddings that are not output embeddings too."""
        table, head = self.bare.get_input_embeddings(), self.bare.get_output_embeddings()
        if table is None or (head is not None and head.weight is table.weight):
            return 0
        return int(table.weight.numel())

    @property
    def _chosen_experts(self) -> float:
        """Return the weights of the experts that a token chooses; those of all experts if the class does not say how
        many these are.
        """
        chosen = chosen_of(self.bare)
        weights = 0.0
        for module in self.bare.modules():
            if is_stack(module):
                stacked = [parameter for parameter in module.parameters() if parameter.dim() == 3]
                experts = max(map(len, stacked))
                weights += sum(parameter.numel() for parameter in stacked) * min(
                    1.0, (chosen or experts) / experts
                )
        return weights


class _NoData(TorchDispatchMode):
    """Element access on meta-device tensors returns 0."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        return func(*args, **(kwargs or {}))


@contextmanager
def _no_experts(bare: nn.Module) -> Iterator[None]:
    """Experts return their input: without data, the choice of experts is unknown, and it does not matter here."""
    stacks = [module for module in bare.modules() if is_stack(module)]
    for module in stacks:
        module.forward = lambda hidden, *_, **__: hidden
    try:
        yield
    finally:
        for module in stacks:
            del module.forward


def describe_hf_class(
    folder: str, changes: Mapping[str, Any] | None = None, kept: FolderConfig | None = None
) -> HuggingFaceModel:
    """Return the description of the model in a folder, to be run unchanged, from the `kept` configuration if given,
    else from the folder's.

    Raises WorkloadError if it is not a language model.
    """
    kept = kept or folder_config(folder)
    hf_config = read_hf_config(folder, changes, kept=kept)
    architecture = _architecture(folder, hf_config)
    text = hf_config.get_text_config()
    if lacking := [name for name in ("vocab_size", "hidden_size") if not getattr(text, name, None)]:
        raise WorkloadError(f"{hf_config.model_type} in {folder} has no {lacking[0]}; give another class")
    positions = getattr(text, "max_position_embeddings", None)
    if type(positions) is not int or positions <= 0:
        positions = 1_000_000
    zeroed = tuple(
        dict.fromkeys(name for part in nested_configs(hf_config) for name in random_attributes(part))
    )
    types = getattr(text, "type_vocab_size", 0) or 0
    return HuggingFaceModel(
        folder,
        architecture,
        text.vocab_size,
        text.hidden_size,
        positions,
        zeroed=zeroed,
        token_types=types,
        kept=kept,
    )


def _architecture(folder: str, hf_config: Any) -> str:
    """Return the architecture: by the class that the configuration names, else by the classes of its model_type."""
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type)
    masked = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(hf_config.model_type)
    pair = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type)
    if hf_config.is_encoder_decoder:
        causal = masked = None
        if pair is not None:
            return "encoder-decoder"
    named = masked is None or causal in (hf_config.architectures or ())
    if causal == masked:  # one class for both architectures
        named = getattr(hf_config, "causal", False)
    if causal is not None and named:
        return "decoder"
    if masked is not None:
        return "encoder"
    raise WorkloadError(
        f"{hf_config.model_type} in {folder} is not a language model of transformers; "
        "give the folder of a causal, masked or sequence-to-sequence one"
    )


def build(config: HuggingFaceModel, meta: bool = False) -> nn.Module:
    """Return the transformers model in fp32, on the current default device or, with `meta`, on the meta device."""
    if meta:
        with torch.device("meta"):
            return build(config)
    return auto_class(config).from_config(
        training_config(config), dtype=torch.float32, trust_remote_code=False
    )


def auto_class(config: HuggingFaceModel) -> Any:
    """Return transformers' Auto class for the model's architecture and head."""
    import transformers

    if config.head in HEADED:
        return getattr(transformers, HEADED[config.head])
    return {
        "decoder": transformers.AutoModelForCausalLM,
        "encoder": transformers.AutoModelForMaskedLM,
        "encoder-decoder": transformers.AutoModelForSeq2SeqLM,
    }[config.architecture]


def training_config(config: HuggingFaceModel) -> Any:
    """Return the configuration for training, with all `random_attributes` zero."""
    hf_config = config.hf_config()
    hf_config.return_dict = True
    if config.head != "language":
        hf_config.num_labels = config.classes
        hf_config.classifier_dropout = 0.0  # some classes use 0.1 if it is unset
    for part in nested_configs(hf_config):
        for name in random_attributes(part):
            setattr(part, name, 0.0)
    return hf_config


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the outermost layers that the class itself can recompute (gradient checkpointing), in order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks: list[nn.Module] = []
    for child in model.children():
        blocks += [child] if isinstance(child, GradientCheckpointingLayer) else blocks_of(child)
    return blocks
