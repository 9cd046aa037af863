"""SkyPilot's task file as text; by SkyPilot's own checks where that is installed."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.local.allocation import spec_of
from orchestrator.extensions.render.cluster_needs import ClusterNeeds
from orchestrator.extensions.render.skypilot import TOKEN, SkyPilotOptions, task, task_text

GPUS = ClusterNeeds("gpt", "i", 4, 16, cpu=3.0, gpu=1, per_node=4, accelerators=("H100", "A100"), spot=True)


def rendered(needs: ClusterNeeds, **options: Any) -> dict[str, Any]:
    text = task_text(task(needs, SkyPilotOptions("/w", **options), ["python", "run", "a b.yaml"], "python"))
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def test_it_asks_for_the_nodes_of_the_job() -> None:
    task = rendered(GPUS, infra="aws/us-east-1", setup="pip install it")
    assert (task["name"], task["num_nodes"], task["workdir"], task["setup"]) == (
        "gpt",
        4,
        "/w",
        "pip install it",
    )
    assert task["resources"] == {
        "cpus": "12+", "memory": "16+", "use_spot": True, "job_recovery": {"recover_on_exit_codes": [75]},
        "accelerators": {"H100": 4, "A100": 4}, "infra": "aws/us-east-1",
    }  # fmt: skip
    assert task["secrets"] == {TOKEN: None}
    assert "python run 'a b.yaml' --address" in task["run"]
    plain = rendered(ClusterNeeds("gpt", "i", 2, 2), image="me/it:1")
    assert plain["resources"]["image_id"] == "docker:me/it:1"
    assert not {"accelerators", "infra"} & plain["resources"].keys()
    assert "setup" not in plain


@pytest.mark.parametrize("part", ["run", "hook"])
def test_its_scripts_are_shell(part: str, tmp_path: Path) -> None:
    task = rendered(GPUS)
    script = task["run"] if part == "run" else task["config"]["hooks"][0]["run"]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_without_the_secret_it_ends_with_a_line(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", rendered(GPUS)["run"]],
        env={},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert f"{TOKEN}: is not set: give --secret" in done.stderr


def test_each_node_knows_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPILOT_NODE_RANK", "1")
    monkeypatch.setenv("SKYPILOT_NODE_IPS", "10.0.0.1\n10.0.0.2\n")
    assert spec_of("/f", "10.0.0.1", 6000, 8, 2, 1).ip == "10.0.0.2"


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("sky") is None, reason="skypilot is not installed: the task was not checked by it"
)
@pytest.mark.parametrize("needs", [GPUS, ClusterNeeds("cpus", "i", 2, 2)], ids=["gpus", "cpus"])
def test_skypilot_takes_it(needs: ClusterNeeds, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    monkeypatch.setenv("IS_SKYPILOT_SERVER", "1")  # else it lets unknown keys pass
    monkeypatch.setenv("HOME", str(tmp_path))
    import sky
    from sky.utils import common_utils, schemas

    task = rendered(needs, infra="aws/us-east-1", setup="pip install it") | {"workdir": str(tmp_path)}
    common_utils.validate_schema(task, schemas.get_task_schema(), "")
    common_utils.validate_schema(task["resources"], schemas.get_resources_schema(), "")
    with pytest.raises(ValueError, match="use_spot"):
        common_utils.validate_schema(
            task["resources"] | {"use_spott": True}, schemas.get_resources_schema(), ""
        )
    if needs.gpu:  # whether a cloud has such devices, it looks up on the net
        return
    task["resources"].pop("infra")
    found = sky.Task.from_yaml_config(task, secrets_overrides=[(TOKEN, "x")])
    (resources,) = found.resources
    assert (found.num_nodes, resources.use_spot, resources.cpus) == (2, False, "1+")
    assert resources.job_recovery["recover_on_exit_codes"] == [75]
