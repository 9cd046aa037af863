"""Partial pins: what a job file writes of its layout stays, the rest is searched."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, dump, parse
from orchestrator.parallel.layout import Layout, split_problems
from orchestrator.planner.candidates import LayoutEstimates, all_degrees
from orchestrator.planner.choose_layout import plan
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device_profile import load
from orchestrator.planner.shape_of_model import model_shape
from workloads.describe import describe


def job(gpu: int = 1, **pins: Any) -> JobSpec:
    document: dict[str, Any] = {
        "name": "pins",
        "workload": {"model": "llama-3.2-1b", "objective": "causal_lm"},
        "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 512},
        "train": {"steps": 100, "global_batch": 32, "precision": "bf16"},
        "parallel": {"rest": "auto", **pins} if pins else "auto",
        "resources": {"workers": {"min": 1, "max": 64}, "per_worker": {"gpu": gpu}},
    }
    return parse(document)


SHAPE = model_shape(describe("llama-3.2-1b"), 512)


def found(spec: JobSpec, workers: int = 8) -> list[Layout]:
    room = LayoutEstimates(lambda _: 0.5, lambda _: (0.0, 2.5))
    found = all_degrees(demand_of(spec), SHAPE, workers, 8, lambda _: None, room)
    return [layout for degrees in found for family in degrees.families() for layout in family.layouts()]


@pytest.mark.parametrize(
    "pins",
    [
        {"tp": 4},
        {"zero": 3, "micro_batch": 2},
        {"pp": 2, "schedule": "zero_bubble"},
        {"recompute": "selective", "sequence": True, "tp": 2},
        {"engine": "deepspeed"},
        {"zero": 3, "shard": 4},
        {"offload": "optimizer", "zero": 1},
        {"pp": 2, "schedule": "interleaved", "virtual": 3},
        {"pp": 4, "first_less": 1, "last_less": 0},
        {"recompute_layers": 2, "pp": 2},
    ],
)
def test_what_is_pinned_stays_and_the_rest_is_searched(pins: dict[str, Any]) -> None:
    layouts = found(job(**pins))
    assert len(layouts) > 1
    assert {tuple(getattr(layout, key) for key in pins) for layout in layouts} == {tuple(pins.values())}


@pytest.mark.parametrize(
    "pins", [{"pp": 6, "schedule": "interleaved", "virtual": 3}, {"pp": 18, "first_less": 1, "last_less": 1}]
)
def test_embedding_and_head_are_stages_of_their_own_where_the_pins_leave_them_no_layer(
    pins: dict[str, Any],
) -> None:
    legal = [layout for layout in found(job(**pins), 18) if not split_problems(layout, SHAPE)]
    assert {(layout.first_less, layout.last_less) for layout in legal} == {(1, 1)}


def test_weights_are_also_divided_over_a_node_where_there_are_several() -> None:
    assert {layout.shard for layout in found(job(), 8)} == {0}
    assert {layout.shard for layout in found(job(tp=2, pp=1, cp=1), 32)} == {0, 4}
    assert {layout.shard for layout in found(job(gpu=0), 32)} == {0}


def test_between_many_nodes_copies_are_faster_than_one() -> None:
    machine = load("h100").machine("bf16")
    spec = job(zero=3, pp=1)
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"global_batch": 2048})})
    assert plan(demand_of(spec), SHAPE, 2048, machine).chosen.layout.shard > 1


@pytest.mark.parametrize(
    ("pins", "width"),
    [
        ({"micro_batch": 16}, 2),
        ({"pp": 4, "micro_batch": 1, "schedule": "1f1b"}, 8),
        ({"pp": 4, "micro_batch": 1, "schedule": "zbv"}, 16),
    ],
)
def test_fewer_replicas_where_more_leave_too_few_micro_batches(pins: dict[str, Any], width: int) -> None:
    """On 64 workers 16 replicas would leave 2 samples, which are no micro-batch of 16 and do not fill a pipeline of 4
    ranks. 1F1B needs it full; under ZB-V twice as many workers are faster all the same."""
    alone = dict.fromkeys(("pp", "cp", "tp", "ep"), 1)
    spec, machine = job(**{**alone, **pins}), load("a100-80").machine("bf16")
    layout = plan(demand_of(spec), SHAPE, 64, machine).chosen.layout
    assert (layout.dp, layout.micro_batch, layout.pp) == (width, pins["micro_batch"], pins.get("pp", 1))


def test_the_chosen_layout_is_the_best_of_those_with_the_pins() -> None:
    machine = load("a100-80").machine("bf16")
    chosen = plan(demand_of(job(tp=4)), SHAPE, 8, machine).chosen
    assert chosen.layout.tp == 4
    assert chosen.seconds >= plan(demand_of(job()), SHAPE, 8, machine).chosen.seconds


@pytest.mark.parametrize(
    ("pins", "said"), [({"tp": 3}, "tp 3 does not divide"), ({"tp": 16}, "16"), ({"ep": 2}, "dense")]
)
def test_pins_that_no_layout_can_have_are_named(pins: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        plan(demand_of(job(**pins)), SHAPE, 8, load("a100-80").machine("bf16"))


def test_a_file_of_a_partial_layout_reads_the_same_again() -> None:
    spec = job(tp=4, zero=0)
    again = parse(yaml.safe_load(dump(spec)))
    assert again == spec
    assert again.parallel != "auto"
    assert again.parallel.pins == spec.parallel.pins == {"tp": 4, "zero": 0}  # type: ignore[union-attr]


def test_without_rest_a_layout_is_whole_as_in_older_files() -> None:
    whole = parse({**job().model_dump(mode="json"), "parallel": {"tp": 2}})
    assert "rest" not in yaml.safe_load(dump(whole))["parallel"]
    assert {(each.tp, each.zero, each.recompute) for each in found(whole)} == {(2, 0, "none")}
