"""What kubectl and an API server say of a render: the real kubectl, and a server that checks as a strict one does."""

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from orchestrator.config.errors import InputError
from orchestrator.extensions.render import kuberay
from orchestrator.extensions.render.cluster_needs import ClusterNeeds
from orchestrator.extensions.render.kubernetes import ask_server, check_queue, redis_at, store_at
from orchestrator.extensions.render.manifests import strict, violations
from orchestrator.extensions.render.pods import Kubernetes

NEEDS = ClusterNeeds("r", "i", 1, 1)
KINDS = {
    "ray.io/v1": {"rayjobs": "RayJob", "rayclusters": "RayCluster"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "v1": {"configmaps": "ConfigMap"},
}
CONFIG_MAP = {
    "type": "object",
    "properties": {
        **{name: {"type": "string"} for name in ("apiVersion", "kind")},
        "metadata": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "data": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


class Server(BaseHTTPRequestHandler):
    """Discovery, and dry runs that are refused as the schemas say."""

    schemas: ClassVar[dict[str, Any]] = {"ConfigMap": strict(CONFIG_MAP)}
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self._say(*_discovered(self.path.partition("?")[0]))

    def do_PATCH(self) -> None:
        self.asked.append(self.path)
        given = yaml.safe_load(self.rfile.read(int(self.headers["content-length"])))
        lines = violations(given, self.schemas)
        if lines:
            self._say(400, _status(400, "BadRequest", lines[0]))
        else:
            self._say(200, given)

    def _say(self, code: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _status(code: int, reason: str, message: str) -> dict[str, Any]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return {**status, "reason": reason, "message": message, "code": code}


def _place(version: str) -> str:
    return f"apis/{version}" if "/" in version else f"api/{version}"


def _discovered(path: str) -> tuple[int, dict[str, Any]]:
    if path == "/api":
        return 200, {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = [{"groupVersion": v, "version": "v1"} for v in KINDS if "/" in v]
        groups = [
            {"name": v["groupVersion"].partition("/")[0], "versions": [v], "preferredVersion": v}
            for v in versions
        ]
        return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "/openapi/v3":
        return 200, {"paths": {_place(v): {"serverRelativeURL": f"/openapi/v3/{v}"} for v in KINDS}}
    for version, kinds in KINDS.items():
        if path == f"/{_place(version)}":
            verbs = ["get", "patch", "create"]
            found = [{"name": n, "kind": k, "namespaced": True, "verbs": verbs} for n, k in kinds.items()]
            return 200, {"kind": "APIResourceList", "groupVersion": version, "resources": found}
        if path == f"/openapi/v3/{version}":
            asked = [
                {"name": n, "in": "query", "schema": {"type": "string"}}
                for n in ("dryRun", "fieldValidation")
            ]
            group = version.rpartition("/")[0]
            patches = {
                f"/{kind}": {
                    "patch": {
                        "parameters": asked,
                        "responses": {},
                        "x-kubernetes-group-version-kind": {"group": group, "version": "v1", "kind": kind},
                    }
                }
                for kind in kinds.values()
            }
            return 200, {"openapi": "3.0.0", "info": {"title": "t", "version": "1"}, "paths": patches}
    return 404, _status(404, "NotFound", "there is no such thing")


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    monkeypatch.setenv("HOME", str(tmp_path))  # where kubectl keeps what it has discovered
    monkeypatch.setattr(Server, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "current-context": "c",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(document))
    yield path
    server.shutdown()
    thread.join()
    server.server_close()


def files() -> dict[str, Any]:
    return kuberay.manifests(NEEDS, Kubernetes(), "name: x\n", "s3://b/r")


def test_a_server_is_asked_about_each_file_and_keeps_nothing(kubeconfig: Path) -> None:
    ask_server(files() | {"raycluster.yaml": kuberay.ray_cluster(NEEDS, Kubernetes())}, kubeconfig)
    kinds = [path.split("/")[-2] for path in Server.asked]
    assert kinds == ["configmaps", "networkpolicies", "rayjobs", "rayclusters"]
    assert all("dryRun=All" in path and "fieldValidation=Strict" in path for path in Server.asked)


def test_what_it_refuses_is_one_line(kubeconfig: Path) -> None:
    wrong = files()
    wrong["configmap.yaml"]["dta"] = {}
    with pytest.raises(InputError, match=r"configmap\.yaml.*'dta' was unexpected") as error:
        ask_server(wrong, kubeconfig)
    assert "\n" not in str(error.value)


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kubeconfig").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="kubectl is not there"):
        ask_server(files(), tmp_path / "kubeconfig")


@pytest.mark.parametrize(
    "queue", ["slurm", "kueue:", "kueue:a b", "kueue:Team", "volcano:-a", f"kueue:{'a' * 64}"]
)
def test_what_is_no_name_of_a_queue(queue: str) -> None:
    with pytest.raises(InputError, match=r"--queue: .* is not a queue; write kueue:NAME or volcano:NAME"):
        check_queue(queue, "default", None)


def test_a_queue_that_the_cluster_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job would wait for it without end. The kubectl is one that knows the queues of a team."""
    kubectl, kubeconfig = tmp_path / "kubectl", tmp_path / "kubeconfig"
    kubectl.write_text(
        """#!/bin/sh
case "$*" in
  *"get localqueues.kueue.x-k8s.io team --namespace ours "*|*"get queues.scheduling.volcano.sh team "*) echo found;;
  *) echo 'Error from server (NotFound): there is none' >&2; exit 1;;
esac
"""
    )
    kubectl.chmod(0o755)
    kubeconfig.touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    check_queue("kueue:team", "ours", kubeconfig)
    check_queue("volcano:team", "ours", kubeconfig)
    for queue, namespace in (("kueue:other", "ours"), ("kueue:team", "theirs")):
        with pytest.raises(
            InputError, match=rf"--queue {queue}: there is no such queue \(.*NotFound.*; see `kubectl"
        ):
            check_queue(queue, namespace, kubeconfig)


@pytest.mark.parametrize(
    "given", ["redis:6379", "redis.ray.svc:1", "rediss://10.0.0.1:65535", "redis://[fd00::1]:6379"]
)
def test_an_address_of_a_redis_is_taken(given: str) -> None:
    assert redis_at(given) == given


@pytest.mark.parametrize(
    "given", ["redis", "", "redis:", "redis:0", "redis:65536", "http://redis:6379", "a b:1", ":1"]
)
def test_what_is_no_address_of_a_redis(given: str) -> None:
    with pytest.raises(InputError, match=r"--redis: .* is not an address of a Redis; write HOST:PORT"):
        redis_at(given)


@pytest.mark.parametrize(
    "given", ["", "http://s3.store:8333", "https://s3.example.com/path", "http://[::1]:9000"]
)
def test_a_url_of_a_store_is_taken(given: str) -> None:
    assert store_at(given) == given


@pytest.mark.parametrize(
    "given", ["notaurl", "s3.store:8333", "ftp://a", "http://", "http://a:99999", "http://a b"]
)
def test_what_is_no_url_of_a_store(given: str) -> None:
    with pytest.raises(InputError, match=r"--endpoint: .* is not a URL of a store; write http://HOST:PORT"):
        store_at(given)
