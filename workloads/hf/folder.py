"""The configuration in a folder of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from workloads.errors import WorkloadError
from workloads.hf.config_roundtrip import check
from workloads.hf.convert import ties, used
from workloads.hf.families import by_model_type
from workloads.hf.family import Family
from workloads.hf.weights import Weights, has_weights
from workloads.model.config import TransformerConfig

GENERATOR = "generator"
"""Folder of ELECTRA's generator inside that of its discriminator."""


RANDOM = ("drop", "jitter")
"""What the names of numbers have in them with which a network in training draws random numbers."""


@dataclass(frozen=True)
class HuggingFaceModel:
    """A class that has no table here, with what planning asks of a configuration.

    It is run as it is and cannot be cut, hence one layer and one head. changes are of their attributes, silenced
    those of which training makes zeros, since what they draw at random would depend on the layout.
    """

    folder: str
    architecture: str
    vocab_size: int
    hidden: int
    max_positions: int
    changes: tuple[tuple[str, Any], ...] = ()
    silenced: tuple[str, ...] = ()
    family: str = "transformers"
    layers: int = 1
    decoder_layers: int = 0
    heads: int = 1
    kv_heads: int = 1
    intermediate: int = 1
    moe: None = None

    def changed(self, changes: Mapping[str, Any]) -> HuggingFaceModel:
        """A copy whose configuration has other values; raises WorkloadError for an attribute it lacks."""
        if not changes:
            return self
        theirs = theirs_in(self.folder)
        for name in changes:
            if not hasattr(theirs, name):
                raise WorkloadError(f"the configuration in {self.folder} has no {name}; change one it has")
        return replace(describe_foreign(self.folder, changes), changes=tuple(changes.items()))

    @cached_property
    def bare(self) -> Any:
        """The model of transformers, built without memory. Raises WorkloadError if its class cannot build it."""
        from workloads.hf.network import network

        try:
            return network(self, meta=True)
        except Exception as error:  # each class fails in its own way on a configuration that it cannot have
            line = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            raise WorkloadError(
                f"transformers cannot build the model in {self.folder}: {line}; fix its config.json"
            ) from error

    @cached_property
    def balanced(self) -> bool:
        """Whether the loss has a part that balances routers."""
        from workloads.hf.routers import balance_of

        return balance_of(self.bare) is not None

    @cached_property
    def has_blocks(self) -> bool:
        """Whether there are layers that can be recomputed or compiled alone."""
        from workloads.hf.network import blocks_of

        return bool(blocks_of(self.bare))

    def parameters(self) -> int:
        """Number of trained parameters."""
        return sum(parameter.numel() for parameter in self.bare.parameters())

    def flops(self, sequence_length: int) -> float:
        """6 N per token; attention is not counted, since the class may have any."""
        return 6.0 * self.parameters()


