"""A run's metrics at the port where a real Ray node exports its own to Prometheus."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from orchestrator.launch.prometheus_gauges import GAUGES, export

MONITORING = Path(__file__).parents[2] / "infra" / "monitoring"
ELSEWHERE = ("autoscaler_", "gpu", "gram", "ray_placement_groups", "_total{")
"""Of metrics that this machine has nothing to show of: it has no autoscaler and no GPU, and nothing has failed."""


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
def test_every_metric_is_exported_by_its_documented_name(exporting_cluster: Cluster) -> None:
    ray.init(address=exporting_cluster.address, logging_level="warning")
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


@contextlib.contextmanager
def prometheus(folder: Path, targets: list[str]) -> Iterator[str]:
    """The URL of a real Prometheus (Debian's package of that name) that scrapes them each second, with the label
    that infra/monitoring/podmonitors.yaml gives."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("there is no prometheus on the PATH: apt-get install prometheus")
    scrape = {"job_name": "ray", "scrape_interval": "1s", "static_configs": [{"targets": targets}]}
    scrape["static_configs"][0]["labels"] = {"ray_io_cluster": "tests"}  # type: ignore[index]
    rules = [str(MONITORING / "alerts.yaml")]
    settings = {"global": {"evaluation_interval": "1s"}, "rule_files": rules, "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(json.dumps(settings))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address={address}", "--log.level=error"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as server:
        try:
            yield f"http://{address}"
        finally:
            server.kill()


def asked(url: str, path: str, **query: str) -> Any:
    """The data of an answer; None while there is none."""
    try:
        answer = urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10)
    except OSError:
        return None
    found = json.load(answer)
    assert found["status"] == "success", found
    return found["data"]


@pytest.mark.slow
def test_a_real_prometheus_answers_every_expression_of_the_dashboard(
    exporting_cluster: Cluster, tmp_path: Path
) -> None:
    """And takes the alerts, none of whose expressions fails."""
    ray.init(address=exporting_cluster.address, logging_level="warning")
    try:
        reports = Reports.remote()
        ray.get(reports.port.remote())
        nodes = [f"{n['NodeManagerAddress']}:{n['MetricsExportPort']}" for n in ray.nodes() if n["Alive"]]
        dashboard = json.loads((MONITORING / "dashboard.json").read_text())
        wanted = {
            target["expr"].replace("$cluster", "tests")
            for panel in dashboard["panels"]
            for target in panel.get("targets", ())
        }
        with prometheus(tmp_path, nodes) as url:
            end, missing = time.monotonic() + 150, wanted
            while missing and time.monotonic() < end:
                time.sleep(1)
                results = {expr: asked(url, "query", query=expr) for expr in wanted}
                here = {expr for expr in wanted if not any(name in expr.lower() for name in ELSEWHERE)}
                missing = {expr for expr in here if not (results[expr] or {}).get("result")}
            assert missing == set()
            assert None not in results.values(), "each is answered, those with nothing to show too"
            parts = next(each for expr, each in results.items() if "step_part_seconds" in expr)["result"]
            assert [(p["metric"], p["value"][1]) for p in parts] == [
                ({"run": "base", "part": "data"}, "0.25")
            ]
            rules = [rule for group in asked(url, "rules")["groups"] for rule in group["rules"]]
            assert rules
            assert {rule["health"] for rule in rules} <= {"ok", "unknown"}, rules
            assert {rule["state"] for rule in rules} <= {"inactive", "pending"}, "nothing is wrong here"
    finally:
        ray.shutdown()
