"""The model in a Hugging Face folder: converted to a configuration of this project, or described to be run as it is."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from workloads.errors import WorkloadError
from workloads.hf.config_roundtrip import check
from workloads.hf.convert import ties, used
from workloads.hf.families import by_model_type
from workloads.hf.family import Family
from workloads.hf.hf_class import HuggingFaceModel, describe_hf_class
from workloads.hf.hf_config import GENERATOR, FolderConfig, folder_config, method_of, read_hf_config, root
from workloads.hf.weights import Weights, has_weights
from workloads.model.config import TransformerConfig

MXFP4 = "mxfp4"
"""How transformers calls what `workloads.hf.mxfp4` reads."""


def describe_folder(folder: str, kept: FolderConfig | None = None) -> TransformerConfig | HuggingFaceModel:
    """The model in `folder`, by the configuration that is `kept`, else by that in the folder; a `HuggingFaceModel` if
    its class has no conversion table here."""
    kept = kept or folder_config(folder)
    hf_config = read_hf_config(folder, quantised=(MXFP4,), kept=kept)
    family = by_model_type(hf_config.model_type)
    if family is None or (method_of(hf_config) and not family.in_4_bits):
        return describe_hf_class(folder, kept=kept)
    try:
        config = _read(family, hf_config, str(root(folder)), kept.tied)
    except WorkloadError:
        if not family.or_as_it_is:
            raise
        return describe_hf_class(folder, kept=kept)
    if config.family == "electra" and kept.of_generator:
        generator = str(root(folder) / GENERATOR)
        return _with_generator(family, config, generator, kept.of_generator, kept.tied)
    return config


def _read(family: Family, hf_config: Any, folder: str, tied: bool | None) -> TransformerConfig:
    """The configuration of this project; whether the embedding is `tied` is read from the weights if it is None."""
    config = family.read_config(hf_config)
    check(family, config, hf_config)
    if tied is None and has_weights(folder):
        tied = _tied(family, config, Weights(folder))
    return config if tied is None else config.changed({"tied": tied})


def _tied(family: Family, config: TransformerConfig, weights: Weights) -> bool:
    """Whether the output projection is the embedding: as configured, unless the weights have a separate table."""
    heads = family.heads.get("language") or family.heads["masked"]
    names = {row.names[0]: row for row in family.rows + heads.rows}
    head = names.get("head.weight") or names["head.output.weight"]
    if not ties(family, config):
        return config.tied
    if head.hf_name not in weights:
        return True
    found = [n for n in used(family, config, names["tokens.weight"]) if n in weights]
    return bool(found) and torch.equal(weights.read(found[0]), weights.read(head.hf_name))


def _with_generator(
    family: Family, config: TransformerConfig, folder: str, kept: FolderConfig, tied: bool | None
) -> TransformerConfig:
    """The configuration of both networks. Raises WorkloadError if the generator is not a narrower discriminator."""
    generator = _read(family, read_hf_config(folder, kept=kept), folder, tied)
    pair = config.changed({"generator": generator.hidden})
    expected = pair.generator_config()
    for name in (f.name for f in fields(expected) if f.name not in ("head", "tied", "head_dim", "kv_heads")):
        if getattr(generator, name) != getattr(expected, name):
            raise WorkloadError(
                f"the generator in {folder} has {name} {getattr(generator, name)!r}, and beside this discriminator "
                f"{getattr(expected, name)!r} is expected; give a pair that was trained together"
            )
    return pair.changed({"tied": generator.tied})
