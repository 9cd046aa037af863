"""The configuration in a folder of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from workloads.config import TransformerConfig
from workloads.errors import WorkloadError
from workloads.hf.convert import ties, used
from workloads.hf.faithful import check
from workloads.hf.families import by_model_type
from workloads.hf.family import Family
from workloads.hf.weights import Weights, has_weights

GENERATOR = "generator"
"""Folder of ELECTRA's generator inside that of its discriminator."""


@dataclass(frozen=True)
class ForeignModel:
    """A class that has no table here, with what planning asks of a configuration.

    It is run as it is and cannot be cut, hence one layer and one head. changes are of their attributes.
    """

    folder: str
    architecture: str
    vocab_size: int
    hidden: int
    max_positions: int
    changes: tuple[tuple[str, Any], ...] = ()
    family: str = "transformers"
    layers: int = 1
    decoder_layers: int = 0
    heads: int = 1
    kv_heads: int = 1
    intermediate: int = 1
    moe: None = None

    def changed(self, changes: Mapping[str, Any]) -> ForeignModel:
        """A copy whose configuration has other values; raises WorkloadError for an attribute it lacks."""
        if not changes:
            return self
        theirs = theirs_in(self.folder)
        for name in changes:
            if not hasattr(theirs, name):
                raise WorkloadError(f"the configuration in {self.folder} has no {name}; change one it has")
        return replace(describe_foreign(self.folder, changes), changes=tuple(changes.items()))

    def parameters(self) -> int:
        """Number of trained parameters, from the model built without memory."""
        from workloads.hf.foreign import network

        return sum(parameter.numel() for parameter in network(self, meta=True).parameters())

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
        return AutoConfig.from_pretrained(path, local_files_only=True, **(changes or {}))
    except (ValueError, OSError, KeyError) as error:
        line = " ".join(str(error).split())[:200]
        raise WorkloadError(f"transformers cannot read {folder}: {line}; mend its config.json") from error


def root(folder: str) -> Path:
    """The folder itself, also where its config.json is named."""
    return Path(folder).parent if folder.endswith(".json") else Path(folder)


def describe_folder(folder: str) -> TransformerConfig | ForeignModel:
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


def describe_foreign(folder: str, changes: Mapping[str, Any] | None = None) -> ForeignModel:
    """What is known of a class without a table."""
    theirs = theirs_in(folder, changes)
    text = theirs.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or 1_000_000
    return ForeignModel(folder, _architecture(theirs), text.vocab_size, text.hidden_size, positions)


def _architecture(theirs: Any) -> str:
    """By the class that the configuration names, else by the classes that transformers has for it."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    if theirs.is_encoder_decoder:
        return "encoder-decoder"
    named = (theirs.architectures or [""])[0]
    if named and named == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(theirs.model_type):
        return "decoder"
    return "encoder" if theirs.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES else "decoder"
