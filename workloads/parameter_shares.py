"""Shares of a model's parameters: those that are trained, and those that are stored in 4 bits."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch

from workloads.adapters.adapter import LOW_RANK, Adapter, quantised
from workloads.describe import (
    Description,
)
from workloads.hf.as_they_are.hf_class import HuggingFaceModel
from workloads.hf.as_they_are.hf_class import build as build_class
from workloads.hf.as_they_are.network import HuggingFaceNetwork
from workloads.hf.as_they_are.workload import adaptable
from workloads.model.config import TransformerConfig
from workloads.own.model import OwnModel
from workloads.own.model import adaptable as adaptable_of_own
from workloads.own.network import OwnNetwork
from workloads.transformer_workload import build_model


def trained_share(
    model: Description, freeze: Sequence[str], adapter: Adapter | None, thawed: Sequence[str] = ()
) -> float:
    """Return the share of the parameters of `model` that are trained.

    These are the adapter's parameters, if there is an adapter, or those that no pattern in `freeze` or a pattern in
    `thawed` matches. The count may leave out heads.
    """
    with torch.device("meta"):
        built = (
            OwnNetwork(model.make(), {})
            if isinstance(model, OwnModel)
            else build_model(model)
            if isinstance(model, TransformerConfig)
            else HuggingFaceNetwork(build_class(model), {}, causal=True)
        )
        if adapter is not None and isinstance(model, TransformerConfig):
            adapter.apply(built, model)
        elif adapter is not None and isinstance(model, HuggingFaceModel) and adapter.kind in LOW_RANK:
            adapter.adapt(built, adaptable(built))
        elif adapter is not None and isinstance(built, OwnNetwork) and adapter.kind in LOW_RANK:
            adapter.adapt(built, adaptable_of_own(built))
    sizes = {name: parameter.numel() for name, parameter in built.named_parameters()}
    open_ = [n for n in sizes if adapter is None or adapter.trains(n)]
    trained = {n for n in open_ if not any(fnmatchcase(n, pattern) for pattern in freeze)}
    trained |= {n for n in sizes if any(fnmatchcase(n, pattern) for pattern in thawed)}
    return sum(sizes[name] for name in trained) / sum(sizes.values())


def quantised_share(model: Description, adapter: Adapter | None) -> float:
    """Return the share of the parameters of `model` that an adapter's base stores in 4 bits, see
    `workloads.adapters.nf4`.

    Raises WorkloadError if the base cannot be stored in 4 bits.
    """
    if adapter is None or not adapter.quantise or not isinstance(model, TransformerConfig):
        return 0.0
    with torch.device("meta"):
        built = build_model(model)
    sizes = {name: parameter.numel() for name, parameter in built.named_parameters()}
    return sum(sizes[name] for name in quantised(built)) / sum(sizes.values())
