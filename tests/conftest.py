"""What every test may rely on: token authentication before Ray is imported, no hub, and that Ctrl-C is heard."""

import gc
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
os.environ["HF_HUB_OFFLINE"] = "1"
if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # as a shell has it for what a script runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" not in os.environ:
    CACHE = tempfile.TemporaryDirectory(prefix="orchestrator-tests-")  # what a machine remembers is no test's
    os.environ["XDG_CACHE_HOME"] = CACHE.name

settings.register_profile(
    "any machine", deadline=None
)  # an example's seconds are those of what else runs there
settings.load_profile("any machine")

# Tens of thousands of modules, functions and tests stay until the end; looking at them again and again, for what can be
# freed, takes a process a twelfth of its time.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but never what is there by now."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where files of other projects are; this project does not ship them."""
    shared = Path(__file__).parents[2] / "shared"
    parser.addoption("--kuberay-crds", type=Path, default=shared / "kuberay", help="folder of ray.io_*.yaml")
    parser.addoption(
        "--peers", type=Path, default=shared / "peers", help="folder of checkouts of other projects"
    )


@pytest.fixture
def checkout(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """A function that returns the checkout of a project by the name of its repository; it skips where it is absent."""

    def find(name: str) -> Path:
        folder: Path = pytestconfig.getoption("--peers") / name
        if not folder.is_dir():
            pytest.skip(f"{folder} is not there; give the folder of the checkout with --peers")
        return folder

    return find


class ByFile(LoadFileScheduling):
    """A file is run by one process, and those that bring up clusters by the same one: two that come up at the same
    moment may choose the same port. So are those that share a cluster, which is then started once."""

    TOGETHER = (
        ("test_chaos.py", "test_jobs.py", "test_local_cluster.py", "test_ssh_cluster.py"),
        ("test_failures.py", "test_ray_gang.py", "test_services.py", "test_on_ray.py"),
    )

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return next((files[0] for files in self.TOGETHER if file.endswith(files)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which process runs which tests; None for what xdist would do."""
    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Bytes are named by their argument: what is made at import (a gzip header holds the second) names a test otherwise
    in each worker process, and xdist then refuses to run any."""
    return argname if isinstance(val, bytes) else None
