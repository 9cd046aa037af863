"""Functions that run in processes of their own on a real cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import WorkerCrashedError

from cluster.workers import ray_internals
from cluster.workers.on_ray import RayTask
from orchestrator.config.errors import InputError
from orchestrator.export.target import check_target


@pytest.fixture(autouse=True)
def _connected(cluster: Cluster) -> Iterator[None]:
    ray.init(address=cluster.address, logging_level="warning")
    yield
    ray.shutdown()


def test_what_a_task_raises_is_what_its_result_raises(tmp_path: Path) -> None:
    """Not Ray's text, which is a trace of the worker."""
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError) as wrong:
        RayTask(check_target, str(tmp_path)).result()
    with pytest.raises(InputError) as wanted:
        check_target(str(tmp_path))
    assert str(wrong.value) == str(wanted.value)
    with pytest.raises(FileExistsError, match=r"^\[Errno 17\] File exists: '.*thesis\.tex'$"):
        RayTask(os.makedirs, str(tmp_path / "thesis.tex")).result()


def test_a_process_that_dies_beside_a_full_disk_of_ray_s_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk is full where more is wanted free than any disk has."""

    def die() -> None:
        os._exit(1)

    with pytest.raises(WorkerCrashedError):
        RayTask(die).result()
    monkeypatch.setattr(ray_internals, "LEAST_FREE", 2**80)
    with pytest.raises(OSError, match="the disk of Ray's folder is full: '/"):
        RayTask(die).result()
