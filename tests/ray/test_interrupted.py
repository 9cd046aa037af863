"""An embedded Ray and the end of its driver: told in a line, and nothing outlives it."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
from jobs import slow_job, started, status, wait_for, write_job, write_text
from prepared import with_data


def family(pid: int) -> list[psutil.Process]:
    """All that a process has started, directly or not."""
    return psutil.Process(pid).children(recursive=True)


def test_a_signal_before_ray_is_up_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    path = write_job(tmp_path, slow_job(write_text(tmp_path / "corpus", 40_000)))
    with started("run", path, cwd=tmp_path) as process:

        def starting() -> list[psutil.Process]:
            return [child for child in family(process.pid) if child.name() == "gcs_server"]

        wait_for(starting, "Ray to begin to start")
        members = family(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 1, (tmp_path / "output.txt").read_text()
        _, alive = psutil.wait_procs(members, timeout=30)
        assert alive == []
    assert (tmp_path / "output.txt").read_text().splitlines()[-1].startswith("orchestrator: interrupted")
    assert not (tmp_path / "runs").exists()


def test_nothing_outlives_a_driver_that_is_killed(tmp_path: Path) -> None:
    document = with_data(slow_job(write_text(tmp_path / "corpus", 40_000), steps=500), tmp_path / "data")
    document["resources"]["workers"] = 1
    path = write_job(tmp_path, document)
    with started("run", path, cwd=tmp_path) as process:
        wait_for(lambda: status(tmp_path / "runs/small").get("step", 0) >= 2, "a step")
        members = family(process.pid)
        assert any("agent" in " ".join(member.cmdline()) for member in members)
        process.kill()
        _, alive = psutil.wait_procs(members, timeout=30)
        assert [(member.pid, member.cmdline()[:4]) for member in alive] == []
