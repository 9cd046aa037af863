"""Traces of the engine's own step: what is held, what is sent, and that they are always the same."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from traced_cases import case_of, job_of, trace, traces, workload_of

from orchestrator.parallel.layout import Layout
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device import Machine
from orchestrator.planner.memory import peak_bytes
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.planner.step_trace import CATEGORIES, Memory, NotTraced, StepTrace, Wait
from orchestrator.planner.trace.isolation import fake_ranks
from orchestrator.planner.trace.layer_extrapolation import extrapolated_depth, shallow_models
from orchestrator.planner.trace.layout_memory import TracedMemory, micro_batches_of, with_all_micro_batches
from orchestrator.planner.trace.messages import Messages
from orchestrator.planner.trace.op_cache import CachedOperators, effect_of
from orchestrator.planner.trace.recorder import Recorder
from orchestrator.resolve.resolved_job import ResolvedJob
from workloads.workload import Workload


def traced(layout: dict[str, Any], rank: int = 0, **train: Any) -> StepTrace:
    """A trace of a small decoder, made once."""
    return _traced(json.dumps([layout, rank, train]))


@functools.cache
def _traced(asked: str) -> StepTrace:
    return traced_anew(*json.loads(asked))


def traced_anew(layout: dict[str, Any], rank: int, train: dict[str, Any]) -> StepTrace:
    """A trace of a small decoder."""
    case = case_of(0)
    workload = _small(case, train)
    found = trace(job_of(case), workload, Layout(**{"micro_batch": 1, **layout}), rank)
    assert isinstance(found, StepTrace), found
    return found


def _small(case: dict[str, Any], train: dict[str, Any]) -> Workload:
    """The case with a job that trains a small decoder, and its workload."""
    case["job"]["workload"] = {
        "model": "gpt-tiny",
        "changes": {"hidden": 32, "heads": 4, "intermediate": 64, "layers": 2, "max_positions": 64},
        "objective": "causal_lm",
    }
    case["job"]["data"] |= {"sequence_length": 32, "labels": []}
    case["job"]["checkpoint"] = {}
    case["job"]["train"] = {"steps": 2, "global_batch": 4, **train}
    return workload_of(case)


def test_weights_gradients_and_state_are_those_of_the_layout() -> None:
    alone, sharded = traced({}).memory.steady, traced({"dp": 2, "zero": 1}).memory.steady
    assert alone["gradients"] == alone["weights"]
    assert (
        alone["weights"] * 2 <= alone["optimizer"] < alone["weights"] * 2.01
    )  # two slots, and counts of steps
    assert sharded["weights"] == alone["weights"]
    assert sharded["optimizer"] < 0.51 * alone["optimizer"]
    full = traced({"dp": 2, "zero": 3}).memory
    assert full.steady["weights"] < 0.51 * alone["weights"]
    assert full.at_peak["communication"] > 0


@pytest.mark.slow
def test_moments_in_8_bits_are_held_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.optim.blocks.MIN_NUMBERS", 1000)
    for layout in ({}, {"tp": 2, "dp": 2, "zero": 1}):
        alone, in_8_bits = (
            traced(layout, optimizer={"name": name, "lr": 1e-3}).memory.steady["optimizer"]
            for name in ("adamw", "adamw_8bit")
        )
        assert 0.2 * alone < in_8_bits < 0.6 * alone  # embeddings have 8 bytes a number


def test_the_parts_at_the_peak_are_the_peak() -> None:
    for layout in ({}, {"pp": 2}, {"dp": 2, "zero": 3}):
        memory = traced(layout).memory
        assert sum(memory.at_peak.values()) == memory.peak
        assert memory.phase == "backward"


@pytest.mark.parametrize(
    ("layout", "gathered", "summed"),
    [
        ({"dp": 2, "zero": 1}, 1, 1),
        ({"dp": 2, "zero": 2}, 1, 2),
        ({"dp": 2, "zero": 3}, 4, 2),
        ({"dp": 2, "pp": 2, "zero": 2}, 1, 1),
    ],
    ids=str,
)
def test_how_often_a_step_of_two_micro_batches_gathers_weights_and_sums_gradients(
    layout: dict[str, Any], gathered: int, summed: int
) -> None:
    """Torch's pipelines sum once, and need memory for whole gradients; without one ZeRO 2 and 3 sum what they have."""
    found = traced(layout)
    weights = traced({"pp": layout.get("pp", 1)}).memory.steady["weights"]
    bytes_of: dict[str, int] = {}
    for each in found.collectives:
        bytes_of[each.message] = bytes_of.get(each.message, 0) + (each.bytes if each.axis == "data" else 0)
    # ZeRO 1 does without those of gloo that make copies.
    gathers, sums = ("broadcast", "all_reduce") if layout["zero"] == 1 else ("all_gather", "reduce_scatter")
    assert round(bytes_of[gathers] / weights, 1) == gathered
    assert round(bytes_of[sums] / weights, 1) == summed


