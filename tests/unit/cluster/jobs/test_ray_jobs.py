"""A cluster that asks for no token is refused, by a server that is one as far as that goes."""

from __future__ import annotations

import http.server
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.jobs.ray_jobs import Jobs, working_tree
from cluster.local.address import ClusterAddress, NoCluster


class Open(http.server.BaseHTTPRequestHandler):
    """Answers everybody."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b'{"ray_version": "2.60.0"}')

    def log_message(self, *words: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Open) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test and `Jobs` set is undone."""
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_an_open_cluster_is_refused_unless_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        NoCluster, match="asks for no token, so anyone may run code there; RAY_AUTH_MODE=disabled"
    ):
        Jobs(ClusterAddress(url, "", url), {})
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    Jobs(ClusterAddress(url, "", url), {})


def test_what_is_no_cluster_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Open, "status", 404)
    with pytest.raises(NoCluster, match="answers, but not as a Ray cluster does \\(404\\)"):
        Jobs(ClusterAddress(url, "", url), {})


def test_own_code_below_the_top_is_sent_along_whatever_its_folder_is_called(tmp_path: Path) -> None:
    """As Ray packs it."""
    from ray._private.runtime_env.packaging import create_package

    tree, package = tmp_path / "tree", tmp_path / "package.zip"
    kept = ["job.yaml", "mine/runs/net.py", "mine/venv/net.py", "mine/mlruns/net.py"]
    left = [
        "runs/a/job.yaml",
        "venv/a.py",
        "mlruns/a",
        "mlflow.db",
        "mine/a.safetensors",
        "mine/__pycache__/a.pyc",
    ]
    for name in (*kept, *left, "mine/extra.txt"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    create_package(
        str(tree), package, include_gitignore=False, excludes=working_tree(tree, ["*.txt"])["excludes"]
    )
    with zipfile.ZipFile(package) as archive:
        found = {name for name in archive.namelist() if not name.endswith("/")}
    assert found == set(kept)
