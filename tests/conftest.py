"""What every test may rely on: token authentication before Ray is imported, and no hub."""

import os
from pathlib import Path

import pytest

os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where KubeRay's CRD files are; the project does not ship them."""
    beside = Path(__file__).parents[2] / "shared" / "kuberay"
    parser.addoption("--kuberay-crds", type=Path, default=beside, help="folder of ray.io_*.yaml")
