"""A run's metrics at the port where a real Ray node exports its own to Prometheus."""

from __future__ import annotations

import time
import urllib.request
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from orchestrator.launch.run_metrics import GAUGES, export


@ray.remote(num_cpus=0)
class Reports:
    """An actor that exports the metrics of a run that does not change, as a controller does."""

    def __init__(self) -> None:
        status: dict[str, Any] = {name.removeprefix("orchestrator_"): 3.0 for name in GAUGES}
        export("base", lambda: status | {"ranks": [{"state": "running"}] * 3, "step_parts": {"data": 0.25}})

    def port(self) -> tuple[str, int]:
        """The address and port where its node exports metrics."""
        mine = ray.get_runtime_context().get_node_id()
        [node] = [node for node in ray.nodes() if node["NodeID"] == mine]
        return node["NodeManagerAddress"], node["MetricsExportPort"]


@pytest.mark.slow
def test_every_metric_is_exported_by_its_documented_name(shared_cluster: Cluster) -> None:
    ray.init(address=shared_cluster.address, logging_level="warning")
    try:
        reports = Reports.remote()
        address, port = ray.get(reports.port.remote())
        wanted = {f"ray_{name}{{" for name in GAUGES} | {"ray_orchestrator_step_part_seconds{"}
        end, missing = time.monotonic() + 90, wanted
        while missing and time.monotonic() < end:
            text = urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=10).read().decode()
            lines = [line for line in text.splitlines() if 'run="base"' in line]
            missing = {name for name in wanted if not any(line.startswith(name) for line in lines)}
            time.sleep(0.5)
        assert missing == set()
        assert any(line.startswith("ray_orchestrator_step{") and line.endswith(" 3.0") for line in lines), (
            lines
        )
        assert any('part="data"' in line and line.endswith(" 0.25") for line in lines), lines
    finally:
        ray.shutdown()
