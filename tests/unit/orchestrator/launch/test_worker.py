"""The worker that a job is planned for: named by its label, offered by the cluster, or this machine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import job

from cluster.workers.machine import Offer
from orchestrator.config.errors import InputError
from orchestrator.config.resources import ResourceSpec
from orchestrator.config.spec import JobSpec, parse
from orchestrator.launch import worker
from orchestrator.launch.worker import local_worker, worker_at, worker_named
from orchestrator.planner import device_profile
from orchestrator.resolve.precision import in_chosen_precision
from orchestrator.resolve.resolved_job import resolve
from orchestrator.train.config import Precision

ADDRESS = "127.0.0.1:1"


def spec(precision: str = "bf16", gpu: int = 1, **labels: str) -> JobSpec:
    document = job("a.txt", precision=precision)
    document["resources"]["per_worker"] = {
        "gpu": gpu,
        "labels": {"ray.io/accelerator-type": "H100"} if labels else {},
    }
    return parse(document)


def asked(spec: JobSpec) -> tuple[ResourceSpec, Precision]:
    return spec.resources, spec.train.dtype


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the cluster offers, which is asked for each time."""
    found: list[Any] = [None]
    monkeypatch.setattr(worker, "_offer", lambda bundle, most, address: found[0])
    return found


def test_the_label_says_it_before_the_cluster_does(offers: list[Any]) -> None:
    named = worker_named(spec(device="H100").resources)
    assert named is not None
    assert (
        named(*asked(spec(device="H100"))).name
        == worker_at(ADDRESS)(*asked(spec(device="H100"))).name
        == "h100"
    )
    assert worker_named(spec().resources) is worker_named(spec(gpu=0, device="H100").resources) is None
    offers[0] = Offer(1e11, "A100")
    assert worker_at(ADDRESS)(*asked(spec())).name == "a100-40-fused"


def test_a_gpu_that_nobody_knows_is_not_guessed(
    offers: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        device_profile, "calibrated_path", lambda: tmp_path / "none"
    )  # whoever has calibrated this machine
    with pytest.raises(InputError, match=r"no such worker yet.*ray\.io/accelerator-type"):
        in_chosen_precision(resolve(spec("auto")), worker_at(ADDRESS))
    assert in_chosen_precision(resolve(spec("auto", device="H100")), worker_at(ADDRESS)).precision is not None
    assert worker_at(ADDRESS)(*asked(spec(gpu=0))).name == "cpu-core"


def test_without_an_address_it_is_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_at(None) is local_worker
    one, two = (
        local_worker(*asked(parse(job("a.txt") | {"resources": {"workers": workers}}))) for workers in (1, 2)
    )
    assert one.memory == 2 * two.memory


def test_a_cluster_that_does_not_answer_is_told() -> None:
    with pytest.raises(InputError, match=ADDRESS):
        worker_at(ADDRESS)(*asked(spec()))
