"""Forecast what a run takes on another cluster: days, money, energy and goodput, by market and number of spares."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from orchestrator.checkpoint.config import SNAPSHOT_SHARE, CheckpointSpec
from orchestrator.config.outcome import Outcome
from orchestrator.controller.failure_simulation import HOUR, FailureModel, simulate, young_daly
from orchestrator.controller.state import Policy
from orchestrator.planner.choose_layout import Plan
from orchestrator.planner.cluster_file import ClusterFile, Market

SPARES = (0, 1, 2, 4, 8, 16, 32)
"""The numbers of spare nodes that are tried if the cluster file names none."""
SIMULATIONS = 5
"""How many runs are simulated for each case."""
DAY = 24.0 * HOUR


def forecast(policy: Policy, plan: Plan, cluster: ClusterFile, state: float) -> dict[str, Any]:
    """Forecast the run of a plan's chosen layout on a cluster.

    Args:
        policy: the policy of the run, which chooses that layout.
        plan: the plan for the cluster's workers.
        cluster: the cluster, with its rates of failure and its prices.
        state: bytes of a commit.

    Returns:
        The forecast as plain data.
    """
    chosen, machine = plan.chosen, plan.machine
    steps, every = policy.train.steps, policy.checkpoint.every
    stall = chosen.time.commit * every
    failures = cluster.hours_between_failures
    in_use = -(-chosen.layout.world // machine.per_node)
    failure_model = FailureModel(
        nodes=in_use,
        per_node=machine.per_node,
        breaks=failures.breaks(machine.per_node),
        software=1.0 / failures.software,
        repair=cluster.repair_hours * HOUR,
        restart=cluster.restart_seconds,
        stall=stall,
        write=state / in_use / cluster.write_bandwidth,
        hangs=1.0 / failures.hang if failures.hang else 0.0,
        rack_nodes=cluster.nodes_per_rack,
        rack_breaks=1.0 / failures.rack if failures.rack else 0.0,
        snapshot_every=_snapshot_every(policy.checkpoint, stall, chosen.seconds) if in_use > 1 else 0,
    )
    return {
        "device": cluster.device,
        "nodes": cluster.nodes,
        "nodes_in_use": failure_model.nodes,
        "tokens_per_day": plan.tokens / chosen.seconds * DAY,
        "days_without_failures": steps * chosen.seconds / DAY,
        "commit": {
            "every_steps": every,
            "stall_seconds": stall,
            "write_seconds": failure_model.write,
            "snapshot_every_steps": failure_model.snapshot_every,
        },
        "markets": {
            name: _market(policy, failure_model, cluster, market, plan)
            for name, market in cluster.markets.items()
        },
    }


def _snapshot_every(checkpoint: CheckpointSpec, stall: float, seconds: float) -> int:
    """Return the steps between snapshots in the memory of other nodes; 0 for none.

    Args:
        checkpoint: the job's checkpoints.
        stall: seconds that copying the state delays a step.
        seconds: of a step.
    """
    if checkpoint.snapshot_every == "auto":
        return max(math.ceil(stall / (SNAPSHOT_SHARE * seconds)), 1)
    return checkpoint.snapshot_every or 0


def _market(
    policy: Policy, failure_model: FailureModel, cluster: ClusterFile, market: Market, plan: Plan
) -> dict[str, Any]:
    """Forecast the run in one market, with the spares of the cluster file, or with the cheapest number of spares."""
    hours_to_interruption, in_use = market.hours_between_interruptions, failure_model.nodes
    failure_model = dataclasses.replace(
        failure_model,
        nodes=cluster.nodes,
        interruptions=1.0 / hours_to_interruption if hours_to_interruption else 0.0,
        returns=market.return_hours * HOUR,
    )
    between = HOUR / (sum(failure_model.rates.values()) * in_use)
    interval = young_daly(failure_model.stall, between)
    seconds = plan.chosen.seconds
    best = max(round(max(interval, failure_model.write) / seconds), 1)
    worth_trying = [spares for spares in SPARES if spares <= max(cluster.nodes // 2, 1)]
    tried = worth_trying if cluster.spares is None else [cluster.spares]
    result = [
        _case(policy, failure_model, cluster=cluster, market=market, plan=plan, spares=spares)
        for spares in tried
    ]
    done = [case for case in result if case["ends"] == Outcome.DONE.value] or result
    chosen = min(done, key=lambda case: (case["usd"] or case["days"], case["days"]))
    often = policy.checkpoint.model_copy(update={"every": best})
    other = dataclasses.replace(policy, checkpoint=often)
    return {
        **chosen,
        "hours_between_failures": between / HOUR,
        "young_daly": {
            "seconds": interval,
            "every_steps": best,
            "goodput": _case(
                other, failure_model, cluster=cluster, market=market, plan=plan, spares=chosen["spares"]
            )["goodput"],
        },
        "by_spares": [
            {key: case[key] for key in ("spares", "days", "goodput", "usd", "ends")} for case in result
        ],
    }


def _case(
    policy: Policy, failure_model: FailureModel, cluster: ClusterFile, market: Market, plan: Plan, spares: int
) -> dict[str, Any]:
    """The mean of some simulated runs with `spares` nodes more than the cluster has."""
    results = [
        simulate(policy, dataclasses.replace(failure_model, nodes=cluster.nodes + spares), n)
        for n in range(SIMULATIONS)
    ]
    worst = next((result for result in results if result.outcome is not Outcome.DONE), results[0])
    hours = _mean([result.node_hours for result in results])
    watts = failure_model.per_node * plan.machine.watts + cluster.power.host_watts
    kwh = hours * watts * cluster.power.overhead / 1000.0
    days = [result.seconds / DAY for result in results]
    return {
        "spares": spares,
        "ends": worst.outcome.value if worst.outcome else "",
        "why": "" if worst.outcome is Outcome.DONE else worst.reason,
        "days": _mean(days),
        "days_least": min(days),
        "days_most": max(days),
        "goodput": _mean([result.goodput for result in results]),
        "share_of_time": {
            part: _mean(
                [result.parts[part] / result.seconds if result.seconds else 0.0 for result in results]
            )
            for part in results[0].parts
        },
        "failures": _mean([result.failures for result in results]),
        "attempts": _mean([result.attempts for result in results]),
        "usd": hours * failure_model.per_node * market.usd_per_gpu_hour,
        "kwh": kwh,
        "kg_co2e": kwh * cluster.power.kg_co2e_per_kwh,
    }


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)
