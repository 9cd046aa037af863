"""The precision of a job that leaves it open: the best by its objective of those in which it may train and fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.config.errors import InputError
from orchestrator.config.resources import ResourceSpec
from orchestrator.config.spec import JobSpec, parse
from orchestrator.planner.choose_layout import TIE
from orchestrator.planner.choose_precision import Choice, MachineOf, choose_precision, in_precision
from orchestrator.planner.demand import Demand, demand_of
from orchestrator.planner.device import Machine
from orchestrator.planner.device_profile import load
from orchestrator.planner.memory import MEMORY_SHARE
from orchestrator.planner.planner import planned
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.train.config import Precision
from workloads.describe import describe

SHAPES = {name: model_shape(describe(name), 1024) for name in ("gpt2", "llama-3.2-1b")}


def job(model: str = "gpt2", gpu: int = 1, resources: dict[str, Any] | None = None, **train: Any) -> JobSpec:
    return parse(
        {
            "name": "open",
            "workload": {"model": model},
            "data": {"sources": [{"uri": "a"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 1024},
            "train": {"steps": 100, "global_batch": 64, "precision": "auto", **train},
            "resources": {"workers": {"min": 1, "max": 8}, "per_worker": {"gpu": gpu}, **(resources or {})},
        }
    )


def on(device: str, **changes: Any) -> MachineOf:
    return lambda _, precision: replace(load(device).machine(precision), **changes)


def choose(spec: JobSpec, machine_of: MachineOf) -> Choice:
    def demand_in(precision: Precision) -> Demand:
        return demand_of(spec.with_parts(train=in_precision(spec.train, precision)))

    return choose_precision(demand_in, SHAPES[spec.workload.model], machine_of)


def test_the_fastest_wins_and_what_is_chosen_is_what_each_would_be_if_it_were_named() -> None:
    spec, h100 = job(), on("h100")
    found = choose(spec, h100)
    assert found.precision == "bf16"
    assert [precision for precision, _ in found.plans] == ["fp32", "bf16"]
    for precision, plan in found.plans:
        there = spec.with_parts(train=in_precision(spec.train, precision))
        assert (
            plan.chosen
            == planned(demand_of(there), SHAPES["gpt2"], 8, h100(there.resources, precision)).chosen
        )
    fp32, bf16 = (plan.chosen.seconds for _, plan in found.plans)
    assert str(found) == f"bf16: {bf16:.3g} s per step, fp32 {fp32:.3g} s per step"
    assert found.to_json()["why"] == str(found)
    assert [each["precision"] for each in found.to_json()["candidates"]] == ["fp32", "bf16"]


def test_of_some_that_are_equally_fast_the_widest_is_taken() -> None:
    """Bound by its links, a step is as long in every precision whose messages are."""
    slow = on("h100", full_flops=9.8e14, memory_bandwidth=1e15)
    found = choose(job(), slow)
    fp32, bf16 = (plan.chosen.seconds for _, plan in found.plans)
    assert bf16 < fp32 <= bf16 * (1 + TIE)
    assert (found.precision, found.equal) == ("fp32", ("fp32", "bf16"))
    assert str(found).endswith("which counts as equal")


def test_fp16_is_for_devices_without_bf16_of_their_own() -> None:
    found = choose(job(), on("t4"))
    assert found.precision == "fp16"
    assert [precision for precision, _ in found.plans] == ["fp32", "bf16", "fp16"]
    unknown = choose(job(), on("t4", stands_for="a GPU without a name"))
    assert "fp16" not in dict(unknown.plans)
    assert "fp16" not in dict(choose(job(gpu=0), on("cpu-core", flops=1e10)).plans)


def test_a_rule_that_a_named_precision_would_break_removes_it_and_is_told() -> None:
    found = choose(job(freeze=["*embedding*"], thaw={10: ["*embedding*"]}), on("t4"))
    assert "fp16" not in dict(found.plans)
    assert found.precision in ("fp32", "bf16")
    ((precision, reason),) = found.rejected
    assert precision == "fp16"
    assert reason.startswith("thaw counts the updates of each parameter, but fp16 skips some")
    assert str(found).endswith(f"; fp16: {reason}")
    assert found.to_json()["rejected"] == [{"precision": "fp16", "reason": reason}]


def test_what_fits_comes_before_what_is_fast() -> None:
    """A machine that is as fast in fp32, which would be taken, with memory for bf16 alone."""
    fast = on("h100", full_flops=9.8e14, memory_bandwidth=1e15)
    roomy = choose(job("llama-3.2-1b"), fast)
    assert roomy.precision == "fp32"
    pinned = {"zero": 3, "micro_batch": 8, "recompute": "none"}
    spec = parse({**job("llama-3.2-1b").model_dump(mode="json"), "parallel": pinned})
    fp32, bf16 = (plan.chosen.memory for _, plan in choose(spec, fast).plans)
    assert bf16 < 0.9 * fp32
    small = (fp32 + bf16) / 2 / MEMORY_SHARE
    found = choose(spec, on("h100", full_flops=9.8e14, memory_bandwidth=1e15, memory=small))
    assert (found.precision, [plan.fits for _, plan in found.plans]) == ("bf16", [False, True])
    assert "fp32 needs" in str(found)
    assert "a worker offers" in str(found)


def test_where_none_fits_that_is_taken_which_needs_least() -> None:
    spec = job("llama-3.2-1b")
    found = choose(spec, on("h100", memory=1e9))
    assert [plan.fits for _, plan in found.plans] == [False, False]
    assert found.precision == min(found.plans, key=lambda each: each[1].chosen.memory)[0]


def test_on_a_processor_it_is_as_the_profile_has_it_for_each_precision() -> None:
    asked = []

    def machine_of(_: ResourceSpec, precision: Precision) -> Machine:
        asked.append(precision)
        return load("cpu-core").machine(precision)

    assert choose(job(gpu=0), machine_of).precision == "bf16"
    assert sorted(asked) == ["bf16", "fp32"]
    assert choose(job(gpu=0), on("cpu-core", flops=2e10)).precision == "fp32"


def test_the_objective_decides() -> None:
    """By cost, what takes least of all workers' time, though it may take longer."""
    for objective in ("time", "cost"):
        found = choose(job("llama-3.2-1b", resources={"objective": objective}), on("a100-80-fused"))
        by = {precision: plan.chosen for precision, plan in found.plans}
        weight = {
            each: best.seconds * (best.layout.world if objective == "cost" else 1)
            for each, best in by.items()
        }
        assert weight[found.precision] == min(weight.values())


def test_a_job_without_a_legal_layout_is_refused_as_if_it_named_one() -> None:
    spec = parse({**job(global_batch=3).model_dump(mode="json"), "parallel": {"tp": 5}})
    with pytest.raises(InputError) as named:
        planned(
            demand_of(spec.with_parts(train=in_precision(spec.train, "fp32"))),
            SHAPES["gpt2"],
            8,
            on("h100")(spec.resources, "fp32"),
        )
    with pytest.raises(InputError) as refused:
        choose(spec, on("h100"))
    assert str(refused.value) == str(named.value)


def test_a_job_that_leaves_it_open_tells_no_precision() -> None:
    with pytest.raises(RuntimeError, match="auto has not been replaced"):
        _ = job().train.dtype
    assert in_precision(job().train, "bf16").dtype == "bf16"
    assert in_precision(job().train, "bf16") == job(precision="bf16").train
