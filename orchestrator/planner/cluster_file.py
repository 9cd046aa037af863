"""A cluster described by a file, which need not exist: its devices, failure rates, prices and power.

Default failure rates are those of 54 days of Llama 3 405B on 16,384 H100 (Llama Team, 2024, table 5). Of 419
interruptions 268 came from GPUs and their memory, 46 from hosts, 49 from the network and 56 from software.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from orchestrator.config.errors import InputError
from orchestrator.config.strict import StrictModel
from orchestrator.planner.model_file import Amount, PositiveAmount, read_model

GPU_HOURS = 16384 * 54 * 24.0
"""GPU hours in that report; a node has eight GPUs."""
DEFAULT_MARKET = "on-demand"


class Failures(StrictModel):
    """Mean hours between failures: of one GPU, and of one node by its host, its network and its software.

    After a software failure the node is available again at once, as it is after a hang, which is only noticed later. A
    rack that fails takes all of its nodes. Hangs and failures of racks are left out by default: that report counts no
    hangs of its own, and says nothing of racks.
    """

    gpu: PositiveAmount = round(GPU_HOURS / 268)
    host: PositiveAmount = round(GPU_HOURS / 8 / 46)
    network: PositiveAmount = round(GPU_HOURS / 8 / 49)
    software: PositiveAmount = round(GPU_HOURS / 8 / 56)
    hang: PositiveAmount | None = None
    rack: PositiveAmount | None = None

    def breaks(self, per_node: int) -> float:
        """Return a node's failures per hour that need a repair: the sum of the rates of GPUs, host and network."""
        return per_node / self.gpu + 1.0 / self.host + 1.0 / self.network


class Market(StrictModel):
    """A price. A spot market also has the mean hours between interruptions of a node, and until a replacement is
    available.
    """

    usd_per_gpu_hour: Amount
    hours_between_interruptions: PositiveAmount | None = None
    return_hours: PositiveAmount = 1.0


class Power(StrictModel):
    """Power of a node besides its devices, the overhead factor of cooling and supply, and the emissions of a kWh."""

    host_watts: Amount = 2000.0
    overhead: Annotated[float, Field(ge=1, le=100)] = 1.25
    kg_co2e_per_kwh: Amount = 0.4


class ClusterFile(StrictModel):
    """See `load`."""

    device: str
    nodes: Annotated[int, Field(ge=1, le=10**6)]
    spares: Annotated[int, Field(ge=0, le=10**6)] | None = Field(
        default=None,
        description="spare nodes, ready to step in; default: as many as pay off",
    )
    hours_between_failures: Failures = Failures()
    nodes_per_rack: Annotated[int, Field(ge=1, le=10**4)] = 4
    repair_hours: PositiveAmount = 12.0
    restart_seconds: PositiveAmount = 120.0
    write_bandwidth: PositiveAmount = Field(
        default=2e9, description="bytes per second at which a node writes commits"
    )
    markets: dict[str, Market] = Field(default={DEFAULT_MARKET: Market(usd_per_gpu_hour=0.0)})
    power: Power = Power()


def load(path: Path) -> ClusterFile:
    """Return the cluster that a YAML file describes. Raises InputError."""
    hint = "it needs device and nodes, as in docs/guides/planning.md"
    result = read_model(path, ClusterFile, "cluster", hint, "give a YAML file")
    if not result.markets:
        raise InputError("is not a cluster: markets names none", str(path), "name one, or leave it out")
    return result
