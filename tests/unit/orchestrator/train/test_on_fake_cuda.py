"""The rank's step on CUDA tensors without memory: devices and types fit under every kind of layout and precision, and
the host waits for the device once a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.parallel.layout import SCHEDULES, Layout

TESTS = Path(__file__).parents[3]
EXPERTS = {"kv_heads": 2, "moe": {"experts": 4, "intermediate": 32}}
MODELS: dict[str, dict[str, Any]] = {
    "decoder": {"model": "gpt-tiny"},
    "modern": {"model": "qwen3-tiny", "changes": {"kv_heads": 2}},
    "wide": {"model": "gpt-tiny", "changes": {"hidden": 96, "intermediate": 320}},
    "moe": {"model": "mixtral-tiny", "changes": EXPERTS},
    "encoder": {"model": "bert-tiny", "objective": "masked_lm"},
    "documents": {"model": "qwen3-tiny", "changes": {"kv_heads": 2}, "options": {"documents": "isolate"}},
    "window": {"model": "qwen3-tiny", "changes": {"kv_heads": 2, "window": 8}},
    "clip": {"model": "workloads.vision.clip:Clip"},
    "mae": {"model": "workloads.vision.mae:Mae"},
}
SUMS = "losses.py:_sums"
"""Where a step waits: its loss, count, norm and the load of its routers, all at once."""
LAYERS = 2


def most_waits(case: dict[str, Any]) -> Counter[str]:
    """Of a step or an evaluation. An exchange of experts waits for its counts once a layer and micro-batch, and so does
    a product of experts where torch has no grouped kernel; a masked head for its labels, twice, and its backward
    pass."""
    layout, precision = Layout.from_json(case["layout"]), case["of"]["train"]["precision"]
    parts = layout.accumulation(8)
    waits = Counter({SUMS: 1})
    if "moe" in case["of"].get("changes", {}):
        layers = max(LAYERS, layout.stages)  # a stage has one at least
        forward = layers * parts // layout.pp * (1 if layout.recompute == "none" else 2)
        waits["expert.py:rows_by_rank"] = forward if layout.ep > 1 else 0
        waits["moe.py:rows_by_expert"] = forward if precision not in ("bf16", "fp8") else 0
    if case["of"].get("objective") == "masked_lm":
        waits |= Counter({"transformer.py:_headed": 2 * parts, "backward": 2 * parts})
    return waits


def case(model: str, precision: str = "bf16", optimizer: str = "adamw", **layout: Any) -> dict[str, Any]:
    """A model under a layout."""
    found = Layout(**{"micro_batch": 2, **layout})
    of = {**MODELS[model], "train": {"precision": precision, "optimizer": {"name": optimizer, "lr": 1e-3}}}
    return {"id": f"{model} {precision} {optimizer} {found}", "of": of, "layout": found.to_json()}


QUICK = [
    case("decoder", dp=4, zero=3, shard=2, micro_batch=1),
    case("moe", "fp16", dp=2, ep=2, recompute="full"),
    case("wide", optimizer="adamw_8bit", tp=2, dp=2, zero=1),
]
FULL = [
    case(model, precision, **layout)
    for model in ("decoder", "modern", "moe", "encoder")
    for precision in ("fp32", "bf16", "fp16", "fp8")
    for layout in (
        *({"dp": 2, "zero": zero} for zero in range(4)),
        *({"dp": 2, "zero": zero, "recompute": "full"} for zero in (1, 3)),
        {"tp": 2},
        {"tp": 2, "sequence": True, "dp": 2, "zero": 3},
        {"cp": 2, "zero": 3},
        {"dp": 4, "zero": 3, "shard": 2},
        *({"pp": 2, "schedule": schedule} for schedule in SCHEDULES),
        {"pp": 2, "dp": 2, "zero": 3, "schedule": "zero_bubble"},
        *([{"dp": 2, "ep": 2, "zero": 3}, {"dp": 4, "ep": 2, "zero": 3}] if model == "moe" else []),
    )
] + [case("decoder", optimizer=name, dp=2, zero=1) for name in ("lamb", "lion", "lars", "muon")]
FULL += [
    case("modern", tp=2, sequence=True),
    case("modern", "fp8", dp=2, zero=3, recompute="selective"),
    case("documents", cp=2),
    case("decoder", dp=2, zero=1, offload="optimizer"),
    case("window", dp=2, recompute="selective"),
]
FULL += [
    case(model, precision, **layout)
    for model in ("documents", "window")
    for precision in ("fp32", "bf16", "fp16")
    for layout in (
        {"dp": 2, "zero": 3},
        {"tp": 2},
        {"cp": 2},
        {"pp": 2, "schedule": "1f1b", "recompute": "full"},
    )
]


FULL += [
    case(model, precision, **layout)
    for model in ("clip", "mae")
    for precision in ("fp32", "bf16", "fp16")
    for layout in (
        {"dp": 2, "micro_batch": 4},
        {"dp": 2, "zero": 2, "recompute": "full"},
        {"dp": 4, "zero": 3, "shard": 2},
    )
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What stands in for CUDA's part of torch; not needed where torch has it."""
    if torch.version.cuda:
        return ""
    made, at = tmp_path_factory.mktemp("fake") / "fake_cuda.so", Path(torch.__file__).parent
    words = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{at}/include", str(TESTS / "fake_cuda.cpp")]
    words += ["-o", str(made), f"-L{at}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{at}/lib"]
    subprocess.run(words, check=True, timeout=120)
    return str(made)


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="a build with CUDA asks the driver, whatever is patched"
)
@pytest.mark.parametrize(
    "cases",
    [QUICK, pytest.param(FULL, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=["quick", "full"],
)
def test_a_step_fits_the_device_and_waits_for_it_once(cases: list[dict[str, Any]], library: str) -> None:
    done = subprocess.run(
        [sys.executable, str(TESTS / "fake_cuda_rank.py"), library],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len({one["id"] for one in cases})
    for each in cases:
        name, most = each["id"], most_waits(each)
        waits = found[name]
        for what in ("train", "evaluate"):
            assert Counter(waits[what]) <= most, f"{name}: {what}"
        assert waits["snapshot"] == [], name
        flash = name.startswith(("documents", "window")) and "fp32" not in name
        assert ("_varlen_attn" in waits["attention"]) == flash, name
