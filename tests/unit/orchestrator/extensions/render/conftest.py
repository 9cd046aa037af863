"""Needs of several kinds of job, and KubeRay's schema where there is one."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from orchestrator.extensions.render.cluster_needs import ClusterNeeds
from orchestrator.extensions.render.manifests import load_schemas

CPU = ClusterNeeds("plain", "image:1", 1, 2)
SPOT_GPU = ClusterNeeds(
    "big", "image:1", 3, 16, cpu=8, gpu=1, memory_gib=64, per_node=4, accelerators=("H100", "A100"), spot=True
)
ODD = ClusterNeeds("odd", "image:1", 1, 5, cpu=1.5, memory_gib=2.5, per_node=2)
NEEDS = {"cpu": CPU, "spot-gpu": SPOT_GPU, "odd": ODD}


@pytest.fixture(scope="session")
def schemas(pytestconfig: pytest.Config) -> dict[str, dict[str, Any]]:
    folder: Path = pytestconfig.getoption("--kuberay-crds")
    if not list(folder.glob("ray.io_*.yaml")):
        pytest.skip(f"KubeRay's CRD files are not in {folder}; give their folder with --kuberay-crds")
    return load_schemas(folder)


@pytest.fixture(params=sorted(NEEDS))
def needs(request: pytest.FixtureRequest) -> ClusterNeeds:
    return NEEDS[request.param]


@pytest.fixture(scope="session", autouse=True)
def _built_once() -> Iterator[None]:
    """Typer builds all commands anew at every call, which takes longer than most of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.main.get_command", functools.cache(get_command))
        yield
