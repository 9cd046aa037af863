"""Fields of the user in rendered files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from render_job import JOB, TARGETS

from orchestrator.cli.app import call
from orchestrator.config.errors import InputError
from orchestrator.extensions.render.overlay import merged


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    return path


def rendered(target: str, job: Path, overlay: str | None, to: Path) -> tuple[int, dict[str, Any]]:
    words = [target, str(job), *TARGETS[target], "--to", str(to)]
    if overlay is not None:
        (job.parent / "overlay.yaml").write_text(overlay)
        words += ["--overlay", str(job.parent / "overlay.yaml")]
    with pytest.raises(SystemExit) as end:
        call(["cluster", "render", *words])
    assert isinstance(end.value.code, int)
    found = {path.name: yaml.safe_load(path.read_text()) for path in to.iterdir()} if to.exists() else {}
    return end.value.code, found


@pytest.mark.parametrize(
    ("document", "overlay", "expected"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}, {"a": {"b": 3, "c": 2}}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": None}}, {"a": {"c": 2}}),
        ({"a": 1}, {"b": {"c": None, "d": 1}}, {"a": 1, "b": {"d": 1}}),
        ({"a": 1}, {"a": {"b": 2}}, {"a": {"b": 2}}),
        ({"a": {"b": 2}}, {"a": [1]}, {"a": [1]}),
        ({"a": []}, {"a": [1]}, {"a": [1]}),
        (
            {"a": [{"name": "x", "v": 1}, {"name": "y"}]},
            {"a": [{"name": "z"}, {"name": "x", "v": 2}]},
            {"a": [{"name": "x", "v": 2}, {"name": "y"}, {"name": "z"}]},
        ),
        (
            {"a": [{"name": "x", "v": 1}, {"name": "x", "v": 2}]},
            {"a": [{"name": "x", "v": 3, "w": None}]},
            {"a": [{"name": "x", "v": 3}]},
        ),
        (
            {"a": [{"name": "x"}]},
            {"a": [{"name": "y", "l": [{"k": None, "v": 1}, None]}], "b": [[{"k": None}]]},
            {"a": [{"name": "x"}, {"name": "y", "l": [{"v": 1}]}], "b": [[{}]]},
        ),
        (
            {"m": [{"name": "runs", "mountPath": "/runs"}]},
            {"m": [{"name": "runs", "mountPath": "/old"}]},
            {"m": [{"name": "runs", "mountPath": "/runs"}, {"name": "runs", "mountPath": "/old"}]},
        ),
    ],
)
def test_documents_merge(document: Any, overlay: Any, expected: Any) -> None:
    before = yaml.safe_dump(document)
    assert merged(document, overlay) == expected
    assert yaml.safe_dump(document) == before


def test_a_replaced_list_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert merged({"t": {"l": [{"key": "a"}, 2]}}, {"t": {"l": [{"key": "b"}]}}) == {
        "t": {"l": [{"key": "b"}]}
    }
    assert capsys.readouterr().err == "note: t.l: the overlay's list replaces 2 rendered entries\n"


@pytest.mark.parametrize("name", [None, ["x"], 5])
def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(InputError, match=r"--overlay: t\.l: .* is no name; give each entry a text as name"):
        merged({"t": {"l": [{"name": "x"}]}}, {"t": {"l": [{"name": name}]}})


def test_a_sidecar_and_a_priority_reach_the_workers(job: Path, tmp_path: Path) -> None:
    overlay = """
RayJob:
  metadata: {annotations: {team: blue}}
  spec:
    backoffLimit: null
    rayClusterSpec:
      workerGroupSpecs:
        - groupName: cpu
          template:
            spec:
              priorityClassName: high
              containers:
                - name: ray-worker
                  env: [{name: NCCL_DEBUG, value: INFO}]
"""
    _, plain = rendered("kuberay", job, None, tmp_path / "plain")
    code, found = rendered("kuberay", job, overlay, tmp_path / "own")
    assert code == 0
    before, after = plain["rayjob.yaml"], found["rayjob.yaml"]
    assert after["metadata"].pop("annotations") == {"team": "blue"}
    del before["spec"]["backoffLimit"]
    [worker] = after["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert worker["template"]["spec"].pop("priorityClassName") == "high"
    env = worker["template"]["spec"]["containers"][0]["env"]
    assert env.pop() == {"name": "NCCL_DEBUG", "value": "INFO"}
    assert after == before
    assert {name: each for name, each in found.items() if name != "rayjob.yaml"} == {
        name: each for name, each in plain.items() if name != "rayjob.yaml"
    }


@pytest.mark.parametrize("target", ["aws", "gcp", "azure", "local", "skypilot"])
def test_one_file_is_merged_as_it_is(target: str, job: Path, tmp_path: Path) -> None:
    [(name, plain)] = rendered(target, job, None, tmp_path / "plain")[1].items()
    code, found = rendered(target, job, "own_field: {a: [1]}\n", tmp_path / "own")
    assert (code, found) == (0, {name: {**plain, "own_field": {"a": [1]}}})


@pytest.mark.parametrize(
    ("overlay", "says"),
    [
        (
            "RayCluster: {spec: {}}\n",
            "which this command does not render; it renders ConfigMap, NetworkPolicy, RayJob",
        ),
        ("- a\n", "must be a mapping"),
        (
            "RayJob: {spec: {rayClusterSpec: {workerGroupSpecs: [{groupName: gpu}]}}}\n",
            "--overlay: spec.rayClusterSpec.workerGroupSpecs: there is no group 'gpu'; groups: cpu",
        ),
        (
            "RayJob: {spec: {rayClusterSpec: {headGroupSpec: {template: {spec: {containers: null}}}}}}\n",
            "makes a manifest that is not complete ('containers')",
        ),
        ("RayJob: {spec: {env: {API_TOKEN: sk-abcdefghijklmnopqrstuvwx}}}\n", "carries a credential"),
        (
            "RayJob: {spec: {rayClusterSpec: {authOptions: {mode: disabled}}}}\n",
            "rayjob.yaml: authOptions.mode: token authentication is off",
        ),
    ],
)
def test_a_wrong_overlay_is_one_line_and_writes_nothing(
    overlay: str, says: str, job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = rendered("kuberay", job, overlay, tmp_path / "out")
    said = capsys.readouterr().err
    assert (code, found, len(said.strip().splitlines())) == (2, {}, 1)
    assert says in said
