"""A real API server of Kubernetes, on loopback, with an etcd of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import yaml
from jobs import wait_for
from s3 import free_ports

from orchestrator.extensions.render.manifests import yaml_of

ASSETS = "KUBEBUILDER_ASSETS"
"""The folder with the programs, as controller-runtime's envtest calls it; else they are looked for on PATH."""
PROGRAMS = ("etcd", "kube-apiserver", "kubectl", "openssl")
TOKEN = "token-of-the-tests"


def program(name: str) -> str | None:
    """Where a program is."""
    return shutil.which(
        name, path=os.pathsep.join(filter(None, [os.environ.get(ASSETS), os.environ["PATH"]]))
    )


def unable() -> str:
    """Why there can be no API server here; empty if there can."""
    missing = [name for name in PROGRAMS if program(name) is None]
    return f"{missing[0]} is not there; give the folder of it by {ASSETS}" if missing else ""


class ApiServer:
    """One that runs; `kubeconfig` is for its administrator."""

    def __init__(self, folder: Path, port: int) -> None:
        self.kubeconfig, self._folder = folder / "kubeconfig", folder
        server = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": server}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
            "current-context": "c",
        }
        self.kubeconfig.write_text(yaml.safe_dump(document))

    def kubectl(self, *words: str | Path, given: object = None) -> subprocess.CompletedProcess[str]:
        """What kubectl says to a command, `given` a manifest by standard input."""
        command = [str(program("kubectl")), "--kubeconfig", str(self.kubeconfig), *map(str, words)]
        home = os.environ | {"HOME": str(self._folder)}  # where kubectl keeps what it has discovered
        text = yaml_of(given)
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, env=home)

    def must(self, *words: str | Path, given: object = None) -> str:
        """What kubectl says to a command that succeeds."""
        done = self.kubectl(*words, given=given)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextlib.contextmanager
def served(folder: Path) -> Iterator[ApiServer]:
    """A server that keeps what it is told in `folder`, and nothing of which runs afterwards."""
    store, peers, port = sorted(free_ports(3))
    for words in (
        ("genrsa", "-out", "account.key", "2048"),
        ("rsa", "-in", "account.key", "-pubout", "-out", "account.pub"),
    ):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)
    (folder / "tokens.csv").write_text(f"{TOKEN},admin,admin,system:masters\n")
    etcd = {
        "data-dir": "etcd",
        "listen-client-urls": f"http://127.0.0.1:{store}",
        "advertise-client-urls": f"http://127.0.0.1:{store}",
        "listen-peer-urls": f"http://127.0.0.1:{peers}",
        "initial-advertise-peer-urls": f"http://127.0.0.1:{peers}",
        "initial-cluster": f"default=http://127.0.0.1:{peers}",
    }
    server = {
        "etcd-servers": f"http://127.0.0.1:{store}",
        "bind-address": "127.0.0.1",
        "advertise-address": "127.0.0.1",
        "secure-port": port,
        "cert-dir": "certificates",
        "token-auth-file": "tokens.csv",
        "authorization-mode": "RBAC",
        "service-cluster-ip-range": "10.96.0.0/24",
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": "account.pub",
        "service-account-signing-key-file": "account.key",
    }
    with contextlib.ExitStack() as running:
        for name, options in (("etcd", etcd), ("kube-apiserver", server)):
            words = [str(program(name)), *(f"--{option}={value}" for option, value in options.items())]
            log = running.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)
            running.callback(process.wait)
            running.callback(process.kill)
        found = ApiServer(folder, port)
        wait_for(
            lambda: found.kubectl("get", "--raw", "/readyz").stdout == "ok",
            f"the API server, see {folder}",
            120,
        )
        yield found
