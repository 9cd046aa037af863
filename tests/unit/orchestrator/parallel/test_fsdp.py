"""What ZeRO 3 keeps in memory and sends, seen on one rank of a group in which nothing is sent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rendezvous import recorded
from torch import Tensor

from orchestrator.parallel.device import COMPUTE, Device
from orchestrator.parallel.layout import Layout
from orchestrator.train.engines.torch_engine import TorchEngine

sys.path.append(str(Path(__file__).parents[3] / "dist" / "train"))


@pytest.mark.parametrize(
    ("precision", "sent"), [("bf16", torch.bfloat16), ("fp8", torch.bfloat16), ("fp32", torch.float32)]
)
def test_no_weight_of_a_block_outlives_it(
    precision: str, sent: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the forward pass no matrix of a block is left, in any type; and what is gathered is in the compute type."""
    from rank_cases import job, micro_batches, workload_of

    spec = job({"model": "gpt-tiny", "changes": {"layers": 4}, "train": {"precision": precision}})
    saved: list[Tensor] = []
    gathered: list[Tensor] = []
    gather = dist.all_gather_single
    monkeypatch.setattr(
        dist, "all_gather_single", lambda out, *a, **k: (gathered.append(out), gather(out, *a, **k))[1]
    )

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with recorded(0, 2):
        group = dist.group.WORLD
        assert group is not None
        device = Device(torch.device("cpu"), COMPUTE[precision], group)
        workload, layout = workload_of(spec), Layout(dp=2, zero=3, micro_batch=1)
        engine = TorchEngine(spec.engine, workload, layout, device)
        engine.initialise(0)
        gathered.clear()
        batches = micro_batches(workload, spec, layout, 0)
        engine.passes.losses.begin(batches)
        batch = engine.passes.losses.prepare(batches[0])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), engine._device.autocast():
            output = engine.parallel.stages[0](batch, in_chunks=engine.passes.losses.in_chunks(batch))
            loss = engine.passes.losses.of(output, batch, 1)
        shapes = {tuple(shape) for name, shape in workload.shapes.items() if ".attention." in name}
        matrices = [t for t in saved if {tuple(t.shape), tuple(t.shape)[::-1]} & shapes]
        assert matrices
        assert sum(t.untyped_storage().nbytes() for t in matrices) == 0
        loss.backward()
    assert sent in {t.dtype for t in gathered}


def test_initial_weights_are_the_same_by_any_number_of_threads() -> None:
    from rank_cases import job, workload_of

    spec, threads = job({"model": "gpt-tiny"}), torch.get_num_threads()
    found = []
    for count in (1, 4):
        torch.set_num_threads(count)
        try:
            with recorded(0, 1):
                group = dist.group.WORLD
                assert group is not None
                device = Device(torch.device("cpu"), torch.float32, group)
                engine = TorchEngine(spec.engine, workload_of(spec), Layout(micro_batch=1), device)
                engine.initialise(7)
                found.append({p.name: p.data.clone() for p in engine.state()})
        finally:
            torch.set_num_threads(threads)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
