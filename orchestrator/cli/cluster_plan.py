"""The option --cluster of the command plan: forecasts for a cluster that need not exist here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.train.config import TrainSpec

if TYPE_CHECKING:
    from orchestrator.planner.cluster_file import ClusterFile


def read_cluster(path: Path) -> tuple[ClusterFile, int]:
    """Read a cluster file. Return the cluster and the number of workers on its nodes. Raises InputError."""
    from orchestrator.planner.cluster_file import load
    from orchestrator.planner.device_profile import load as load_profile

    cluster = load(path)
    return cluster, cluster.nodes * load_profile(cluster.device).per_node


def show_forecast(train: TrainSpec, result: dict[str, Any]) -> None:
    """Print the result of `forecast`."""
    from orchestrator.cli.options import table
    from orchestrator.observe.formatting import count, duration

    def days(value: float) -> str:
        return f"{value:.1f} days" if value >= 1.0 else duration(value * 86400.0)

    commit = result["commit"]
    print(
        f"{result['nodes_in_use']} of {result['nodes']} nodes, {count(result['tokens_per_day'])} tokens per day, "
        f"{days(result['days_without_failures'])} for {count(train.steps)} steps if nothing failed."
    )
    rows = [
        [
            name,
            market["ends"],
            f"{days(market['days'])} ({days(market['days_least'])} to {days(market['days_most'])})",
            f"{market['goodput']:.1%}",
            f"{market['usd']:,.0f}",
            f"{market['kwh']:,.0f}",
            f"{market['kg_co2e']:,.0f}",
            f"{market['failures']:.0f}",
            str(market["spares"]),
        ]
        for name, market in result["markets"].items()
    ]
    columns = ["market", "ends", "takes", "goodput", "USD", "kWh", "kg CO2e", "failures", "spares"]
    table("Forecast: the mean of some simulated runs, with the controller's own decisions", columns, rows)
    for name, market in result["markets"].items():
        best, parts = market["young_daly"], market["share_of_time"]
        spent = ", ".join(f"{part} {share:.1%}" for part, share in parts.items() if share >= 0.0005)
        print(
            f"{name}: a failure each {duration(3600 * market['hours_between_failures'])}; time went to {spent}."
        )
        snapshots = commit["snapshot_every_steps"]
        advice = (
            f"one lost node goes back to a snapshot, made every {snapshots} steps in another node's memory"
            if snapshots
            else f"least is lost with one each {best['every_steps']} ({duration(best['seconds'])}), "
            f"goodput {best['goodput']:.1%}"
        )
        print(f"  A commit each {commit['every_steps']} steps; {advice}.")
        if market["why"]:
            print(f"  It ended so: {market['why']}.")
        more = [f"{c['spares']}: {days(c['days'])}, {c['usd']:,.0f} USD" for c in market["by_spares"]]
        print(f"  By spare nodes: {'; '.join(more)}.")
