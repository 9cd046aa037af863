"""What a table of a Hugging Face class consists of (no torch)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workloads.errors import WorkloadError
from workloads.model.config import TransformerConfig

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}
THEIR_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python": "gelu", "swish": "silu",
}  # fmt: skip
"""Ours by their names, several of which are the same function."""


@dataclass(frozen=True)
class Row:
    """Our tensors and theirs: `ours` are concatenated along dimension 0 to make `theirs`.

    {n} stands for a layer's number. {e} in theirs stands for an expert: our tensor is the stack of theirs.
    transposed: theirs is [in, out]. order(config): our dimension 0 is theirs in that order. untied are the names
    of the tensors that transformers computes with in its place where the word embeddings are not tied.
    """

    ours: tuple[str, ...]
    theirs: str
    transposed: bool = False
    order: Callable[[TransformerConfig], Sequence[int]] | None = None
    untied: tuple[str, ...] = ()

    def number(self, name: str) -> tuple[int, str] | None:
        """Which of `ours` the tensor `name` is, and its layer's number ('' if the row has none)."""
        for place, pattern in enumerate(self.ours):
            expression = re.escape(pattern).replace(r"\{n\}", r"(\d+)")
            if found := re.fullmatch(expression, name):
                return place, found.group(1) if found.groups() else ""
        return None


def both(ours: str | tuple[str, ...], theirs: str, transposed: bool = False) -> tuple[Row, ...]:
    """The rows of a module's weight and bias."""
    names = (ours,) if isinstance(ours, str) else ours
    return tuple(
        Row(tuple(f"{n}.{leaf}" for n in names), f"{theirs}.{leaf}", transposed)
        for leaf in ("weight", "bias")
    )


def one(ours: str, theirs: str, *untied: str) -> tuple[Row, ...]:
    """The row of a single tensor."""
    return (Row((ours,), theirs, untied=untied),)


@dataclass(frozen=True)
class Head:
    """The class of transformers that has this head, and the rows of the head."""

    kind: str
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Family:
    """One class of transformers.

    base gives the fields that the class fixes; fields pairs ours with theirs in the configuration;
    constants are written as they are; reads and writes derive what is no plain pair. heads are by our
    `head`, with '+sentence' where the model has a sentence head. prefix is left out of a bare checkpoint.
    unsaid are fields of ours that only the weights tell.
    """

    model_type: str
    base: TransformerConfig
    fields: Mapping[str, str]
    rows: tuple[Row, ...]
    heads: Mapping[str, Head]
    prefix: str = ""
    unsaid: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    reads: Callable[[Any], dict[str, Any]] = lambda theirs: {}
    writes: Callable[[TransformerConfig], dict[str, Any]] = lambda config: {}

    def head(self, config: TransformerConfig) -> Head:
        """The class for `config`; raises WorkloadError if transformers has none."""
        key = config.head + ("+sentence" if config.sentence_head else "")
        if key not in self.heads:
            raise WorkloadError(
                f"transformers has no {self.model_type} with head {key}, only with {', '.join(self.heads)}; "
                "choose another objective or class, or set checkpoint.export to null"
            )
        return self.heads[key]

    def all_rows(self, config: TransformerConfig) -> tuple[Row, ...]:
        """Rows of the body and of the head of `config`."""
        return self.rows + self.head(config).rows

    def read_config(self, theirs: Any) -> TransformerConfig:
        """Ours from an object with their configuration's attributes."""
        pairs = {ours: getattr(theirs, name) for ours, name in self.fields.items()}
        values = {k: v for k, v in pairs.items() if v is not None} | self.reads(theirs)
        if "activation" in values:
            if values["activation"] not in THEIR_ACTIVATIONS:
                raise WorkloadError(
                    f"activation {values['activation']!r} of {self.model_type} is not supported here; "
                    f"use one of {', '.join(THEIR_ACTIVATIONS)}"
                )
            values["activation"] = THEIR_ACTIVATIONS[values["activation"]]
        fresh = {"kv_heads": 0, "head_dim": 0, "embedding_size": 0}
        return self.base.changed(fresh | values)

    def write_config(self, config: TransformerConfig) -> dict[str, Any]:
        """Their keys and values for `config`."""
        values = {theirs: getattr(config, ours) for ours, theirs in self.fields.items()}
        if "activation" in self.fields:
            values[self.fields["activation"]] = ACTIVATIONS[config.activation]
        values |= dict(self.constants) | self.writes(config)
        if config.classes:
            values["num_labels"] = config.classes
        return values
