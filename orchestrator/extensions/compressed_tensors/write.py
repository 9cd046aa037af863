"""Export with quantised linear layers in the form of compressed-tensors, which transformers and vLLM load.

config.json names the format in `quantization_config`; each quantised weight is stored as integers and scales.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.hf.export.dcp_export import copy_others
from workloads.hf.files.hf_config import GENERATOR
from workloads.hf.files.weight_files import Weights, write
from workloads.model.fake_quantise import quantise
from workloads.model.scheme import Scheme

HINT = "export it without quantisation"
WEIGHT = ".weight"
PACKED = "pack-quantized"


def export_compressed(plain: str, folder: str, chosen: Mapping[str, Scheme]) -> list[str]:
    """Write the export in `plain` to `folder` with quantised weights.

    Args:
        plain: an export for transformers.
        folder: where to write.
        chosen: transformers' names of the weights to quantise, each with its format, int8 or int4.

    Returns the linear layers that stay in full precision. Raises WorkloadError if the class stores one of the weights
    in something other than a linear layer, or if rows have no whole groups.
    """
    config = json.loads((Path(plain) / "config.json").read_text())
    if (Path(plain) / GENERATOR).exists():
        raise WorkloadError(
            f"a generator and its discriminator can be exported only in full precision; {HINT}"
        )
    kept = layers_in_full_precision(config, chosen)
    described = _described(chosen, kept)
    weights = Weights(plain)
    write(_tensors(weights, chosen, described), folder)
    copy_others(plain, folder)
    config["quantization_config"] = described.to_dict()
    (Path(folder) / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return kept


def layers_in_full_precision(config: Mapping[str, Any], weights: Collection[str]) -> list[str]:
    """Return the names of the linear layers of transformers' class that have none of the quantised weights.

    Args:
        config: config.json of the model.
        weights: transformers' names of the weights to quantise.

    Raises:
        WorkloadError: the class stores one of them in something other than a linear layer.
    """
    import transformers

    name = config["architectures"][0]
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model: nn.Module = kind(kind.config_class.from_dict(dict(config)))
    linear = {path for path, module in model.named_modules() if type(module) is nn.Linear}
    layers = {weight.removesuffix(WEIGHT) for weight in weights}
    if others := sorted(layers - linear):
        raise WorkloadError(
            f"{name} of transformers stores {others[0]} outside a linear layer, and compressed-tensors quantises "
            f"linear layers only; {HINT}"
        )
    return sorted(linear - layers)


def _described(chosen: Mapping[str, Scheme], kept: list[str]) -> Any:
    """Return compressed-tensors' configuration of layers with one or two formats."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    schemes = sorted(set(chosen.values()), key=lambda each: each.bits)
    form = "int-quantized" if all(each.activations and each.bits == 8 for each in schemes) else PACKED
    groups = {
        f"group_{number}": _group(
            each,
            form,
            # Names and not the class where there are two formats: a reader need not know which group comes first.
            ["Linear"]
            if len(schemes) == 1
            else [name.removesuffix(WEIGHT) for name in sorted(chosen) if chosen[name] == each],
        )
        for number, each in enumerate(schemes)
    }
    return QuantizationConfig(
        config_groups=groups,
        format=form,
        ignore=kept,
        quantization_status=QuantizationStatus.COMPRESSED,
    )


def _group(scheme: Scheme, form: str, targets: list[str]) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    how = {"strategy": "group", "group_size": scheme.group} if scheme.group else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=scheme.bits, symmetric=True, **how)
    tokens = QuantizationArgs(num_bits=8, symmetric=True, strategy="token", dynamic=True)
    return QuantizationScheme(
        targets=targets,
        weights=weights,
        input_activations=tokens if scheme.activations else None,
        format=form,
    )


def _tensors(weights: Weights, chosen: Mapping[str, Scheme], described: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the export, one weight after another."""
    from compressed_tensors.compressors import BaseCompressor

    group_of = {group.weights.num_bits: group for group in described.config_groups.values()}
    compressor = BaseCompressor.get_value_from_registry(described.format)
    for name in weights.names:
        if name not in chosen:
            yield name, weights.read(name)
            continue
        scheme = chosen[name]
        weight = weights.read(name).float()
        if not scheme.fits(weight.shape[1]):
            raise WorkloadError(
                f"{name} has rows of {weight.shape[1]}, which is not a multiple of the group of {scheme.group}; choose "
                "another group"
            )
        state = {"weight": weight, "weight_scale": quantise(weight, scheme)[1].squeeze(-1)}
        layer = name.removesuffix(WEIGHT)
        for leaf, tensor in compressor.compress(state, group_of[scheme.bits]).items():
            yield f"{layer}.{leaf}", tensor
