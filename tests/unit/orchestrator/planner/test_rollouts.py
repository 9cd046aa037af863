"""What is predicted of rollouts: their seconds, the memory of rollout workers, and the fastest split of the workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.parallel.config import ParallelSpec
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.choose_layout import Plan, Verdict, plan
from orchestrator.planner.demand import Demand, demand_of
from orchestrator.planner.device import Machine
from orchestrator.planner.device_profile import load
from orchestrator.planner.planner import Planner
from orchestrator.planner.rollouts import (
    check_rollout_workers,
    rollout_time,
    unit_seconds,
    with_rollout_time,
    worker_bytes,
)
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.planner.splits import _split, plan_rollouts
from workloads.describe import describe

MODEL, LENGTH = "llama-3-8b", 1024


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return model_shape(describe(MODEL), LENGTH)


@pytest.fixture(scope="module")
def machine() -> Machine:
    return load("h100").machine("bf16")


BITS = {"determinism": "bitwise", "virtual_shards": 64}


def demand(
    workers: int | None = None,
    ranks: int = 8,
    must_fit: bool = True,
    gpu: int = 1,
    workload: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    **rollout: Any,
) -> Demand:
    return demand_of(parse({
        "name": "rollouts",
        "workload": {"model": MODEL, "objective": "grpo", **(workload or {})},
        "data": {"sources": [{"uri": "a", "field": {"prompt": "q"}}], "tokenizer": "t", "sequence_length": LENGTH},
        "train": {"steps": 10, "global_batch": 512, "precision": "bf16", **(train or {})},
        "rollout": {"group": 8, "together": 4, "max_tokens": 256, "workers": workers, **rollout},
        "rewards": [{"kind": "exact_match"}],
        "resources": {"workers": ranks, "per_worker": {"gpu": gpu}, "must_fit": must_fit},
    }))  # fmt: skip


def planned(asked: Demand, shape: ModelShape, machine: Machine, ranks: int = 8) -> Plan:
    return plan(asked, shape, ranks, machine)


def unit(shape: ModelShape, machine: Machine, **rollout: Any) -> float:
    return unit_seconds(demand(**rollout), shape, machine)


def test_a_token_takes_at_least_the_time_to_read_the_weights(shape: ModelShape, machine: Machine) -> None:
    read = 2.0 * (shape.parameters - shape.vocabulary * shape.hidden) / machine.memory_bandwidth
    per_token = (unit(shape, machine, max_tokens=512) - unit(shape, machine, max_tokens=256)) / 256
    assert read < per_token < 5 * read
    more = unit(shape, machine, together=8)
    assert unit(shape, machine) < more < 1.5 * unit(shape, machine), (
        "most of a pass does not depend on its rows"
    )


def test_generation_overlaps_training_only_with_rollout_workers(shape: ModelShape, machine: Machine) -> None:
    serial = rollout_time(demand(4, ranks=4), shape, planned(demand(4, ranks=4), shape, machine, 4))
    asked = demand(4, ranks=4, staleness=1)
    beside = rollout_time(asked, shape, planned(asked, shape, machine, 4))
    assert dataclasses.replace(beside, overlaps=False) == serial
    assert serial.seconds == pytest.approx(serial.transfer + serial.generate + serial.reward + serial.train)
    assert beside.seconds == pytest.approx(
        beside.transfer + max(beside.generate, beside.train + beside.reward)
    )
    assert sum(beside.by_part().values()) + beside.train == pytest.approx(beside.seconds)
    alone = demand(staleness=1)
    assert not rollout_time(alone, shape, planned(alone, shape, machine)).overlaps
    twice = rollout_time(demand(8, ranks=4), shape, planned(asked, shape, machine, 4))
    read = serial.transfer  # as many bytes on the same way
    assert twice.generate - read == pytest.approx((serial.generate - read) / 2)


def test_generation_has_no_backward_pass(shape: ModelShape, machine: Machine) -> None:
    plain = dataclasses.replace(shape, chunked_head=False)
    assert unit(shape, machine) == unit(plain, machine)


def test_weights_go_through_hosts_and_only_trained_ones(shape: ModelShape, machine: Machine) -> None:
    asked = demand(4, ranks=4)
    found = planned(asked, shape, machine, 4)
    time = rollout_time(asked, shape, found)
    sent = 4.0 * shape.parameters
    assert time.transfer == pytest.approx(2.0 * sent / machine.host_bandwidth), (
        "to the host, and to its server"
    )
    slow = dataclasses.replace(machine, host_bandwidth=machine.host_bandwidth / 2)
    slower = rollout_time(asked, shape, dataclasses.replace(found, machine=slow))
    assert slower.transfer == pytest.approx(2.0 * time.transfer)
    assert slower.generate - time.generate == pytest.approx(time.transfer), "workers read as many bytes"
    few = dataclasses.replace(shape, trained_share=0.01)
    adapted = rollout_time(asked, few, found)
    assert adapted.transfer == pytest.approx(0.01 * time.transfer)
    predicted = plan_rollouts(demand(4, ranks=4, staleness=1), few, found)
    assert predicted is not None
    assert predicted.server_bytes == pytest.approx(2 * 0.01 * sent), "two versions"
    far = rollout_time(demand(8, ranks=8), shape, found)
    network = min(machine.host_bandwidth, machine.between.bandwidth)
    assert far.transfer == pytest.approx(sent / machine.host_bandwidth + 2.0 * sent / network)


def test_units_of_steps_that_are_queued_together_fill_the_workers(
    shape: ModelShape, machine: Machine
) -> None:
    each = unit(shape, machine)

    def rounds(workers: int, **rollout: Any) -> float:
        asked = demand(workers, ranks=1, **rollout)
        found = planned(demand(1), shape, machine)
        read = 2.0 * 4.0 * shape.parameters / machine.host_bandwidth / asked.rollout.steps  # type: ignore[union-attr]
        return (rollout_time(asked, shape, found).generate - read) / each

    assert rounds(12) == pytest.approx(2.0), "16 units in two rounds"
    assert rounds(12, steps=5) == pytest.approx(2.0), "one step after another"
    assert rounds(12, steps=5, staleness=1) == pytest.approx(7 / 5), "80 units in seven rounds"


def test_several_updates_share_the_seconds_of_a_rollout(shape: ModelShape, machine: Machine) -> None:
    found = planned(demand(4), shape, machine)
    once, often = (rollout_time(demand(4, epochs=epochs), shape, found) for epochs in (1, 5))
    for part in ("transfer", "generate", "reward"):
        assert getattr(often, part) == pytest.approx(getattr(once, part) / 5)
    # once a rollout, a forward pass finds the probabilities that all five updates compare with
    assert often.train - once.train == pytest.approx(found.chosen.time.compute / 15)
    told = with_rollout_time(found, often)
    parts = told["seconds_by_part"]
    assert sum(parts.values()) - parts["commit"] == pytest.approx(often.seconds)
    ahead = rollout_time(demand(4, epochs=5, staleness=1), shape, found)
    assert ahead.train == once.train
    # Where bits are asked for, generation has found them on a CPU. On a GPU nobody has seen it.
    assert rollout_time(demand(4, epochs=5, train=BITS), shape, found).train == often.train
    for workload in ({}, {"adapter": {"kind": "lora"}, "init_from": "base"}):
        on_cpu = demand(4, epochs=5, gpu=0, workload=workload, train=BITS)
        assert rollout_time(on_cpu, shape, found).train == once.train


@pytest.mark.parametrize("drawn", ["attention_dropout", "layer_drop", "embedding_noise"])
def test_training_that_draws_takes_the_pass_that_generation_cannot_replace(
    drawn: str, shape: ModelShape, machine: Machine
) -> None:
    found = planned(demand(4), shape, machine)
    plain, draws = (
        rollout_time(demand(4, gpu=0, workload=workload, train=BITS, steps=2), shape, found)
        for workload in ({}, {drawn: 0.1})
    )
    assert draws.train - plain.train == pytest.approx(found.chosen.time.compute / 6)


def test_splits_divide_the_same_workers_and_the_fastest_is_first(shape: ModelShape, machine: Machine) -> None:
    asked = demand(2, ranks=6, staleness=1)
    found = plan_rollouts(asked, shape, planned(asked, shape, machine, 6))
    assert found is not None
    assert found.requested in found.splits
    assert [split.time.seconds for split in found.splits] == sorted(
        split.time.seconds for split in found.splits
    )
    assert len({split.generating for split in found.splits}) == len(found.splits) > 2
    assert all(split.generating + split.layout.world <= 8 for split in found.splits)
    assert len(found.splits) <= 5, "each one takes a plan"
    told = found.to_json()
    assert told["step_seconds"] == found.requested.time.seconds
    assert told["fits"]
    assert {split["generating"] for split in told["splits"]} >= {0, 2}


def test_bitwise_reads_the_answers_once_more_in_passes_of_training(
    shape: ModelShape, machine: Machine
) -> None:
    asked = demand(2)
    bitwise = dataclasses.replace(asked, shards=64)
    once = unit_seconds(bitwise, shape, machine) - unit_seconds(asked, shape, machine)
    # 32 answers of 1,024 tokens with the prompt, in four passes of 8 rows: 2 FLOPs for each parameter and token.
    flops = 2.0 * shape.parameters * 32 * LENGTH
    assert flops / machine.flops < once < 3 * flops / machine.flops
    assert worker_bytes(bitwise, shape) > worker_bytes(asked, shape)
    assert worker_bytes(bitwise, shape) > worker_bytes(dataclasses.replace(asked, shards=128), shape)


def test_a_rollout_worker_that_does_not_fit_is_refused(shape: ModelShape, machine: Machine) -> None:
    needed = worker_bytes(demand(2), shape)
    assert needed > 4 * shape.parameters
    assert worker_bytes(demand(2, together=8), shape) > needed
    check_rollout_workers(demand(2), shape, machine)
    small = dataclasses.replace(machine, memory=needed)
    with pytest.raises(
        InputError, match=r"rollout\.workers: a rollout worker needs .* GB, and a worker offers"
    ):
        check_rollout_workers(demand(2), shape, small)
    check_rollout_workers(demand(2, must_fit=False), shape, small)
    check_rollout_workers(demand(), shape, small)


def test_splits_leave_out_what_traces_refuse_and_layouts_that_are_given(
    shape: ModelShape, machine: Machine
) -> None:
    asked = demand(2, ranks=6, staleness=1)
    plan_of_ranks = planned(asked, shape, machine, 6)
    found = plan_rollouts(asked, shape, plan_of_ranks)
    assert found is not None
    other = next(split for split in found.splits if split is not found.requested)
    without = plan_rollouts(asked, shape, plan_of_ranks, {other.layout: Verdict("is too large", 1.0)})
    assert without is not None
    assert other.layout in {split.layout for split in found.splits}
    assert other.layout not in {split.layout for split in without.splits if split is not without.requested}
    given = dataclasses.replace(asked, parallel=ParallelSpec(pp=6))
    pinned = plan_rollouts(given, shape, plan_of_ranks)
    assert pinned is not None
    assert pinned.splits == (pinned.requested,)


def test_the_best_of_all_splits_is_among_the_few(shape: ModelShape, machine: Machine) -> None:
    asked = demand(2, ranks=6)
    plan_of_ranks = planned(asked, shape, machine, 6)
    found = plan_rollouts(asked, shape, plan_of_ranks)
    assert found is not None
    each = [_split(asked, shape, plan_of_ranks, workers, total=8, refused={}) for workers in range(8)]
    least = min(split.time.seconds for split in each if split is not None)
    assert found.splits[0].time.seconds <= 1.1 * least


def test_the_plan_of_a_run_is_of_whole_steps(shape: ModelShape, machine: Machine) -> None:
    asked = demand(2, ranks=4)
    found = planned(asked, shape, machine, 4)
    predicted = Planner(asked, shape, machine).document(found)["predicted"]
    time = rollout_time(asked, shape, found)
    parts = predicted["seconds_by_part"]
    assert {name: parts[name] for name in ("transfer", "generate", "reward")} == time.by_part()
    assert predicted["step_seconds"] == time.seconds > 2 * found.chosen.seconds
    assert sum(parts.values()) - parts["commit"] == pytest.approx(time.seconds)
    assert predicted["tokens_per_second"] == pytest.approx(512 * LENGTH / time.seconds)
    late = {share: seconds - found.chosen.seconds for share, seconds in found.quantiles.items()}
    told = {share: seconds - time.seconds for share, seconds in predicted["step_seconds_quantiles"].items()}
    assert told == pytest.approx(late, abs=1e-9)
