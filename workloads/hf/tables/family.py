"""The types of a conversion table between a Hugging Face class and our model (no torch)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workloads.errors import WorkloadError
from workloads.model.config import TransformerConfig

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}
HF_ACTIVATIONS = {hf_name: name for name, hf_name in ACTIVATIONS.items()} | {
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python": "gelu", "swish": "silu",
}  # fmt: skip
"""Our name of an activation for each of its names in transformers."""


@dataclass(frozen=True)
class Row:
    """One tensor of the Hugging Face class, and the tensors of our model that it consists of.

    Attributes:
        names: our tensors; concatenated along dimension 0 they form the tensor `hf_name`. {n} stands for a layer's
            number.
        hf_name: transformers' name. {e} stands for an expert's number: our tensor is the stack of theirs.
        transposed: theirs is [.., in, out].
        is_interleaved: ours are stacks [experts, out, ..] that alternate along `out`.
        order(config): the order of their dimension 0 in ours.
        untied: the names of the tensors that transformers uses instead if the word embeddings are not tied.
        theirs(config): the shape of theirs, if ours has the same numbers in fewer dimensions.
    """

    names: tuple[str, ...]
    hf_name: str
    transposed: bool = False
    is_interleaved: bool = False
    order: Callable[[TransformerConfig], Sequence[int]] | None = None
    untied: tuple[str, ...] = ()
    theirs: Callable[[TransformerConfig], tuple[int, ...]] | None = None

    def number(self, name: str) -> tuple[int, str] | None:
        """Return the index of the tensor `name` in `names`, and its layer's number ('' without one); None if it is
        not among them.
        """
        for index, pattern in enumerate(self.names):
            expression = re.escape(pattern).replace(r"\{n\}", r"(\d+)")
            if match := re.fullmatch(expression, name):
                return index, match.group(1) if match.groups() else ""
        return None


def both(names: str | tuple[str, ...], hf_name: str, transposed: bool = False) -> tuple[Row, ...]:
    """Return the rows of a module's weight and bias."""
    modules = (names,) if isinstance(names, str) else names
    return tuple(
        Row(tuple(f"{module}.{leaf}" for module in modules), f"{hf_name}.{leaf}", transposed)
        for leaf in ("weight", "bias")
    )


def one(name: str, hf_name: str, *untied: str) -> tuple[Row, ...]:
    """Return the row of a single tensor."""
    return (Row((name,), hf_name, untied=untied),)


@dataclass(frozen=True)
class Head:
    """The transformers class with this head, and the rows of the head."""

    kind: str
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Family:
    """The conversion table of one transformers class.

    Attributes:
        base: our configuration with the values that the class fixes.
        fields: our configuration's fields and theirs.
        constants: their fields with fixed values.
        reads, writes: functions for everything that is not a pair of fields.
        heads: by our `head`, with '+sentence' if the model has a sentence head.
        prefix: the module name that a checkpoint of the bare model leaves out.
        unsaid: our fields that follow only from the weights, not from the configuration.
        or_as_it_is: run the class of transformers for a configuration that the table cannot express, instead of
            refusing it.
        in_4_bits: experts may be stored in MXFP4.
        unused: a pattern for names of tensors that transformers ignores too.
        computed: their tensors that follow from the configuration and do not exist here.
    """

    model_type: str
    base: TransformerConfig
    fields: Mapping[str, str]
    rows: tuple[Row, ...]
    heads: Mapping[str, Head]
    prefix: str = ""
    or_as_it_is: bool = False
    in_4_bits: bool = False
    unused: str = ""
    unsaid: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    computed: Callable[[TransformerConfig], Mapping[str, Tensor]] = lambda config: {}
    reads: Callable[[Any], dict[str, Any]] = lambda hf_config: {}
    writes: Callable[[TransformerConfig], dict[str, Any]] = lambda config: {}

    def head(self, config: TransformerConfig) -> Head:
        """Return the class for `config`. Raises WorkloadError if transformers has none."""
        key = config.head + ("+sentence" if config.sentence_head else "")
        if key not in self.heads:
            raise WorkloadError(
                f"transformers has no {self.model_type} with head {key}, only with {', '.join(self.heads)}; "
                "choose another objective or class, or set checkpoint.export to null"
            )
        return self.heads[key]

    def all_rows(self, config: TransformerConfig) -> tuple[Row, ...]:
        """Return the rows of the body and of the head of `config`."""
        return self.rows + self.head(config).rows

    def read_config(self, hf_config: Any) -> TransformerConfig:
        """Return our configuration for transformers' configuration object. Raises WorkloadError for an unknown
        activation.
        """
        pairs = {name: getattr(hf_config, hf_name) for name, hf_name in self.fields.items()}
        values = {k: v for k, v in pairs.items() if v is not None} | self.reads(hf_config)
        if "activation" in values:
            if values["activation"] not in HF_ACTIVATIONS:
                raise WorkloadError(
                    f"activation {values['activation']!r} of {self.model_type} is not supported here; "
                    f"use one of {', '.join(HF_ACTIVATIONS)}"
                )
            values["activation"] = HF_ACTIVATIONS[values["activation"]]
        fresh = {"kv_heads": 0, "head_dim": 0, "embedding_size": 0}
        config = self.base.changed(fresh | values)
        size = None if "head_dim" in values else getattr(hf_config, "head_dim", None)
        if size not in (None, config.head_dim):  # the class reads it, although it is not one of its fields
            raise WorkloadError(
                f"head_dim {size} of this {self.model_type} is not hidden / heads, which this project requires"
            )
        return config

    def write_config(self, config: TransformerConfig) -> dict[str, Any]:
        """Return the fields of transformers' configuration for `config`."""
        values = {hf_name: getattr(config, name) for name, hf_name in self.fields.items()}
        if "activation" in self.fields:
            values[self.fields["activation"]] = ACTIVATIONS[config.activation]
        values |= dict(self.constants) | self.writes(config)
        if config.classes:
            values["num_labels"] = config.classes
        return values
