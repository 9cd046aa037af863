"""The engine on one rank: a reference that is held gives the steps of one that is given; its memory ends with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rendezvous import recorded

from orchestrator.planning.layout import Layout
from orchestrator.train.device import Device
from orchestrator.train.engines.torch_engine import TorchEngine

sys.path.append(str(Path(__file__).parents[4] / "dist" / "train"))


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_held_reference_gives_the_steps_of_a_given_one(objective: str) -> None:
    from rank_cases import job, micro_batches, workload_of

    seen: dict[str, list[Any]] = {}
    with recorded(0, 1):
        group = dist.group.WORLD
        assert group is not None
        for reference in ("precomputed", "held"):
            case = {"model": "gpt-tiny", "objective": objective, "train": {"reference": reference}}
            spec = job(case)
            workload, layout = workload_of(spec), Layout(micro_batch=4)
            engine = TorchEngine(spec, workload, layout, Device(torch.device("cpu"), torch.float32, group))
            engine.hold_reference(3)
            batches = [micro_batches(workload, spec, layout, step) for step in range(3)]
            for each in (batch for step in batches for batch in step):
                del each["reference"]
            if reference == "precomputed":
                for step in batches:
                    for batch, said in zip(step, engine.log_probabilities(step), strict=True):
                        batch["reference"] = said
            found = [engine.train_step(step, 1e-2) for step in batches]
            told = engine.eval_step(batches[0])
            state = torch.cat([p.detach().flatten() for p in engine._stages[0].parameters()])
            seen[reference] = [[(m.loss, m.grad_norm) for m in found], told.sums, state]
    assert seen["held"][0] == seen["precomputed"][0]
    assert seen["held"][1] == seen["precomputed"][1]
    assert torch.equal(seen["held"][2], seen["precomputed"][2])


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_an_engine_that_is_closed_has_no_memory_though_others_refer_to_it(zero: int) -> None:
    from rank_cases import job, micro_batches, workload_of

    with recorded(0, 2):
        group = dist.group.WORLD
        assert group is not None
        spec = job({"model": "gpt-tiny", "train": {"optimizer": {"name": "adamw", "lr": 1e-3}}})
        workload, layout = workload_of(spec), Layout(dp=2, zero=zero, micro_batch=2)
        engine = TorchEngine(spec, workload, layout, Device(torch.device("cpu"), torch.float32, group))
        engine.initialise(3)
        engine.train_step(micro_batches(workload, spec, layout, 0), 1e-3)
        held = {kind: list(tensors) for kind, tensors in engine.held().items()}
        kept = {t.untyped_storage().data_ptr() for tensors in held.values() for t in tensors}
        pieces = [piece.data for piece in engine.state() if piece.data.dim()]
        assert {t.untyped_storage().data_ptr() for t in pieces} <= kept  # a snapshot makes none of its own
        assert all(sum(t.untyped_storage().nbytes() for t in tensors) for tensors in held.values())
        engine.close()
    assert not sum(t.untyped_storage().nbytes() for tensors in held.values() for t in tensors)
