"""A user's own folders `cluster` and `workloads` are found, and do not hide those of this project: in the command, in
Ray's workers, fork servers and ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import TIMEOUT
from local_nodes import two_nodes

NET = """
import torch
import workloads.helper
from cluster import secret
from torch import nn
from workloads.helper import scale

class Points:
    def __len__(self): return 64
    def sample(self, number, rng):
        x = rng.standard_normal(4)
        return {"x": x, "y": x.sum() * secret}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1)
    def loss(self, batch): return (self.line(batch["x"])[:, 0] * scale - batch["y"]).square()
"""
JOB = """
name: own
workload: {model: "workloads.net:Net"}
data: {samples: "workloads.net:Points"}
train: {steps: 4, global_batch: 8, optimizer: {lr: 0.05}}
resources: {workers: {min: 2, max: 2}}
checkpoint: {every: 2, export: safetensors}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with two packages of the user's."""
    for name in ("cluster", "workloads"):
        (tmp_path / name).mkdir()
    (tmp_path / "cluster" / "__init__.py").write_text("secret = 2.0\n")
    (tmp_path / "workloads" / "__init__.py").write_text("raise ImportError('the package of the user')\n")
    (tmp_path / "workloads" / "helper.py").write_text("scale = 1.0\n")
    (tmp_path / "workloads" / "net.py").write_text(NET.replace("from cluster import secret", "secret = 2.0"))
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


@pytest.mark.slow
def test_a_run_beside_a_package_of_the_name_of_this_program(folder: Path) -> None:
    """The command's own path does not begin with the working directory, as that of `python -m` does."""
    (folder / "orchestrator").mkdir()
    (folder / "orchestrator" / "__init__.py").write_text("raise ImportError('the package of the user')\n")
    command = [Path(sys.executable).parent / "orchestrator", "run", "job.yaml", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert json.loads(done.stdout)["summary"]["state"] == "done"


@pytest.mark.slow
def test_files_of_the_user_s_hide_no_module_of_python_or_of_a_package(tmp_path: Path) -> None:
    folder = tmp_path
    net = NET.replace("from cluster import secret", "secret = 2.0").replace("workloads.helper", "helper")
    (folder / "net.py").write_text(net)
    (folder / "helper.py").write_text("scale = 1.0\n")
    (folder / "job.yaml").write_text(JOB.replace("workloads.net", "net"))
    for name in ("json", "logging", "numpy", "random", "torch", "types"):
        (folder / f"{name}.py").write_text("raise ImportError('the module of the user')\n")
    command = [Path(sys.executable).parent / "orchestrator", "run", "job.yaml", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert json.loads(done.stdout)["summary"]["attempts"] == 1


@pytest.mark.slow
def test_a_run_in_a_folder_with_packages_of_the_same_names(folder: Path) -> None:
    command = [sys.executable, "-m", "orchestrator", "run", "job.yaml", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    about = json.loads((folder / "runs" / "own" / "export" / "own.json").read_text())
    assert about["model"] == "workloads.net:Net"


@pytest.mark.slow
def test_a_program_that_has_a_cluster_of_its_own(folder: Path) -> None:
    (folder / "main.py").write_text(
        "import cluster\nfrom orchestrator import Job\nimport cluster.workers.gang, workloads.load\n"
        "from workloads.own.object_reference import load\n"
        "print(cluster.secret, Job.load('job.yaml').name, load('workloads.net:Net').__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "main.py"], capture_output=True, text=True, cwd=folder, timeout=TIMEOUT
    )
    assert done.stdout.split() == ["2.0", "own", "Net"], done.stderr[-2000:]


@pytest.mark.slow
def test_a_folder_with_such_packages_submits_itself(folder: Path) -> None:
    (folder / "orchestrator").mkdir()  # a folder, and no package
    with two_nodes("itself") as local:
        command = [Path(sys.executable).parent / "orchestrator", "submit", "job.yaml", "--working-dir", "."]
        command += ["--wait", "--run-dir", folder / "run", "--address", local.dashboard, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=TIMEOUT)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        (folder / "orchestrator" / "__init__.py").touch()
        refused = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=TIMEOUT)
    assert (folder / "run" / "export" / "model.safetensors").exists()
    assert refused.returncode == 2
    assert "orchestrator in it would be taken for this program there" in refused.stderr


@pytest.mark.slow
def test_what_is_sent_along_may_have_packages_of_the_same_names(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The command's own folder has none of the code: it is in the folder that is sent."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    with two_nodes("packages") as local:
        command = [
            sys.executable,
            "-m",
            "orchestrator",
            "submit",
            folder / "job.yaml",
            "--working-dir",
            folder,
            "--wait",
        ]
        command += ["--run-dir", elsewhere / "run", "--address", local.dashboard, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=elsewhere, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert (elsewhere / "run" / "export" / "model.safetensors").exists()