@pytest.mark.slow
def test_in_a_pipeline_sharded_gradients_need_what_whole_ones_need() -> None:
    """By the trace, and by the formula that a search goes by."""
    case, train = case_of(0), {"global_batch": 16}
    workload, spec = _small(case, train), job_of(case)
    shape = model_shape(workload.config, 32)
    layouts = [{"dp": 8, "pp": 2, "zero": zero} for zero in (1, 2, 3)]
    found = [traced(layout, **train).memory.peak for layout in layouts]
    planned = [peak_bytes(demand_of(spec), shape, Layout(**layout)) for layout in layouts]
    for peaks in (found, planned):
        assert min(peaks[1:]) > 0.7 * peaks[0]


def test_recomputation_keeps_less() -> None:
    assert traced({"recompute": "full"}).memory.peak < traced({}).memory.peak


def test_a_trace_is_always_the_same() -> None:
    assert traced({"pp": 2}) == traced_anew({"pp": 2}, 0, {})


@pytest.mark.slow
def test_a_trace_remembers_nothing_of_the_groups_before() -> None:
    """Two ranks of one group each: torch keeps, for equal meshes, what operators on sharded parameters give."""
    traced_anew({"dp": 2, "zero": 3, "pp": 2, "schedule": "gpipe"}, 0, {})
    traced_anew({"cp": 2, "zero": 2}, 0, {})


def test_messages_name_their_group_and_what_waits_for_them() -> None:
    found = traced({"dp": 2, "tp": 2, "zero": 1}, 1)
    axes = {(c.message, c.axis) for c in found.collectives}
    assert {("all_reduce", "tp"), ("all_reduce", "data"), ("broadcast", "data")} <= axes
    piped = traced({"pp": 2})
    # Those at the end of the step, along the tree of ranks, are waited for by the call itself.
    sent = [c for c in piped.collectives if c.message in ("send", "receive") and c.phase != "optimizer"]
    assert {c.peer for c in sent} == {1}
    assert {c.number for c in sent} == {e.number for e in piped.events if isinstance(e, Wait)}


def test_a_rank_that_is_traced_counts_where_another_could_not_be() -> None:
    one = traced({"pp": 2})
    some = TracedMemory(Layout(pp=2), (one, NotTraced(1, "there is no time")), 0.0)
    assert some.largest is None
    assert some.needed(1.0, False) == one.memory.peak
    assert some.needed(2.0 * one.memory.peak, False) == 2.0 * one.memory.peak
    small = Machine(memory=float(one.memory.peak), flops=1e12)
    predicted, _ = some.replaced_memory([1.0, 1.0], 1.0, small, False)
    assert predicted == {"memory_bytes": one.memory.peak, "fits": False}
    assert some.peaks([1.0, 2.0]) == [1.0, 2.0]
    last = traced({"pp": 2}, 1)
    both = TracedMemory(Layout(pp=2), (one, last), 0.0)
    assert both.peaks([1.0, 2.0]) == [one.memory.peak, last.memory.peak]
    untraced = TracedMemory(Layout(), (NotTraced(0, "no"),), 0.0)
    with_commit = dataclasses.replace(untraced, saved=1e9)  # which a processor has in the same memory
    assert with_commit.needed(1e9, True) > untraced.needed(1e9, True) + 1e9
    assert with_commit.needed(1e9, False) == untraced.needed(1e9, False) == 1e9
    assert (
        TracedMemory(Layout(), (NotTraced(0, "no"),), 0.0).replaced_memory([1.0], 1.0, small, False)[0] == {}
    )


