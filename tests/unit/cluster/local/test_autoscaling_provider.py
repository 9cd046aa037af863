"""The configuration that Ray's autoscaler reads, by Ray's own reader; the provider that it makes of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cluster.local import node_processes
from cluster.local.autoscaling_provider import LocalNodeProvider, autoscaling_config
from cluster.local.node import NodeSpec


def config_of(tmp_path: Path) -> Any:
    from ray.autoscaler.v2.instance_manager.config import FileConfigReader

    node = NodeSpec("", "", cpus=2, gpus=1, resources={"TPU": 4}, labels={"ray.io/market-type": "spot"})
    other = NodeSpec("", "", cpus=4)
    text = (
        autoscaling_config([node, other], 1, 3, 12.0)
        .replace("{folder}", str(tmp_path))
        .replace("{network}", "77")
    )
    (tmp_path / "autoscaling.yaml").write_text(text)
    return FileConfigReader(
        str(tmp_path / "autoscaling.yaml"), skip_content_hash=True
    ).get_cached_autoscaling_config()


def provider_of(tmp_path: Path) -> LocalNodeProvider:
    from ray.autoscaler._private.providers import _get_node_provider

    config = config_of(tmp_path)
    found = _get_node_provider(config.get_config("provider"), config.get_config("cluster_name"))
    assert isinstance(found, LocalNodeProvider)
    return found


def test_ray_accepts_the_configuration(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    kinds = config.get_node_type_configs()
    first, second = kinds["worker-1"], kinds["worker-2"]
    assert (first.min_worker_nodes, first.max_worker_nodes) == (1, 3)
    assert first.resources == {"CPU": 2, "GPU": 1, "TPU": 4}
    assert first.labels == {"ray.io/market-type": "spot"}
    assert (second.resources, second.labels) == ({"CPU": 4}, {})
    assert config.get_max_num_worker_nodes() == 6
    assert kinds["head"].resources == {"CPU": 0}
    assert config.get_idle_timeout_s() == pytest.approx(12.0)
    assert config.disable_node_updaters()


def test_a_node_is_there_as_long_as_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what starts the process is exchanged, for a process that sleeps: Ray itself is in tests/ray."""
    import subprocess

    launched: list[NodeSpec] = []

    def launch(node: NodeSpec) -> subprocess.Popen[bytes]:
        launched.append(node)
        return subprocess.Popen(["sleep", "60"])

    monkeypatch.setattr(node_processes, "launch_node", launch)
    provider = provider_of(tmp_path)
    assert provider.non_terminated_nodes({}) == ["head"]
    tags = {"ray-node-type": "worker", "ray-user-node-type": "worker", "ray-launch-request": "r"}
    provider.create_node_with_resources_and_labels({}, tags, 2, {"CPU": 2, "TPU": 4}, {"a": "b"})
    first, second = provider.non_terminated_nodes({"ray-node-type": "worker"})
    assert (first, second) == ("127.0.77.2", "127.0.77.3")
    assert [(n.instance, n.kind, n.cpus, n.resources, n.labels) for n in launched] == [
        (ip, "worker", 2, {"TPU": 4}, {"a": "b"}) for ip in (first, second)
    ]
    assert provider.node_tags(first) == tags
    assert not provider.is_running(first)
    provider.terminate_node(first)
    assert provider.non_terminated_nodes({}) == ["head", second]
    provider._processes[second].kill()  # the cloud takes it back
    deadline = time.monotonic() + 10
    while not provider.is_terminated(second) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert provider.non_terminated_nodes({}) == ["head"]
    provider.create_node_with_resources_and_labels({}, tags, 1, {"CPU": 2}, {})
    (third,) = provider.non_terminated_nodes({"ray-node-type": "worker"})
    assert third == "127.0.77.4"
    provider.terminate_node(third)
