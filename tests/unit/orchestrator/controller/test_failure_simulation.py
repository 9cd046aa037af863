"""A run's result on machines that are not here: the books balance, and decisions are those of `decide`."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from cluster.workers.device_limits import limits_of
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.config.spec import JobSpec, parse
from orchestrator.controller.failure_simulation import HOUR, FailureModel, simulate, young_daly
from orchestrator.controller.forecast_table import forecast
from orchestrator.controller.health import STEP_FACTOR
from orchestrator.controller.state import Policy, policy_of
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.legal_layouts import fit
from orchestrator.planner.choose_layout import plan
from orchestrator.planner.cluster_file import Failures, load
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device_profile import load as load_profile
from orchestrator.planner.host_memory import state_bytes
from orchestrator.planner.planner import Planner
from orchestrator.planner.shape_of_model import model_shape
from workloads.describe import describe

QUIET = FailureModel(nodes=8, per_node=8, breaks=0, software=0, repair=HOUR, restart=60, stall=0, write=5)


def paper(steps: int = 20000, workers: int = 64, least: int = 1, **resources: Any) -> JobSpec:
    return parse(
        {
            "name": "paper",
            "workload": {"model": "gpt2", "objective": "causal_lm"},
            "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 512},
            "train": {"steps": steps, "global_batch": 1024},
            "resources": {"workers": {"min": least, "max": workers}, "per_worker": {"gpu": 1}, **resources},
            "checkpoint": {"every": 50, "export": None},
        }
    )


def policy(**changes: Any) -> Policy:
    return policy_of(
        paper(**changes),
        lambda room: fit(Layout(), room, 1024),
        predict=lambda layout: 64.0 / layout.world,
    )


def test_without_failures_a_run_takes_its_steps_and_one_start() -> None:
    result = simulate(policy(), QUIET, 0)
    assert (result.outcome, result.attempts, result.failures) == (Outcome.DONE, 1, 0)
    assert result.parts["steps"] == pytest.approx(20000)
    assert result.seconds == pytest.approx(20060)
    assert result.node_hours == pytest.approx(8 * result.seconds / HOUR)


@pytest.mark.parametrize("spares", [0, 2])
def test_every_second_is_in_one_part(spares: int) -> None:
    failure_model = dataclasses.replace(
        QUIET, nodes=8 + spares, breaks=0.1, software=0.05, interruptions=0.05, stall=1.0
    )
    result = simulate(policy(), failure_model, 3)
    assert result.outcome is Outcome.DONE
    assert sum(result.parts.values()) == pytest.approx(result.seconds)
    assert result.parts["steps"] == pytest.approx(20000)  # at the speed of all workers
    assert result.parts["narrow"] > 0.0 or spares
    assert result.failures > 3
    assert result.attempts > result.failures // 2
    assert min(result.parts.values()) >= 0.0
    assert result.parts["lost"] <= result.failures * (50 + 5 + 1) * 64.0


def test_spares_step_in_where_the_run_would_go_on_with_half() -> None:
    failure_model = dataclasses.replace(QUIET, breaks=0.1, repair=4 * HOUR)
    results = [
        simulate(policy(), dataclasses.replace(failure_model, nodes=8 + n), seed)
        for n in (0, 4)
        for seed in range(8)
    ]
    assert sum(result.seconds for result in results[8:]) < 0.8 * sum(result.seconds for result in results[:8])


def test_a_notice_saves_what_would_be_lost() -> None:
    failure_model = dataclasses.replace(QUIET, nodes=12, interruptions=0.3)
    warned, not_warned = (
        simulate(policy(notices="aws"), failure_model, 2),
        simulate(policy(), failure_model, 2),
    )
    assert warned.parts["lost"] < 0.1 * not_warned.parts["lost"]


def test_nodes_fail_while_workers_start() -> None:
    """A start ends after `restart` seconds or at a failure: (1 - e^(-restart / between)) x between in the mean."""
    failure_model = dataclasses.replace(QUIET, software=0.5, restart=180.0, write=0.0)
    results = [simulate(policy(steps=8000), failure_model, seed) for seed in range(30)]
    assert {result.outcome for result in results} == {Outcome.DONE}
    between = HOUR / (8 * 0.5)
    noticed = limits_of(1).silence * sum(result.failures for result in results)
    seconds = sum(result.parts["restarts"] for result in results) - noticed
    starts = sum(result.attempts for result in results)
    assert seconds / starts == pytest.approx(between * (1 - math.exp(-180.0 / between)), rel=0.05)
    assert seconds / starts < 0.95 * 180.0


def test_a_lost_node_goes_back_to_a_snapshot_and_a_lost_rack_to_a_commit() -> None:
    failure_model = dataclasses.replace(QUIET, nodes=16, software=0.2, snapshot_every=2)
    of_node = simulate(policy(), failure_model, 1)
    without = simulate(policy(), dataclasses.replace(failure_model, snapshot_every=0), 1)
    assert of_node.parts["lost"] <= of_node.failures * 2.0 < 0.2 * without.parts["lost"]
    racks = dataclasses.replace(
        QUIET, nodes=16, repair=600.0, rack_nodes=4, rack_breaks=1.0, snapshot_every=2
    )
    of_rack = simulate(policy(), racks, 1)
    assert of_rack.failures > 5
    assert of_rack.parts["lost"] > of_rack.failures * 4.0


def test_a_hang_is_noticed_later_than_a_death() -> None:
    dead, hung = (
        simulate(policy(), dataclasses.replace(QUIET, **{kind: 0.1}), 1) for kind in ("software", "hangs")
    )
    limits = limits_of(1)
    each = (hung.parts["restarts"] - dead.parts["restarts"]) / hung.failures
    assert hung.failures == dead.failures
    assert each == pytest.approx(max(limits.hang, STEP_FACTOR * 1.0) - limits.silence)


def test_a_run_that_waits_too_long_for_its_workers_ends_as_it_would() -> None:
    failure_model = dataclasses.replace(QUIET, breaks=0.5, repair=100 * HOUR)
    result = simulate(policy(least=64), failure_model, 0)
    assert result.outcome is Outcome.FAILED
    assert "64 workers" in result.reason


def test_a_commit_where_least_is_lost() -> None:
    """Lost are stall / interval and interval / 2 / between; a shorter and a longer interval lose more."""
    best = young_daly(10.0, 5 * HOUR)
    lost = [10.0 / each + each / 2 / (5 * HOUR) for each in (best / 1.3, best, best * 1.3)]
    assert lost[1] == min(lost)


def test_a_cluster_file_and_what_it_forecasts(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "device: h100\nnodes: 4\nmarkets: {spot: {usd_per_gpu_hour: 1.0, hours_between_interruptions: 20}}\n"
    )
    cluster = load(path)
    spec = paper(steps=50000, workers=32)
    machine, shape = load_profile("h100").machine("fp32"), model_shape(describe("gpt2"), 512)
    demand = demand_of(spec)
    planner = Planner(demand, shape, machine)
    state = state_bytes(demand.optimizer, demand.ema, shape, pruned=demand.pruned)
    rules = policy_of(spec, planner.choose, predict=planner.seconds)
    found = forecast(rules, plan(demand, shape, 32, machine), cluster, state)
    spot = found["markets"]["spot"]
    assert spot["ends"] == "done"
    assert spot["days"] >= found["days_without_failures"]
    assert min(spot["usd"], spot["kg_co2e"]) > 0
    assert 0 < spot["goodput"] <= 1
    assert [case["spares"] for case in spot["by_spares"]] == [0, 1, 2]
    assert Failures().gpu == pytest.approx(79200, rel=0.01)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes: 3", "device"),
        ("device: h100\nnodes: 0", "nodes"),
        ("- a", "the file"),
        ("device: h100\nnodes: 1\nmarkets: {}", "names none"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        load(path)
