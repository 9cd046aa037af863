"""A rehearsal of the smallest job: every stage passes, and nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from jobs import TIMEOUT, job, write_job, write_text


@pytest.mark.slow
def test_a_small_job_passes_every_stage(tmp_path: Path) -> None:
    document = job(write_text(tmp_path), precision="auto")
    document["data"]["validation"] = {"share": 0.1}
    document |= {"evaluate": {}, "checkpoint": {"export": "hf"}, "resources": {"workers": 2}}
    with tempfile.TemporaryDirectory() as temporary:  # short, for the names of Ray's sockets
        ended = subprocess.run(
            [sys.executable, "-m", "orchestrator", "rehearse", str(write_job(tmp_path, document)), "--json"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": temporary},
            check=False,
        )
        left = [path.name for path in Path(temporary).glob("**/rehearsal-*")]
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout)
    assert {stage["verdict"] for stage in found["stages"]} == {"passed"}, found
    assert found["passed"]
    assert left == []
    assert not (tmp_path / "runs").exists()
    mine = [p for p in psutil.process_iter() if str(tmp_path) in " ".join(_command(p))]
    assert mine == []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