def test_what_cannot_be_traced_says_why() -> None:
    case = case_of(0)
    found = trace(job_of(case), workload_of(case), Layout(engine="deepspeed", dp=2, zero=1), 0)
    assert isinstance(found, NotTraced)
    assert "DeepSpeed" in found.reason


@pytest.mark.parametrize("layout", [{}, {"dp": 2, "zero": 3}])
def test_everything_frozen_but_one_tensor(layout: dict[str, Any]) -> None:
    found = traced(layout, freeze=["layers.*", "tokens.*", "embeddings.*"]).memory
    assert 0 < found.steady["optimizer"] < 0.02 * found.steady["weights"]


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ({}, {}),
        ({"dp": 2, "zero": 3, "recompute": "full"}, {}),
        ({"pp": 2}, {"layers": 24}),
        ({"pp": 4, "first_less": 12, "last_less": 12}, {"layers": 24}),
    ],
)
@pytest.mark.slow
def test_a_deep_model_holds_what_two_shallower_ones_say(
    layout: dict[str, Any], model: dict[str, Any]
) -> None:
    case = case_of(0)
    changes = {"hidden": 16, "heads": 4, "intermediate": 32, "layers": 12, "max_positions": 64, **model}
    case["job"]["workload"] = {"model": "gpt-tiny", "changes": changes, "objective": "causal_lm"}
    case["job"]["data"] |= {"sequence_length": 16, "labels": []}
    case["job"] |= {"checkpoint": {}, "train": {"steps": 2, "global_batch": 4}}
    spec, whole, chosen = job_of(case), workload_of(case), Layout(**{"micro_batch": 1, **layout})
    job = ResolvedJob(spec, whole.config, (), 0, model_shape(whole.config, 16))
    depths = shallow_models(job, chosen)
    assert depths is not None
    rank = 1 if chosen.first_less else 0  # the first one with layers
    found = [
        traces(spec, dataclasses.replace(whole, config=config), chosen, rank, [min(4 // chosen.dp, 4)])
        for config in (depths.shallow, depths.deeper, whole.config)
    ]
    few, more, real = (each[0] for each in found if isinstance(each, list))
    said = extrapolated_depth(few, more, depths.factor)
    assert said.memory == real.memory
    assert said.saved == real.saved


def test_the_most_of_a_pass_goes_on_from_its_beginning_and_from_its_end() -> None:
    """A pass begins with all activations and a head, and ends with all gradients, of which a deep model has more."""

    def made(layers: int) -> StepTrace:
        held = [(0, 5 * k, 0, 3 * (layers - k) + 40 * (k == 0), 0, 1) for k in range(layers + 1)]
        none = dict.fromkeys(CATEGORIES, 0)
        return StepTrace(
            0,
            {},
            (),
            Memory(0, none, none, "backward"),
            operator_peaks=tuple((("backward", 0, 0), sum(parts), parts) for parts in held),
            saved=5 * layers,
        )

    for layers in (8, 100):
        found = extrapolated_depth(made(4), made(6), (layers - 4) / 2)
        assert (found.memory.peak, found.saved) == (max(3 * layers + 41, 5 * layers + 1), 5 * layers)


@pytest.mark.slow
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "gpipe", "zbv", "zero_bubble"])
def test_a_pipeline_with_many_micro_batches_holds_what_fewer_say(schedule: str, on_cpu: bool) -> None:
    """On a GPU but for the losses of those that are not run: 24 bytes each on the last stage."""
    layout = Layout(pp=2, micro_batch=1, schedule=schedule)
    counts = micro_batches_of(layout, 16, layout.pp - 1, on_cpu)
    assert max(counts) < 16
    found, (whole,) = traces_of(layout, counts, on_cpu), traces_of(layout, [16], on_cpu)
    said = with_all_micro_batches(found, found[0], counts, 16).memory
    assert said.phase == whole.memory.phase
    assert said.peak == sum(said.at_peak.values())
    least = 0 if len(counts) > 1 else 24 * (16 - counts[0])
    assert 0 <= whole.memory.peak - said.peak <= least


def test_how_many_micro_batches_are_traced() -> None:
    def of(accumulation: int, index: int = 0, on_cpu: bool = False, **layout: Any) -> tuple[int, ...]:
        return micro_batches_of(Layout(**layout), accumulation, index, on_cpu)

    assert of(64) == (2,)
    assert of(1) == (1,)
    assert of(64, pp=8) == (16,)
    assert of(64, 2, pp=8) == (12,)
    assert of(64, 7, pp=8, on_cpu=True) == (8, 9)
    assert of(17, pp=8) == (17,)
    assert of(64, pp=8, schedule="zbv") == (16,)
    assert of(64, pp=8, schedule="zbv", on_cpu=True) == (16, 17)
    assert of(64, pp=8, schedule="interleaved", on_cpu=True) == (24, 32)
    assert of(64, pp=8, schedule="gpipe") == (2, 3)


@pytest.mark.parametrize("model", ["bert-tiny", "gpt-tiny"])
def test_a_stage_keeps_nothing_of_a_micro_batch_that_is_done(model: str) -> None:
    """Nor does autocast, to which what the last stage of an encoder receives looks like a weight."""
    case = case_of(0)
    changes = {"hidden": 32, "heads": 4, "intermediate": 64, "layers": 2, "max_positions": 64}
    objective = "masked_lm" if model == "bert-tiny" else "causal_lm"
    case["job"]["workload"] = {"model": model, "changes": changes, "objective": objective}
    case["job"]["data"] |= {"sequence_length": 32, "labels": []}
    case["job"] |= {
        "checkpoint": {},
        "train": {"steps": 2, "global_batch": 8, "precision": "bf16"},
        "resources": {"per_worker": {"gpu": 1}},
    }
    found = traces(job_of(case), workload_of(case), Layout(pp=2, micro_batch=1), 1, [4, 8])
    assert isinstance(found, list), found
    few, many = (each.memory.at_peak for each in found)
    assert many["communication"] == few["communication"]
    received = 32 * 32 * 2  # in 16 bits
    assert many["activations"] - few["activations"] < 4 * received


def traces_of(layout: Layout, counts: Sequence[int], on_cpu: bool) -> list[StepTrace]:
    """Traces of so many micro-batches of a decoder with a layer for each of four stages, less one."""
    case = case_of(0)
    changes = {"hidden": 32, "heads": 4, "intermediate": 64, "layers": 3, "max_positions": 64}
    case["job"]["workload"] = {"model": "gpt-tiny", "changes": changes, "objective": "causal_lm"}
    case["job"]["data"] |= {"sequence_length": 32, "labels": []}
    case["job"] |= {"checkpoint": {}, "train": {"steps": 2, "global_batch": 16}}
    case["job"] |= {} if on_cpu else {"resources": {"per_worker": {"gpu": 1}}}
    found = traces(job_of(case), workload_of(case), layout, layout.pp - 1, counts)
    assert isinstance(found, list), found
    return found


@pytest.mark.parametrize("run", [1, 2])
def test_an_operator_gives_what_it_gave_before(run: int) -> None:
    """As torch gives it: shapes, strides, types, and which storages are one."""
    a = torch.randn(4, 6)

    def results(x: torch.Tensor) -> list[torch.Tensor]:
        found = [
            x.mm(x.t()),
            x.t(),
            x[1:3],
            x.view(3, 8)[1],
            x.to(torch.bfloat16),
            x.sum(0),
            x + 1,
            x.add_(1),
        ]
        found += (
            torch.split(x, 2),
            torch.max(x, 1),
            torch.var_mean(x, 1),
            [torch.empty(0, 3), x.expand(2, 4, 6)],
        )
        return [t for each in found for t in ([each] if isinstance(each, torch.Tensor) else each)]

    fake = FakeTensorMode()
    given = fake.from_tensor(a)
    with fake, Recorder(torch.device("cpu"), run=CachedOperators(fake)):
        for _ in range(run):
            found = results(given)
    for plain, each in zip(results(a), found, strict=True):
        assert (plain.shape, plain.stride(), plain.dtype) == (each.shape, each.stride(), each.dtype)
        assert plain.storage_offset() == each.storage_offset()
        assert plain.untyped_storage().nbytes() == each.untyped_storage().nbytes()
        same = plain.untyped_storage()._cdata == a.untyped_storage()._cdata
        assert same == (each.untyped_storage()._cdata == given.untyped_storage()._cdata)


def test_what_an_operator_does_that_is_not_run_again() -> None:
    assert effect_of(torch.ops.aten.add_.Tensor) == "written"
    assert effect_of(torch.ops.aten._foreach_mul_.Scalar) == "written"
    assert effect_of(torch.ops.aten.view.default) == "view"
    assert effect_of(torch.ops.aten.mm.default) == "made"
    for func in (torch.ops.aten.t_.default, torch.ops.aten.resize_.default, torch.ops.aten.nonzero.default,
                 torch.ops.aten.split.Tensor, torch.ops.aten.mm.out, torch.ops.c10d.allreduce_.default):  # fmt: skip
        assert effect_of(func) == ""


@pytest.mark.parametrize(("on_cpu", "more"), [(True, 15), (False, 0)])
def test_experts_of_a_gpu_have_no_rows_of_zeros(on_cpu: bool, more: int) -> None:
    """Which those of a processor have in 16 bits, so that fewer kernels are compiled."""
    changes = {"hidden": 32, "heads": 4, "kv_heads": 2, "layers": 1, "max_positions": 64}
    case = case_of(0)
    case["job"]["workload"] = {"model": "mixtral-tiny", "changes": changes, "objective": "causal_lm"}
    case["job"]["data"] |= {"sequence_length": 32, "labels": []}
    case["job"] |= {"checkpoint": {}, "train": {"steps": 2, "global_batch": 2, "precision": "bf16"}}
    case["job"] |= {} if on_cpu else {"resources": {"per_worker": {"gpu": 1}}}
    workload = workload_of(case)
    found = trace(job_of(case), workload, Layout(micro_batch=2), 0)
    assert isinstance(found, StepTrace), found
    moe = workload.config.moe
    products = [each for each in found.operations if each.name == "aten._grouped_mm"]
    assert products[0].shapes[0] == (2 * 32 * moe.top_k + more * moe.experts, 32)


@pytest.mark.parametrize(("on_cpu", "copied"), [(True, 4096), (False, 0)])
def test_gloo_reduces_a_copy_of_what_it_scatters(on_cpu: bool, copied: int) -> None:
    with fake_ranks(0, 2), Recorder(torch.device("cpu"), messages=Messages(on_cpu)) as recorder:
        whole, part = torch.zeros(1024), torch.zeros(512)
        recorder.begin()
        dist.reduce_scatter_single(part, whole)
    assert recorder.peak[1] == whole.nbytes + part.nbytes + copied
    assert recorder.live.total == whole.nbytes + part.nbytes


@pytest.mark.slow
def test_an_offloaded_optimiser_is_not_in_the_memory_of_the_gpu() -> None:
    """On a processor it is in the one memory that there is."""
    changes = {"hidden": 32, "heads": 4, "layers": 2, "max_positions": 64}
    case = case_of(0)
    case["job"]["workload"] = {"model": "gpt-tiny", "changes": changes, "objective": "causal_lm"}
    case["job"]["data"] |= {"sequence_length": 32, "labels": []}
    case["job"] |= {"checkpoint": {}, "train": {"steps": 2, "global_batch": 2, "precision": "bf16"}}
    found: dict[tuple[int, str], StepTrace] = {}
    for gpu in (0, 1):
        case["job"] |= {"resources": {"per_worker": {"gpu": gpu}}}
        for offload in ("none", "optimizer"):
            layout = Layout(micro_batch=1, offload=offload)  # type: ignore[arg-type]
            each = trace(job_of(case), workload_of(case), layout, 0)
            assert isinstance(each, StepTrace), each
            found[gpu, offload] = each
    there, plain = found[1, "optimizer"].memory, found[1, "none"].memory
    assert (there.steady["weights"], there.steady["gradients"]) == (
        plain.steady["weights"],
        plain.steady["gradients"],
    )
    assert there.steady["optimizer"] == 0 < plain.steady["optimizer"]
    assert there.peak < plain.peak
    assert found[0, "optimizer"].memory.steady["optimizer"] == found[0, "none"].memory.steady["optimizer"] > 0
