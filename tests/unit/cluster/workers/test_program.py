"""This program's own processes run its own packages, whatever the working directory holds."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import orchestrator
from cluster.workers.program import PACKAGES, command_of, hidden_packages, keeper


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with packages of the same names."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('the {name} of the user')\n")
    return tmp_path


def test_which_packages_would_be_taken_for_those_of_this_program(folder: Path) -> None:
    assert {Path(place).name for place in hidden_packages([str(folder)])} == set(PACKAGES)
    (folder / "orchestrator" / "__init__.py").unlink()  # hides an editable install all the same
    (folder / "cluster" / "workers").mkdir()
    (folder / "cluster" / "workers" / "gang.py").touch()  # this program's own
    assert {Path(place).name for place in hidden_packages([str(folder)])} == {"orchestrator", "workloads"}
    assert hidden_packages([str(Path(orchestrator.__file__).parents[1])]) == []


def test_a_process_that_is_started_has_this_program_s(folder: Path) -> None:
    done = subprocess.run(
        command_of("orchestrator.checkpoint.sidecar"),
        input="",
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
    )
    assert "of the user" not in done.stderr
    assert "sidecar" in done.stderr  # it asks for its settings, of which there are none
    code = command_of("cluster.workers.fork_server")[2].replace("; main()", "")
    code += "; import orchestrator.train.progress; print(orchestrator.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code, "cluster.workers.fork_server"],
        capture_output=True, text=True, cwd=folder, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == orchestrator.__file__, done.stderr


def test_a_worker_of_ray_keeps_this_program_s(folder: Path) -> None:
    """As Ray's workers, which have the working directory first on their path and get the function by value."""
    body = textwrap.dedent(inspect.getsource(keeper()))
    code = f"root = {str(Path(orchestrator.__file__).parents[1])!r}\n{body}\nkeep_packages()\n"
    code += "import orchestrator.job.spec, cluster.workers.gang; print(orchestrator.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, timeout=60
    )
    assert done.stdout.strip() == orchestrator.__file__, done.stderr