def theirs_in(folder: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Their configuration object. Raises WorkloadError if the folder has none that transformers knows."""
    from transformers import AutoConfig

    path = root(folder)
    if not (path / "config.json").exists():
        raise WorkloadError(f"{folder} has no config.json; give a folder that save_pretrained wrote")
    try:
        theirs = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, **(changes or {})
        )
    except Exception as error:  # each class checks its configuration in its own way
        line = " ".join(str(error).split())[:200]
        raise WorkloadError(f"transformers cannot read {folder}: {line}; fix its config.json") from error
    if getattr(theirs, "quantization_config", None) is not None:
        raise WorkloadError(f"the weights in {folder} are quantised; give a folder with the whole ones")
    return theirs


def parts_of(theirs: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    from transformers import PreTrainedConfig

    yield theirs
    for value in vars(theirs).values():
        if isinstance(value, PreTrainedConfig):
            yield from parts_of(value)


def random_numbers(theirs: Any) -> list[str]:
    """Attributes with which a network in training draws random numbers, and which are not zero."""
    return sorted(
        name
        for name, value in vars(theirs).items()
        if any(word in name for word in RANDOM) and type(value) in (int, float) and value
    )


def root(folder: str) -> Path:
    """The folder itself, also where its config.json is named."""
    return Path(folder).parent if folder.endswith(".json") else Path(folder)


def describe_folder(folder: str) -> TransformerConfig | HuggingFaceModel:
    """Our configuration of the model in `folder`, or a ForeignModel where there is no table for its class."""
    theirs = theirs_in(folder)
    family = by_model_type(theirs.model_type)
    if family is None:
        return describe_foreign(folder)
    config = _read(family, theirs, str(root(folder)))
    generator = root(folder) / GENERATOR
    if config.family == "electra" and (generator / "config.json").exists():
        return _with_generator(family, config, str(generator))
    return config


def _read(family: Family, theirs: Any, folder: str) -> TransformerConfig:
    config = family.read_config(theirs)
    check(family, config, theirs)
    return config.changed({"tied": _tied(family, config, Weights(folder))}) if has_weights(folder) else config


def _tied(family: Family, config: TransformerConfig, weights: Weights) -> bool:
    """Whether the logits are of the embedding itself: as configured, unless the weights have another table for them."""
    heads = family.heads.get("language") or family.heads["masked"]
    names = {row.ours[0]: row for row in family.rows + heads.rows}
    head = names.get("head.weight") or names["head.output.weight"]
    if not ties(family, config):
        return config.tied
    if head.theirs not in weights:
        return True
    found = [n for n in used(family, config, names["tokens.weight"]) if n in weights]
    return bool(found) and torch.equal(weights.read(found[0]), weights.read(head.theirs))


def _with_generator(family: Family, config: TransformerConfig, folder: str) -> TransformerConfig:
    """The pair. Raises WorkloadError if the generator is not the discriminator made narrower."""
    generator = _read(family, theirs_in(folder), folder)
    pair = config.changed({"generator": generator.hidden})
    expected = pair.generator_config()
    for name in (f.name for f in fields(expected) if f.name not in ("head", "tied", "head_dim", "kv_heads")):
        if getattr(generator, name) != getattr(expected, name):
            raise WorkloadError(
                f"the generator in {folder} has {name} {getattr(generator, name)!r}, and beside this discriminator "
                f"{getattr(expected, name)!r} is expected; give a pair that was trained together"
            )
    return pair.changed({"tied": generator.tied})


def describe_foreign(folder: str, changes: Mapping[str, Any] | None = None) -> HuggingFaceModel:
    """What is known of a class without a table. Raises WorkloadError if it is no language model."""
    theirs = theirs_in(folder, changes)
    architecture = _architecture(folder, theirs)
    text = theirs.get_text_config()
    if lacking := [name for name in ("vocab_size", "hidden_size") if not getattr(text, name, None)]:
        raise WorkloadError(f"{theirs.model_type} in {folder} has no {lacking[0]}; give another class")
    positions = getattr(text, "max_position_embeddings", None)
    if type(positions) is not int or positions <= 0:
        positions = 1_000_000
    silenced = tuple(dict.fromkeys(name for part in parts_of(theirs) for name in random_numbers(part)))
    return HuggingFaceModel(
        folder, architecture, text.vocab_size, text.hidden_size, positions, silenced=silenced
    )


def _architecture(folder: str, theirs: Any) -> str:
    """By the class that the configuration names, else by the classes that transformers has for it."""
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(theirs.model_type)
    masked = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(theirs.model_type)
    pair = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(theirs.model_type)
    if theirs.is_encoder_decoder:
        causal = masked = None
        if pair is not None:
            return "encoder-decoder"
    named = masked is None or causal in (theirs.architectures or ())
    if causal == masked:  # one class for both
        named = getattr(theirs, "causal", False)
    if causal is not None and named:
        return "decoder"
    if masked is not None:
        return "encoder"
    raise WorkloadError(
        f"{theirs.model_type} in {folder} is no language model of transformers; "
        "give the folder of a causal, masked or sequence-to-sequence one"
    )
