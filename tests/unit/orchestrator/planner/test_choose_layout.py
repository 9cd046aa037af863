"""The choice of a layout: what is rejected and why, what is predicted, what is chosen."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.choose_layout import plan, predict
from orchestrator.planner.demand import Demand, demand_of
from orchestrator.planner.device import Machine
from orchestrator.planner.device_profile import load
from orchestrator.planner.memory import MEMORY_SHARE, peak_bytes
from orchestrator.planner.planner import Planner
from orchestrator.planner.search import TIE
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.planner.simulation.step import DEEPSPEED_SLOWDOWN
from workloads.describe import describe

TINY = ModelShape(
    parameters=100_000, layers=2, hidden=32, heads=4, kv_heads=4, feedforward=64, vocabulary=512,
    sequence_length=32, flops_per_token=6e5,
)  # fmt: skip
ROOMY = Machine(memory=64e9, flops=1e12)
PAPER = 7_500_000_000
"""Parameters of the example in figure 1 of the ZeRO paper, on 64 ranks."""


def job(batch: int = 8, parallel: Any = "auto", **train: Any) -> JobSpec:
    return parse(
        {
            "name": "cases",
            "workload": {"model": "gpt-tiny"},
            "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 32},
            "train": {"steps": 100, "global_batch": batch, **train},
            "parallel": parallel,
            "resources": {"workers": {"min": 1, "max": 64}},
        }
    )


# -- what is predicted


@pytest.mark.parametrize(
    ("zero", "gigabytes"),
    [
        (0, 16 * 7.5),  # 4 bytes of weights, 4 of gradients, 8 of Adam's two moments
        (1, 8 * 7.5 + 8 * 7.5 / 64),
        (2, 4 * 7.5 + 12 * 7.5 / 64),
        (3, 16 * 7.5 / 64 + 4 * 7.5 / 2),  # 1.9 GB, as the paper says, and one of two layers whole
    ],
)
def test_model_states_are_those_of_the_zero_paper(zero: int, gigabytes: float) -> None:
    large = dataclasses.replace(TINY, parameters=PAPER)
    found = predict(demand_of(job(128)), large, Layout(dp=64, zero=zero), ROOMY)
    assert found.memory == pytest.approx(gigabytes * 1e9, rel=0.01)


@pytest.mark.parametrize(("zero", "offload"), [(0, "none"), (1, "none"), (3, "none"), (2, "optimizer")])
def test_a_moving_average_is_kept_where_the_optimiser_state_is(zero: int, offload: str) -> None:
    plain, layout = job(64), Layout(dp=64, zero=zero, offload=offload)
    averaged = plain.model_copy(
        update={"checkpoint": CheckpointSpec.model_validate({"average": {"ema": 0.9}})}
    )
    large = dataclasses.replace(TINY, parameters=PAPER)
    more = (
        predict(demand_of(averaged), large, layout, ROOMY).memory
        - predict(demand_of(plain), large, layout, ROOMY).memory
    )
    assert more == pytest.approx(0 if offload != "none" else 4 * PAPER / (64 if zero else 1))


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)])
def test_model_states_are_divided_over_tensor_and_pipeline_ranks(layout: Layout) -> None:
    large = dataclasses.replace(TINY, parameters=PAPER)
    assert predict(demand_of(job()), large, layout, ROOMY).memory == pytest.approx(8 * 7.5e9, rel=0.01)


def predicted(layout: Layout, **train: Any) -> tuple[float, float]:
    found = predict(demand_of(job(64, **train)), TINY, layout, ROOMY)
    return found.memory, found.seconds


def test_larger_micro_batches_take_more_memory_and_no_more_time() -> None:
    found = [predicted(Layout(micro_batch=size)) for size in (1, 2, 4, 8)]
    assert found == sorted(found, key=lambda pair: pair[0])
    assert found == sorted(found, key=lambda pair: -pair[1])


def test_a_head_holds_the_logits_of_some_tokens_and_the_gradient_of_its_weight() -> None:
    large = dataclasses.replace(TINY, vocabulary=10**6, layers=0)
    whole = dataclasses.replace(large, chunked_head=False)
    of = [predict(demand_of(job(64)), large, Layout(micro_batch=size), ROOMY).memory for size in (8, 64)]
    assert of[0] == of[1]  # 8 x 32 tokens are a chunk
    states = 16 * TINY.parameters
    assert of[0] - states == 4e6 * (3 * 256 + TINY.hidden)
    assert predict(demand_of(job(64)), whole, Layout(micro_batch=64), ROOMY).memory - states == 4e6 * 3 * 2048


def test_recomputation_buys_memory_with_time() -> None:
    whole, again = (predicted(Layout(micro_batch=64, recompute=how)) for how in ("none", "full"))
    assert again[0] < whole[0]
    assert again[1] > whole[1]


def test_half_the_bytes_take_less_memory() -> None:
    layout = Layout(micro_batch=64)
    assert predicted(layout, precision="bf16")[0] < predicted(layout, precision="fp32")[0]


def test_more_ranks_and_faster_machines_take_less_time() -> None:
    heavy = dataclasses.replace(TINY, flops_per_token=6e9)
    seconds = [predict(demand_of(job(64)), heavy, Layout(dp=width), ROOMY).seconds for width in (1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)
    fast = predict(demand_of(job(64)), heavy, Layout(), dataclasses.replace(ROOMY, flops=2e12)).seconds
    assert fast < seconds[0]


# -- what is refused


def refusal(parallel: Any, workers: int, batch: int = 8, machine: Machine = ROOMY) -> str:
    with pytest.raises(InputError) as found:
        plan(demand_of(job(batch, parallel)), TINY, workers, machine)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_a_tensor_degree_that_divides_no_heads_is_refused_with_the_mend() -> None:
    line = refusal({"tp": 3}, 3)
    assert line.startswith("parallel: tp 3 does not divide the model's 4 attention heads")
    assert "choose tp from 1, 2, 4" in line


def test_more_stages_than_layers_are_refused() -> None:
    line = refusal({"pp": 4}, 4)
    assert "pp 4" in line
    assert "choose pp up to 2" in line


def test_what_is_near_is_what_the_job_can_run() -> None:
    """Its engine and its options too: on a CPU nothing is offloaded."""
    line = refusal({"zero": 1, "offload": "optimizer"}, 2)
    assert "set offload to none; the nearest legal layouts are dp2 zero1" in line
    assert "offload-optimizer" not in line


def test_experts_that_the_model_has_not_are_refused() -> None:
    assert "needs experts, but this model is dense" in refusal({"ep": 2}, 2)


@pytest.mark.parametrize("parallel", [{"tp": 4}, {"pp": 2, "tp": 2}])
def test_a_replica_that_needs_more_workers_than_there_are_is_refused(parallel: dict[str, int]) -> None:
    assert Planner(demand_of(job(parallel=parallel)), TINY, ROOMY).choose(2) is None
    assert refusal(parallel, 2)


def test_a_model_that_fits_nowhere_is_refused_with_the_numbers() -> None:
    small = Machine(memory=1e6, flops=1e12)
    for parallel in ({"zero": 0}, "auto"):
        line = refusal(parallel, 1, machine=small)
        assert "GiB per rank, but a worker offers 0.00 GiB" in line
        assert line.startswith("parallel: ")


def test_what_need_not_fit_is_predicted_and_said_not_to() -> None:
    small = Machine(memory=1e6, flops=1e12)
    found = plan(demand_of(job(parallel={"zero": 0})), TINY, 1, small, must_fit=False)
    assert not found.fits
    assert found.to_json()["predicted"]["fits"] is False
    assert plan(demand_of(job()), TINY, 1, ROOMY).fits


def test_a_layout_just_fits() -> None:
    need = predict(demand_of(job()), TINY, Layout(micro_batch=1), ROOMY).memory
    by_hand = {"micro_batch": 1}
    assert (
        plan(
            demand_of(job(parallel=by_hand)), TINY, 1, Machine(need / MEMORY_SHARE * 1.001, 1e12)
        ).chosen.memory
        == need
    )
    assert (
        Planner(demand_of(job(parallel=by_hand)), TINY, Machine(need / MEMORY_SHARE * 0.999, 1e12)).choose(1)
        is None
    )


# -- what is chosen


@settings(max_examples=50, deadline=None)
@given(workers=st.integers(1, 12), batch=st.integers(1, 48), spare=st.floats(1.01, 20.0))
def test_the_choice_is_the_fastest_of_what_is_legal_and_fits(workers: int, batch: int, spare: float) -> None:
    spec = job(batch)
    memory = predict(demand_of(spec), TINY, Layout(), ROOMY).memory * spare / MEMORY_SHARE
    found = plan(demand_of(spec), TINY, workers, Machine(memory, 1e12))
    assert found.chosen in found.candidates
    assert found.chosen.seconds <= min(c.seconds for c in found.candidates) * (1 + TIE)
    layouts = [c.layout for c in found.candidates]
    assert len(set(layouts)) == len(layouts)
    assert set(layouts).isdisjoint({layout for layout, _ in found.rejected})
    for candidate in found.candidates:
        layout = candidate.layout
        assert layout.problems(TINY, batch) == []
        assert layout.world <= workers
        rows = layout.micro_batch * layout.accumulation(batch)
        assert batch <= layout.dp * rows < batch + layout.dp * layout.micro_batch
        assert candidate.memory <= memory * MEMORY_SHARE
    assert all(reason for _, reason in found.rejected)
    assert found.tokens == batch * 32


def test_more_workers_never_make_it_slower() -> None:
    heavy = dataclasses.replace(TINY, flops_per_token=6e9)
    seconds = [plan(demand_of(job(48)), heavy, workers, ROOMY).chosen.seconds for workers in range(1, 13)]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("by_hand", [{"zero": 0}, {"zero": 0, "micro_batch": 2, "recompute": "none"}, {}])
def test_a_batch_that_does_not_divide_uses_the_workers_that_make_a_step_shorter(
    by_hand: dict[str, Any],
) -> None:
    heavy = dataclasses.replace(TINY, flops_per_token=6e9)

    def width(batch: int, workers: int, shape: ModelShape = heavy) -> int:
        return plan(demand_of(job(batch, by_hand or "auto")), shape, workers, ROOMY).chosen.layout.dp

    assert width(8, 3) == 3  # 3 samples at most, where two ranks have 4
    assert width(8, 5) == 4  # 2 samples at most under both
    assert width(64, 15) == 15
    assert width(64, 15, dataclasses.replace(heavy, even_shares="it compares")) == 8


def test_less_memory_means_smaller_micro_batches() -> None:
    need = [predict(demand_of(job()), TINY, Layout(micro_batch=size), ROOMY).memory for size in (1, 8)]
    tight = Machine((need[0] + 1) / MEMORY_SHARE, 1e12)
    assert plan(demand_of(job()), TINY, 1, tight).chosen.layout.micro_batch == 1
    assert plan(demand_of(job()), TINY, 1, ROOMY).chosen.layout.micro_batch == 8


def test_a_layout_by_hand_is_taken_as_it_is() -> None:
    found = plan(demand_of(job(parallel={"micro_batch": 2})), TINY, 4, ROOMY)
    assert [c.layout for c in found.candidates] == [Layout(dp=4, micro_batch=2)]
    assert found.chosen.layout == Layout(dp=4, micro_batch=2)


def test_the_chooser_has_no_answer_where_there_is_none() -> None:
    assert Planner(demand_of(job()), TINY, ROOMY).choose(0) is None
    assert Planner(demand_of(job(parallel={"tp": 3})), TINY, ROOMY).choose(3) is None
    assert Planner(demand_of(job()), TINY, Machine(1e6, 1e12)).choose(2) is None
    assert (
        Planner(demand_of(job()), TINY, ROOMY).choose(2)
        == plan(demand_of(job()), TINY, 2, ROOMY).chosen.layout
    )


# -- engines and offload


def gpu_job(batch: int = 8, **parallel: Any) -> JobSpec:
    document = job(batch, parallel or "auto").model_dump(mode="json")
    document["resources"]["per_worker"]["gpu"] = 1
    return parse(document)


def test_where_both_engines_fit_torch_is_chosen() -> None:
    found = plan(demand_of(job()), TINY, 2, ROOMY)
    assert found.chosen.layout.engine == "torch"
    for zero, price in DEEPSPEED_SLOWDOWN.items():
        ours, theirs = (
            predict(demand_of(job()), TINY, Layout(dp=2, zero=zero, micro_batch=4, engine=engine), ROOMY).time
            for engine in ("torch", "deepspeed")
        )
        assert theirs.seconds == pytest.approx(price * ours.seconds)


def test_what_fits_no_device_is_offloaded_and_all_of_it_by_deepspeed_alone() -> None:
    large = dataclasses.replace(TINY, parameters=10**9)
    sizes = {"all on the device": 24e9, "optimizer": 12e9, "parameters": 3e9}
    found = {
        name: plan(demand_of(gpu_job()), large, 1, Machine(size, 1e12)).chosen.layout
        for name, size in sizes.items()
    }
    assert (found["all on the device"].offload, found["all on the device"].engine) == ("none", "torch")
    assert found["optimizer"].offload == "optimizer"
    assert (found["parameters"].offload, found["parameters"].engine) == ("parameters", "deepspeed")
    with pytest.raises(InputError, match="no legal layout"):
        plan(demand_of(job()), large, 1, Machine(sizes["optimizer"], 1e12))


def test_what_deepspeed_does_not_train_is_not_planned_for_it() -> None:
    found = plan(demand_of(job(optimizer={"name": "lion"})), TINY, 2, ROOMY)
    assert {c.layout.engine for c in found.candidates} == {"torch"}


def test_deepspeed_keeps_a_second_copy_of_the_weights_it_updates() -> None:
    large = dataclasses.replace(TINY, parameters=10**9)
    ours, theirs = (
        predict(demand_of(job()), large, Layout(dp=2, zero=2, engine=e), ROOMY).memory
        for e in ("torch", "deepspeed")
    )
    assert theirs - ours == pytest.approx(4e9 / 2)


# -- what is written


def test_a_plan_as_json() -> None:
    found = plan(demand_of(job()), TINY, 2, ROOMY)
    document = json.loads(json.dumps(found.to_json()))
    assert set(document) == {"chosen", "predicted", "machine", "candidates", "rejected", "passed_over"}
    chosen = dict(document["chosen"])
    assert chosen.pop("text") == str(found.chosen.layout)
    assert Layout.from_json(chosen) == found.chosen.layout
    (needed,) = found.needed
    assert needed > found.chosen.memory  # of a process on a CPU
    assert document["predicted"]["memory_bytes"] == round(needed)
    assert document["predicted"]["memory_bytes_by_rank"] == [round(needed)] * found.chosen.layout.world
    assert document["predicted"]["step_seconds"] == found.chosen.seconds
    assert document["predicted"]["tokens_per_second"] == pytest.approx(8 * 32 / found.chosen.seconds)
    parts = document["predicted"]["seconds_by_part"]
    assert sum(parts.values()) - parts["commit"] == pytest.approx(found.chosen.seconds)
    assert (
        document["predicted"]["peak_bytes_by_rank"]
        == [round(found.chosen.memory)] * found.chosen.layout.world
    )
    assert document["machine"] == {
        "name": "",
        "memory_bytes": 64_000_000_000,
        "flops_per_second": 1_000_000_000_000,
    }
    assert document["candidates"][0]["layout"] == str(found.chosen.layout)
    assert all(set(c) == {"layout", "memory_bytes", "step_seconds"} for c in document["candidates"])
    assert all(set(r) == {"layout", "reason"} for r in document["rejected"])


# -- models


def test_the_shape_of_a_published_model() -> None:
    shape = model_shape(describe("gpt2"), 1024)
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads) == (12, 768, 12, 12)
    assert (shape.feedforward, shape.vocabulary, shape.sequence_length) == (3072, 50257, 1024)
    assert shape.parameters == 124_439_808  # as transformers counts GPT2LMHeadModel
    assert shape.experts == 0
    assert 6 * 85e6 < shape.flops_per_token < 8 * 124e6


def test_the_shape_of_a_model_with_grouped_heads_and_experts() -> None:
    assert model_shape(describe("llama-3-8b"), 128).kv_heads == 8
    assert model_shape(describe("mixtral-8x7b"), 128).experts == 8


def test_a_number_of_workers_is_planned_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller asks at every look while there is room for more."""
    asked: list[int] = []

    def counted(demand: Demand, shape: ModelShape, workers: int, *rest: Any, **keywords: Any) -> Any:
        asked.append(workers)
        return plan(demand, shape, workers, *rest, **keywords)

    monkeypatch.setattr("orchestrator.planner.planner.plan", counted)
    planner = Planner(demand_of(job()), TINY, ROOMY)
    first = [planner.choose(workers) for workers in (0, 1, 2)]
    assert [planner.choose(workers) for workers in (0, 1, 2)] == first
    assert asked == [1, 2]


