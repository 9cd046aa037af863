"""A wheel in an environment of its own, in which every process lacks the libraries that a rank's image does without."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from jobs import TIMEOUT, job, write_job, write_text

ROOT = Path(__file__).parents[2]
HIDE = """
import importlib.machinery as machinery
whole = machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    hidden = name.partition(".")[0] in ("mlflow", "optuna", "sklearn", "matplotlib")
    return None if hidden else whole(name, path, target)
machinery.PathFinder.find_spec = staticmethod(find_spec)
"""


def call(*command: object, cwd: Path = ROOT) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_wheel_trains_in_an_environment_without_what_ranks_do_not_need(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves files beside what it builds
    for name in ("orchestrator", "workloads", "cluster"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    call(sys.executable, "-m", "uv", "build", "--wheel", "--out-dir", tmp_path / "dist", source)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    call(sys.executable, "-m", "uv", "venv", "--python", sys.executable, tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    call(sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--python", python, wheel)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "venv" / "lib" / version / "site-packages"
    # Its dependencies are those of this environment, without the editable install: a .pth within is not followed.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "sitecustomize.py").write_text(HIDE)
    where = json.loads(
        call(python, "-c", "import orchestrator, cluster, workloads, json; print(json.dumps(["
             "m.__file__ for m in (orchestrator, cluster, workloads)]))", cwd=tmp_path)
    )  # fmt: skip
    assert all(str(site) in place for place in where)
    call(
        python,
        "-c",
        "import sys\ntry:\n  import mlflow\nexcept ImportError: sys.exit(0)\nsys.exit(1)",
        cwd=tmp_path,
    )

    document: dict[str, Any] = job(write_text(tmp_path / "corpus"), steps=4) | {"checkpoint": {"every": 2}}
    document.pop("tracking", None)
    write_job(tmp_path, document)
    command = tmp_path / "venv" / "bin" / "orchestrator"
    assert "evaluate" in call(command, "--help", cwd=tmp_path)
    found = json.loads(call(command, "run", "job.yaml", "--json", cwd=tmp_path))
    assert found["summary"]["state"] == "done"
    assert (Path(found["run_dir"]) / "export" / "model.safetensors").exists()
    assert (Path(found["run_dir"]) / "report.html").exists()
