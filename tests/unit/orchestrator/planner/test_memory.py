"""What ranks hold by the closed formula: micro-batches in flight, as the schedules themselves order their passes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from orchestrator.config.spec import parse
from orchestrator.parallel.layout import Layout
from orchestrator.planner.demand import demand_of
from orchestrator.planner.memory import peak_by_stage, peak_bytes, rank_memory
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.planner.simulation.step import local_parameters
from orchestrator.planner.simulation.timeline import order
from workloads.describe import describe


@pytest.mark.parametrize(
    ("schedule", "parts"),
    [
        *((schedule, 16) for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")),
        *(("interleaved", 10), ("zero_bubble", 10), ("interleaved", 3), ("zero_bubble", 3)),
    ],
)
def test_micro_batches_in_flight_are_those_of_the_schedule(schedule: str, parts: int) -> None:
    ranks = 4
    spec = parse({
        "name": "paper",
        "workload": {"model": "gpt-tiny", "changes": {"layers": 8}},
        "data": {"sources": [{"uri": "a"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 64},
        "train": {"steps": 10, "global_batch": parts},
    })  # fmt: skip
    shape = model_shape(describe("gpt-tiny", {"layers": 8}), 64)
    layout = Layout(pp=ranks, micro_batch=1, schedule=schedule)
    for rank, actions in enumerate(order(schedule, ranks, parts)):
        now = most = 0
        for kind, _, _ in actions:
            now += {"F": 1, "I": 0, "B": -1, "W": -1}[kind]
            most = max(most, now)
        chunks = len({stage for _, stage, _ in actions})
        (found,) = rank_memory(demand_of(spec), shape, layout, [rank])
        assert found.in_flight == most / chunks


@pytest.mark.parametrize(
    ("model", "recompute", "tp", "traced"),
    [
        ("gpt-tiny", "none", 2, 18.08), ("gpt-tiny", "none", 8, 4.52), ("gpt-tiny", "selective", 2, 14.06),
        ("gpt-tiny", "selective", 8, 6.52), ("llama-tiny", "none", 2, 22.33), ("llama-tiny", "none", 8, 5.77),
        ("llama-tiny", "selective", 2, 18.06), ("llama-tiny", "selective", 8, 7.52),
    ],
)  # fmt: skip
def test_a_layer_under_sequence_parallelism_keeps_what_a_trace_found(
    model: str, recompute: str, tp: int, traced: float
) -> None:
    """Bytes of each number of the residual stream, in bf16: the difference of 6 and 10 layers, without copies of
    weights."""
    changes = {"hidden": 256, "heads": 8, "intermediate": 1024, "vocab_size": 512}
    changes |= {"max_positions": 256} if model == "gpt-tiny" else {"kv_heads": 8}
    shapes = [
        model_shape(describe(model, {**changes, "layers": layers}, objective="causal_lm"), 256)
        for layers in (6, 10)
    ]
    spec = parse({
        "name": "paper",
        "workload": {"model": model, "changes": changes},
        "data": {"sources": [{"uri": "a"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 256},
        "train": {"steps": 10, "global_batch": 4, "precision": "bf16"},
    })  # fmt: skip
    layout = Layout(tp=tp, sequence=True, recompute=recompute, micro_batch=4)
    few, many = (rank_memory(demand_of(spec), shape, layout, [0])[0].micro_batch for shape in shapes)
    assert (many - few) / 4 / (4 * 256 * 256) == pytest.approx(traced, rel=0.03)


def test_a_step_of_one_micro_batch_has_no_sharded_gradients_beside_its_activations() -> None:
    """But all of them when it ends: of ZeRO 2 and 3, which sum into nothing that was there before."""
    shape = model_shape(describe("gpt-tiny"), 256)

    def peak(global_batch: int, **layout: Any) -> float:
        spec = parse({
            "name": "paper",
            "workload": {"model": "gpt-tiny"},
            "data": {"sources": [{"uri": "a"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 256},
            "train": {"steps": 10, "global_batch": global_batch},
        })  # fmt: skip
        return peak_bytes(demand_of(spec), shape, Layout(dp=4, micro_batch=4, **layout))

    share = 4.0 * local_parameters(shape, Layout()) / 4
    assert peak(32, zero=3) - peak(16, zero=3) == pytest.approx(share)
    assert peak(32, zero=2) - peak(16, zero=2) == pytest.approx(share)
    assert peak(32, zero=1) == peak(16, zero=1)


@pytest.mark.parametrize("model", ["gemma-2-2b", "llama-3.2-1b", "bert-base"])
def test_no_rank_of_a_pipeline_needs_more_than_is_planned_for(model: str) -> None:
    """Also where a rank in the middle has most layers."""
    spec = parse({
        "name": "deep",
        "workload": {"model": model, "objective": "masked_lm" if model == "bert-base" else "causal_lm"},
        "data": {"sources": [{"uri": "a"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 512},
        "train": {"steps": 10, "global_batch": 64},
    })  # fmt: skip
    shape, inner = model_shape(describe(model), 512), 0
    for pp, schedule, first, last in itertools.product(
        (2, 3, 4, 7, 8, 16), ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"), range(3), range(5)
    ):
        layout = Layout(pp=pp, schedule=schedule, first_less=first, last_less=last, micro_batch=4)
        if not layout.problems(shape, 64):
            by_stage = peak_by_stage(demand_of(spec), shape, layout)
            assert peak_bytes(demand_of(spec), shape, layout) == max(by_stage)
            inner += max(by_stage) > max(by_stage[0], by_stage[-1])
    assert inner


def test_a_schedule_without_a_pipeline_costs_nothing() -> None:
    shape = model_shape(describe("gpt-tiny"), 256)
    spec = parse({
        "name": "alone",
        "workload": {"model": "gpt-tiny"},
        "data": {"sources": [{"uri": "a"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 256},
        "train": {"steps": 10, "global_batch": 64},
    })  # fmt: skip
    one, other = (
        peak_bytes(demand_of(spec), shape, Layout(micro_batch=1, schedule=name)) for name in ("1f1b", "gpipe")
    )
    assert one == other


@pytest.mark.parametrize(("objective", "parts"), [("causal_lm", 8), ("dpo", 8)])
def test_gpipe_holds_what_each_forward_pass_of_the_head_leaves(objective: str, parts: int) -> None:
    """All forward passes are before any backward pass: of chunks the gradient of the table, else the logits."""
    spec = parse({
        "name": "deep",
        "workload": {"model": "gpt2", "objective": objective, "dropout": 0.0, "attention_dropout": 0.0},
        "data": {"sources": [{"uri": "a"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 256},
        "train": {"steps": 10, "global_batch": parts, "precision": "bf16"},
        "resources": {"per_worker": {"gpu": 1}},
    })  # fmt: skip
    shape = model_shape(describe("gpt2", {"layers": 4}), 256)
    (first,), (one,) = (
        rank_memory(demand_of(spec), shape, Layout(pp=2, schedule=schedule), (1,))
        for schedule in ("gpipe", "1f1b")
    )
    each = 4.0 * shape.vocabulary * (shape.hidden if objective == "causal_lm" else 1.3 * 256)
    assert first.head - one.head == pytest.approx((parts - 1) * each)


def test_every_rank_that_generates_holds_a_whole_copy_of_the_model() -> None:
    """Whatever the layout divides, and with what it decodes at once where that is more than a step's activations."""

    def bytes_of(objective: str, **rollout: int) -> float:
        columns = {"prompt": "q"} if objective == "grpo" else {"messages": "m"}
        spec = parse({
            "name": "copies",
            "workload": {"model": "llama-tiny", "objective": objective},
            "data": {"sources": [{"uri": "a", "field": columns}], "tokenizer": "t", "sequence_length": 256},
            "train": {"steps": 10, "global_batch": 64},
            **({"rollout": rollout, "rewards": [{"kind": "exact_match"}]} if objective == "grpo" else {}),
        })  # fmt: skip
        return peak_bytes(demand_of(spec), shape, Layout(dp=8, zero=3, micro_batch=1))

    shape = dataclasses.replace(model_shape(describe("llama-tiny"), 256), chunked_head=False)
    plain = bytes_of("conversation")
    assert bytes_of("grpo", together=1, group=2) == pytest.approx(plain + 4 * shape.parameters)
    assert bytes_of("grpo", together=64, group=64) > plain + 2 * 4 * shape.parameters


@pytest.mark.parametrize(("optimizer", "is_computed_again"), [
    ("adamw", True), ("lion", True), ("adamw_8bit", False), ("muon", False), ("lamb", False), ("mine:Own", False),
])  # fmt: skip
def test_only_an_update_that_is_computed_again_needs_memory_for_it(
    optimizer: str, is_computed_again: bool
) -> None:
    """With few tokens, so that the update and not the head needs most."""

    def peak(**resources: Any) -> float:
        spec = parse({
            "name": "verified",
            "workload": {"model": "gpt-tiny"},
            "data": {"sources": [{"uri": "a"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 16},
            "train": {"steps": 10, "global_batch": 2, "optimizer": {"name": optimizer}},
            "resources": {"workers": 2, **resources},
        })  # fmt: skip
        return peak_bytes(demand_of(spec), shape, Layout(dp=2, zero=1, micro_batch=1))

    shape = model_shape(describe("gpt-tiny"), 16)
    assert (peak(verify={"every": 5}) > peak()) is is_computed_again