def test_a_pinned_layout_takes_a_micro_batch_that_fits_and_if_none_does_that_which_needs_least() -> None:
    spec = parse(
        {
            "name": "a",
            "workload": {"model": "llama-3-8b"},
            "data": {"sources": [{"uri": "a"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 4096},
            "train": {"steps": 1, "global_batch": 64, "precision": "bf16"},
            "resources": {"per_worker": {"gpu": 1}},
            "parallel": {"tp": 8},
        }
    )
    shape, machine = model_shape(describe("llama-3-8b"), 4096), load("h100").machine("bf16")
    fitting = plan(demand_of(spec), shape, 8, machine, must_fit=False)
    assert fitting.fits
    assert fitting.chosen.layout.micro_batch < 64
    none = plan(demand_of(spec), shape, 8, dataclasses.replace(machine, memory=1e10), must_fit=False)
    assert (none.fits, none.chosen.layout.micro_batch) == (False, 1)


def test_what_is_offloaded_has_to_fit_the_host_too() -> None:
    shape, spec = model_shape(describe("llama-3-70b"), 512), parse(
        {
            "name": "a",
            "workload": {"model": "llama-3-70b"},
            "data": {"sources": [{"uri": "a"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 512},
            "train": {"steps": 1, "global_batch": 8, "precision": "bf16"},
            "resources": {"per_worker": {"gpu": 1}},
        }
    )  # fmt: skip
    machine = load("a100-80").machine("bf16")
    with pytest.raises(InputError, match="no legal layout"):
        plan(demand_of(spec), shape, 2, machine)
    found = plan(demand_of(spec), shape, 2, dataclasses.replace(machine, host_memory=2e12)).chosen.layout
    assert found.offload != "none"
    assert plan(demand_of(spec), shape, 2, machine, must_fit=False).chosen.layout.offload == "none"


# -- why there is none


@pytest.mark.parametrize(
    ("pins", "workers", "said"),
    [
        ({"tp": 2, "engine": "deepspeed"}, 4, "DeepSpeed engine is data parallel only, but tp is 2"),
        ({"pp": 2, "tp": 4}, 4, "needs 8 workers of 4"),
        ({"tp": 1, "sequence": True}, 2, "sequence parallelism needs tp above 1"),
        ({"pp": 1, "virtual": 3}, 2, "virtual 3 is for pipelines"),
        ({"recompute": "none", "recompute_layers": 1}, 1, "recompute is none"),
    ],
)
def test_pins_that_exclude_each_other_are_named(pins: dict[str, Any], workers: int, said: str) -> None:
    assert said in refusal({"rest": "auto", **pins}, workers)


def test_what_does_not_fit_is_not_recommended_either() -> None:
    spec, shape = job(parallel={"zero": 0}), dataclasses.replace(TINY, parameters=10**9)
    least, most = (
        peak_bytes(demand_of(spec), shape, Layout(dp=2, zero=zero, micro_batch=1)) for zero in (3, 0)
    )
    machine = dataclasses.replace(ROOMY, memory=(least + 0.1 * (most - least)) / MEMORY_SHARE)
    with pytest.raises(InputError, match=r"needs .* GiB per rank") as error:
        plan(demand_of(spec), shape, 2, machine)
    hint = str(error.value)
    assert "the nearest layouts that fit are" in hint
    assert "zero0" not in hint.split("that fit are")[1]


def test_as_many_workers_are_used_as_the_job_wants_at_least() -> None:
    """Nine samples divide over three replicas; four workers can share the columns of the model."""
    few = job(9)
    assert plan(demand_of(few), TINY, 4, ROOMY).chosen.layout.world == 3
    resources = few.resources.model_copy(
        update={"workers": few.resources.workers.model_copy(update={"min": 4, "max": 4})}
    )
    all_four = few.model_copy(update={"resources": resources})
    assert plan(demand_of(all_four), TINY, 4, ROOMY).chosen.layout.world == 4
    assert plan(demand_of(all_four), TINY, 3, ROOMY).chosen.layout.world == 3
    whole = dataclasses.replace(TINY, no_model_split="it is whole")
    with pytest.raises(InputError, match="no legal layout uses 4 workers; the widest is dp3"):
        plan(demand_of(all_four), whole, 4, ROOMY)
