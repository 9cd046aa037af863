"""Runs cases on CUDA tensors without memory, see `fake_cuda`, and prints for each where the host waits for the device.

    python tests/fake_cuda_rank.py LIBRARY < CASES

LIBRARY is made of fake_cuda.cpp; it is empty where torch has CUDA. A case has "of" (see `rank_cases.job`) and "layout".
"""

from __future__ import annotations

import ctypes
import json
import sys
import traceback
from pathlib import Path
from typing import Any

if sys.argv[1]:
    ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # before torch asks for the first time whether there is CUDA

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS / "dist" / "train"), str(TESTS.parent)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fake_cuda import DEVICE, fake_cuda  # noqa: E402
from rank_cases import LENGTH, job, micro_batches, workload_of  # noqa: E402

from orchestrator.planning.layout import Layout  # noqa: E402
from orchestrator.train.device import COMPUTE, Device  # noqa: E402
from orchestrator.train.engines.torch_engine import TorchEngine  # noqa: E402
from workloads.model.masks import SEGMENTS, STARTS  # noqa: E402
from workloads.workload import Batch  # noqa: E402


def pinned(batch: Batch) -> Batch:
    """With what `Device.pinned` adds, which tensors without memory do not say."""
    return batch | (
        {STARTS: torch.zeros(len(batch[SEGMENTS]), 4, dtype=torch.int32)} if SEGMENTS in batch else {}
    )


def waits_of(case: dict[str, Any]) -> dict[str, list[str]]:
    """Where the host waits, on the last rank, in a step, in an evaluation and for a snapshot; after a first step."""
    spec, layout = job(case["of"]), Layout(**case["layout"])
    workload = workload_of(spec)
    moe = workload.config.moe
    rows = layout.micro_batch * LENGTH * (moe.top_k if moe else 0)
    found = {}
    with fake_cuda(layout.world - 1, layout.world, rows) as waits:
        group = dist.group.WORLD
        assert group is not None
        device = Device(DEVICE, COMPUTE[spec.train.precision], group)
        engine = TorchEngine(spec, workload, layout, device)
        engine.initialise(spec.seed)
        for step in range(2):
            waits.places.clear()
            engine.train_step(
                list(map(pinned, micro_batches(workload, spec, layout, step))), spec.train.optimizer.lr
            )
            engine.clock.take()
        found["train"] = list(waits.places)
        waits.places.clear()
        engine.eval_step(list(map(pinned, micro_batches(workload, spec, layout, 2))))
        found["evaluate"] = list(waits.places)
        waits.places.clear()
        pieces = list(engine.state())
        homes = {piece.data.device.type for piece in pieces if piece.name.startswith("model.")}
        assert homes <= {"cuda" if layout.offload == "none" else "cpu"}, homes
        found["snapshot"] = list(waits.places)
        found["attention"] = sorted(waits.attention)
    return found


def main() -> None:
    """Run the cases of standard input, one after another."""
    torch.set_num_threads(1)
    found = {}
    for case in json.load(sys.stdin):
        try:
            found[case["id"]] = waits_of(case)
        except Exception:
            traceback.print_exc()
            sys.exit(f"{case['id']} failed")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
