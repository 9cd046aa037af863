"""Statistics by layer on one rank: those of plain torch. Under which engines they are refused."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import job
from rendezvous import recorded

from orchestrator.config.spec import parse
from orchestrator.parallel.device import Device
from orchestrator.parallel.engine_rules import engine_problems
from orchestrator.parallel.layout import Layout
from orchestrator.train.engines.torch_engine import TorchEngine

sys.path.append(str(Path(__file__).parents[4] / "dist" / "train"))
COLLECTED = {"every": 1, "activations": True, "histograms": True}


def test_norms_outputs_and_histograms_are_those_of_plain_torch() -> None:
    from rank_cases import job as of_case
    from rank_cases import micro_batches, workload_of

    spec = of_case({"model": "gpt-tiny", "train": {"layer_statistics": COLLECTED, "global_batch": 4}})
    workload, layout = workload_of(spec), Layout(micro_batch=2)
    model = workload.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(workload.initial(name, spec.seed))
    outputs: dict[str, list[torch.Tensor]] = {}
    layers = [name for name, module in model.named_modules() if module in set(workload.blocks(model))]
    for name in layers:
        kept = outputs.setdefault(name, [])
        model.get_submodule(name).register_forward_hook(
            lambda _, __, output, kept=kept: kept.append(_tensor(output).detach())  # type: ignore[misc]
        )
    with recorded(0, 1):
        group = dist.group.WORLD
        assert group is not None
        engine = TorchEngine(spec.engine, workload, layout, Device(torch.device("cpu"), torch.float32, group))
        engine.initialise(spec.seed)
        batches = micro_batches(workload, spec, layout, 0)
        found = engine.train_step(batches, 1e-2).layers
    losses = [workload.loss(model, batch) for batch in batches]
    total = sum((each.total for each in losses), torch.zeros(()))
    (total / sum(each.count for each in losses)).backward()
    parameters = dict(model.named_parameters())
    assert set(found) == {*parameters, *layers}
    assert len(layers) == 2
    for name, parameter in parameters.items():
        initial, gradient = parameter.detach(), parameter.grad
        assert gradient is not None
        assert found[name]["weight_norm"] == pytest.approx(float(initial.norm()), rel=1e-5)
        assert found[name]["gradient_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5, abs=1e-7)
        assert found[name]["weight_histogram"] == _histogram(initial)
        assert sum(found[name]["gradient_histogram"].values()) == parameter.numel()
    for name, kept in outputs.items():
        values = torch.cat([each.flatten() for each in kept])
        assert found[name]["activation_rms"] == pytest.approx(float(values.square().mean().sqrt()), rel=1e-5)


def test_buffers_have_no_statistics() -> None:
    """A router's bias is in the state of the model, and no optimizer trains it."""
    from rank_cases import job as of_case
    from rank_cases import micro_batches, workload_of

    spec = of_case({"model": "deepseek-v3-tiny", "train": {"layer_statistics": {"every": 1}}})
    workload, layout = workload_of(spec), Layout(micro_batch=8)
    parameters = {name for name, _ in workload.build().named_parameters()}
    assert set(workload.shapes) - parameters
    with recorded(0, 1):
        group = dist.group.WORLD
        assert group is not None
        engine = TorchEngine(spec.engine, workload, layout, Device(torch.device("cpu"), torch.float32, group))
        engine.initialise(spec.seed)
        found = engine.train_step(micro_batches(workload, spec, layout, 0), 1e-2).layers
    assert set(found) == parameters
    assert min(each["weight_norm"] + each["gradient_norm"] for each in found.values()) > 0.0


def _tensor(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def _histogram(values: torch.Tensor) -> dict[str, int]:
    """In plain Python."""
    found: dict[str, int] = {}
    for value in values.flatten().tolist():
        key = "zero" if value == 0.0 else str(math.floor(math.log2(abs(value))))
        found[key] = found.get(key, 0) + 1
    order = [*map(str, range(-40, 24)), "zero"]
    return {key: found[key] for key in order if key in found}


@pytest.mark.parametrize(
    ("train", "layout", "wanted"),
    [
        (
            {"layer_statistics": {"every": 5}},
            {"dp": 2, "zero": 1, "engine": "deepspeed"},
            "DeepSpeed reduces",
        ),
        (
            {"layer_statistics": {"every": 5, "activations": True}, "compile": True},
            {},
            "which compiled layers",
        ),
        ({"layer_statistics": {"every": 5}, "compile": True}, {}, ""),
    ],
)
def test_what_cannot_be_collected_is_refused(train: Any, layout: Any, wanted: str) -> None:
    spec = parse(job("a.txt", **train))
    problems = engine_problems(spec.train, spec.workload, 0, Layout(micro_batch=1, **layout))
    assert [wanted in each for each in problems] == ([True] if wanted else [])


def test_statistics_make_no_other_run() -> None:
    with_them, without = (parse(job("a.txt", **more)) for more in ({"layer_statistics": {"every": 5}}, {}))
    assert with_them.identity() == without.identity()
