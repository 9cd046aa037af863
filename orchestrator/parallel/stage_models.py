"""The stages of a pipeline: the layers of each, and the parameters that several hold."""

from __future__ import annotations

import copy

import torch
from torch import nn

from orchestrator.parallel.layout import Layout
from workloads.hf.as_they_are.network import HuggingFaceNetwork
from workloads.own.network import OwnNetwork
from workloads.workload import Workload


def plain_stage(workload: Workload, layout: Layout, number: int) -> nn.Module:
    """Return stage `number` of the workload's model, uncut, on the meta device.

    Args:
        workload: builds the model.
        layout: says which layers a stage has.
        number: number of the stage in the whole pipeline.
    """
    # A model may be larger than a rank's memory; only its shapes are needed until it is cut.
    with torch.device("meta"):
        model = workload.build()
    return _keep_layers(model, workload, layout, number) if layout.pp > 1 else model


def _keep_layers(model: nn.Module, workload: Workload, layout: Layout, number: int) -> nn.Module:
    """Reduce the model to the layers of a stage."""
    start, count = layout.layers_of(len(workload.stages()) + 1, number)
    ends = {"first": number == 0, "last": number == layout.stages - 1}
    # The stages of other kinds of models all have layers, from which their place follows.
    model.keep(start, start + count, **(ends if workload.config.divided_by == "rules" else {}))  # type: ignore[operator]
    return model


def stages_with(workload: Workload, layout: Layout) -> dict[str, list[int]]:
    """Return the numbers of the stages that hold each parameter, ascending; empty without a pipeline.

    Args:
        workload: builds the model.
        layout: says which layers a stage has.
    """
    stages: dict[str, list[int]] = {}
    if layout.pp == 1:
        return stages
    with torch.device("meta"):
        model = workload.build()
    # Layers of these models may change when the model is cut, so every stage is built separately.
    is_foreign = isinstance(model, OwnNetwork | HuggingFaceNetwork)
    memo = {id(part): part for part in (*workload.blocks(model), *model.parameters(), *model.buffers())}
    for number in range(layout.stages):
        # Building layers is slow. A stage keeps some of them unchanged, so a copy of the model shares its layers.
        stage = (
            plain_stage(workload, layout, number)
            if is_foreign
            else _keep_layers(copy.deepcopy(model, dict(memo)), workload, layout, number)
        )
        for name, _ in stage.named_parameters():
            stages.setdefault(name, []).append(number)
    return stages
