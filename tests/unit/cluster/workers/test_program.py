"""This program's own processes run its own packages, whatever the working directory holds."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import orchestrator
from cluster import job_folders_last
from cluster.workers.program import (
    command_of,
    environment_of_ranks,
    hidden_modules,
    hidden_packages,
    keeper,
)
from orchestrator.config.packages import PACKAGES

ENTRY = "orchestrator.train.loop:main"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with packages of the same names."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('the {name} of the user')\n")
    return tmp_path


def test_which_packages_would_be_taken_for_those_of_this_program(folder: Path) -> None:
    assert {Path(place).name for place in hidden_packages([str(folder)], PACKAGES)} == set(PACKAGES)
    (folder / "orchestrator" / "__init__.py").unlink()  # hides an editable install all the same
    (folder / "cluster" / "workers").mkdir()
    (folder / "cluster" / "workers" / "gang.py").touch()  # this program's own
    assert {Path(place).name for place in hidden_packages([str(folder)], PACKAGES)} == {
        "orchestrator",
        "workloads",
    }
    assert hidden_packages([str(Path(orchestrator.__file__).parents[1])], PACKAGES) == []


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
    code = command_of("cluster.workers.fork_server", target=ENTRY)[-2].replace("; main()", "")
    code += "; import orchestrator.train.training_progress; print(orchestrator.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code, "cluster.workers.fork_server"],
        capture_output=True, text=True, cwd=folder, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == orchestrator.__file__, done.stderr


def test_a_worker_of_ray_keeps_this_program_s(folder: Path) -> None:
    """As Ray's workers, which have the working directory first on their path and get the function by value."""
    body = textwrap.dedent(inspect.getsource(keeper(PACKAGES)))
    root = str(Path(orchestrator.__file__).parents[1])
    code = "import sys; sys.argv = ['/ray/_private/workers/default_worker.py']\n"
    code += f"sys.path[:] = [{str(folder)!r}, '/ray/_private/workers', {str(folder)!r}, *sys.path]\n"
    code += f"root = {root!r}\nnames = {PACKAGES!r}\n{body}\nkeep_packages()\n"
    code += "import orchestrator.config.spec, cluster.workers.gang; print(orchestrator.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, timeout=60
    )
    assert done.stdout.strip() == orchestrator.__file__, done.stderr


def test_a_file_of_the_user_s_hides_no_module_in_a_process_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray puts the working directory first; a random.py there ended the start of every rank in a traceback."""
    for name in ("random", "torch"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('the {name} of the user')\n")
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = command_of("cluster.workers.fork_server", target=ENTRY)
    command[3] = command[3].replace("; main()", "; import random, torch, mine; print(mine.__file__)")
    done = subprocess.run(command, capture_output=True, text=True, env=environment_of_ranks(), timeout=60)
    assert done.stdout.strip() == str(tmp_path / "mine.py"), done.stderr


def test_in_a_worker_of_ray_the_folders_of_the_job_come_last() -> None:
    program = "/env/site-packages/ray/_private/workers/default_worker.py"
    theirs = ["/env/site-packages/ray/thirdparty_files", os.path.dirname(program), "/set/by/the/user", "/lib"]
    assert job_folders_last(["/job", *theirs], program) == [*theirs, "/job"]
    assert job_folders_last(["/job", *theirs[:2], "/job", *theirs[2:]], program) == [*theirs, "/job"]
    assert job_folders_last(theirs, program) == theirs
    assert job_folders_last(["/job", *theirs], "/home/me/train.py") == ["/job", *theirs]


def test_what_a_folder_that_comes_first_would_hide(tmp_path: Path) -> None:
    for name in ("random.py", "numpy.py", "train.py", "data.py"):
        (tmp_path / name).touch()
    for name in ("logging", "torch", "mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "logging" / "__init__.py").touch()  # a folder without one hides nothing
    (tmp_path / "mine" / "__init__.py").touch()
    assert set(hidden_modules(tmp_path)) == {"logging", "numpy.py", "random.py"}
