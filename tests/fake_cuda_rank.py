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
from unittest import mock

if sys.argv[1]:
    ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # before torch asks for the first time whether there is CUDA

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS / "dist" / "train"), str(TESTS.parent)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fake_cuda import DEVICE, fake_cuda  # noqa: E402
from rank_cases import LENGTH, job, micro_batches, workload_of  # noqa: E402

from orchestrator.config.spec import JobSpec, parse  # noqa: E402
from orchestrator.parallel.device import COMPUTE, Device, make_ready  # noqa: E402
from orchestrator.parallel.layout import Layout  # noqa: E402
from orchestrator.train.engines.torch_engine import TorchEngine  # noqa: E402
from workloads.model.masks import SEGMENTS, STARTS  # noqa: E402
from workloads.own.model import OwnWorkload, describe_own  # noqa: E402
from workloads.own.samples import OfSamples  # noqa: E402
from workloads.workload import Batch, Vocabulary, Workload  # noqa: E402


def pinned(batch: Batch) -> Batch:
    """With what `Device.pinned` adds, which tensors without memory do not say."""
    return batch | (
        {STARTS: torch.zeros(len(batch[SEGMENTS]), 4, dtype=torch.int32)} if SEGMENTS in batch else {}
    )


SIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
IMAGE = {"image_size": 8, "patch_size": 2, "num_channels": 1}
IMAGES: dict[str, dict[str, Any]] = {
    "workloads.vision.clip:Clip": {
        "text": {**SIDE, "vocab_size": 258, "max_position_embeddings": 8, "eos_token_id": 257},
        "vision": {**SIDE, **IMAGE},
        "projection_dim": 8,
    },
    "workloads.vision.mae:Mae": {**SIDE, **IMAGE, **{f"decoder_{key}": value for key, value in SIDE.items()}},
}
"""Models of images, with their sizes."""


def image_job(case: dict[str, Any]) -> tuple[JobSpec, Workload]:
    """The job of a case with a model of images, and its workload."""
    model = case["model"]
    spec = parse({
        "name": "images", "workload": {"model": model, "changes": IMAGES[model]},
        "data": {"samples": {"use": "orchestrator.data.images:Images", "options": {"uri": "none", "size": 8}}},
        "train": {"steps": 100, "global_batch": 8, **case["train"]},
    })  # fmt: skip
    config = describe_own(model, IMAGES[model], None)
    return spec, OwnWorkload(model, config, OfSamples(), Vocabulary(1, 0))


def image_batches(spec: JobSpec, layout: Layout) -> list[Batch]:
    """Micro-batches of made-up images with captions and random numbers."""
    size = layout.micro_batch
    batch = {"pixels": torch.randn(size, 1, 8, 8), "caption": torch.full((size, 8), 257)}
    batch |= {"noise": torch.rand(size, 16), "counted": torch.ones(size, dtype=torch.bool)}
    return [batch] * layout.accumulation(spec.train.global_batch)


def waits_of(case: dict[str, Any]) -> dict[str, list[str]]:
    """Where the host waits, on the last rank, in a step, in an evaluation and for a snapshot; after a first step."""
    layout, is_of_images = Layout(**case["layout"]), case["of"]["model"] in IMAGES
    if is_of_images:
        spec, workload = image_job(case["of"])
    else:
        spec = job(case["of"])
        workload = workload_of(spec)

    def batches(step: int) -> list[Batch]:
        made = image_batches(spec, layout) if is_of_images else micro_batches(workload, spec, layout, step)
        return list(map(pinned, made))

    moe = workload.config.moe
    rows = layout.micro_batch * LENGTH // layout.cp * (moe.top_k if moe else 0)
    found = {}
    with fake_cuda(layout.world - 1, layout.world, rows) as waits:
        group = dist.group.WORLD
        assert group is not None
        device = Device(DEVICE, COMPUTE[spec.train.precision], group)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent:
            engine = TorchEngine(spec.engine, workload, layout, device)
        connected = {call.kwargs["group"] for call in sent.call_args_list}
        mine = {each for ranks, each in engine.mesh._handles.items() if each and layout.world - 1 in ranks}
        assert connected == mine, "a communicator is left to the first message in it"
        engine.initialise(spec.seed)
        for step in range(2):
            waits.places.clear()
            engine.train_step(batches(step), spec.train.optimizer.lr)
            engine.clock.take()
        found["train"] = list(waits.places)
        waits.places.clear()
        engine.eval_step(batches(2))
        found["evaluate"] = list(waits.places)
        waits.places.clear()
        pieces = list(engine.state())
        homes = {piece.data.device.type for piece in pieces if piece.name.startswith("model.")}
        assert homes <= {"cuda" if layout.offload == "none" else "cpu"}, homes
        found["snapshot"] = list(waits.places)
        found["attention"] = sorted(waits.attention)
        of_host = {name for name, kind in waits.sent if kind != "cuda"} - {group.group_name}
        assert layout.offload != "none" or not of_host, "a group without gloo sends tensors of the host"
    return found


def main() -> None:
    """Run the cases of standard input, one after another; before them what a standby does."""
    torch.set_num_threads(1)
    with fake_cuda(0, 1):
        make_ready()
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
