"""A cluster that need not be here, as a file: its devices, how often its parts fail, what it costs and burns.

Where the file says nothing of failures, they are those of the 54 days of Llama 3 405B on 16,384 H100 (Llama Team, 2024,
table 5): of 419 interruptions 268 were of GPUs and their memory, 46 of hosts, 49 of the network and 56 of software.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from orchestrator.config.errors import InputError
from orchestrator.config.strict import StrictModel
from orchestrator.planner.model_file import Amount, PositiveAmount, read_model

GPU_HOURS = 16384 * 54 * 24.0
"""Hours of all GPUs in that report; a node has eight."""
MARKET = "on-demand"


class Failures(StrictModel):
    """Hours between two failures of one GPU, and of one node by its host, its network and its software; after one of
    the software the node is there again at once."""

    gpu: PositiveAmount = round(GPU_HOURS / 268)
    host: PositiveAmount = round(GPU_HOURS / 8 / 46)
    network: PositiveAmount = round(GPU_HOURS / 8 / 49)
    software: PositiveAmount = round(GPU_HOURS / 8 / 56)

    def breaks(self, per_node: int) -> float:
        """Failures an hour of one node after which it is repaired."""
        return per_node / self.gpu + 1.0 / self.host + 1.0 / self.network


class Market(StrictModel):
    """A price; of a spot market also the hours between two interruptions of a node, and until another one is there."""

    usd_per_gpu_hour: Amount
    hours_between_interruptions: PositiveAmount | None = None
    return_hours: PositiveAmount = 1.0


class Power(StrictModel):
    """What a node takes beside its devices, what cooling and supply add to all of it, and what a kWh emits."""

    host_watts: Amount = 2000.0
    overhead: Annotated[float, Field(ge=1, le=100)] = 1.25
    kg_co2e_per_kwh: Amount = 0.4


class ClusterFile(StrictModel):
    """See `load`."""

    device: str
    nodes: Annotated[int, Field(ge=1, le=10**6)]
    spares: Annotated[int, Field(ge=0, le=10**6)] | None = Field(
        default=None,
        description="nodes beside them, ready to step in; as many as are worth it if it is not said",
    )
    hours_between_failures: Failures = Failures()
    repair_hours: PositiveAmount = 12.0
    restart_seconds: PositiveAmount = 120.0
    write_bandwidth: PositiveAmount = Field(
        default=2e9, description="bytes per second at which a node writes commits"
    )
    markets: dict[str, Market] = Field(default={MARKET: Market(usd_per_gpu_hour=0.0)})
    power: Power = Power()


def load(path: Path) -> ClusterFile:
    """The cluster that a YAML file describes. Raises InputError."""
    hint = "it needs device and nodes, as in docs/guides/planning.md"
    found = read_model(path, ClusterFile, "cluster", hint, "give a YAML file")
    if not found.markets:
        raise InputError("is no cluster: markets names none", str(path), "name one, or leave it out")
    return found
