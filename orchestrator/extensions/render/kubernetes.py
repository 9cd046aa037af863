"""Check the options of a render for Kubernetes, and check the manifests with an API server."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cluster.workers.machine import ACCELERATOR
from orchestrator.config.errors import InputError
from orchestrator.config.redact import redact
from orchestrator.extensions.render.cluster_needs import ClusterNeeds
from orchestrator.extensions.render.kuberay import KUEUE
from orchestrator.extensions.render.manifests import no_password, yaml_of
from orchestrator.extensions.render.node_selection import accelerator_label
from orchestrator.extensions.render.pods import Kubernetes

SECONDS = 60
"""Seconds that an API server may take."""
QUEUES = {"kueue": "localqueues.kueue.x-k8s.io", "volcano": "queues.scheduling.volcano.sh"}
"""The resource of each scheduler's queues, as kubectl names it."""
HOST = r"([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])"
PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|[1-9]\d{0,3})"
"""A port number: 1 to 65535."""


def counted(resource: str) -> tuple[str, int]:
    """Parse a device plugin's resource, NAME or NAME=N. Return its name and number. Raises InputError."""
    match = re.fullmatch(r"([a-z0-9.-]+/[A-Za-z0-9._-]+)(?:=([1-9][0-9]{0,3}))?", resource)
    if not match:
        hint = "write DOMAIN/NAME or DOMAIN/NAME=N"
        raise InputError(f"{resource!r} is not a resource of a device plugin", "--rdma", hint)
    return match[1], int(match[2] or 1)


def redis_at(address: str) -> str:
    """Check the address of a Redis and return it. Raises InputError if Ray would refuse it or it has a credential."""
    if not re.fullmatch(rf"(rediss?://)?{HOST}:{PORT}", no_password(address, "--redis")):
        hint = "write HOST:PORT, or rediss://HOST:PORT for TLS"
        raise InputError(f"{address!r} is not an address of a Redis", "--redis", hint)
    return address


def store_at(url: str) -> str:
    """Check the URL of a store and return it; empty for none. Raises InputError if it is wrong or has a credential."""
    if url and not re.fullmatch(rf"https?://{HOST}(:{PORT})?(/\S*)?", no_password(url, "--endpoint")):
        raise InputError(
            f"{url!r} is not a URL of a store", "--endpoint", "write http://HOST:PORT or https://HOST"
        )
    return url


def settings(options: Iterable[str]) -> dict[str, str]:
    """Parse environment variables, each NAME=VALUE. Raises InputError for wrong, secret and repeated ones."""
    variables: dict[str, str] = {}
    for text in options:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise InputError(f"{text!r} is not a variable with its value", "--env", "write NAME=VALUE")
        if redact({name: value}) != {name: value}:
            problem = f"{name} looks like a credential, and the manifest would expose it"
            raise InputError(problem, "--env", f"put it into the Secret and give --secret-env {name}")
        if name in variables:
            raise InputError(f"{name} is given twice", "--env", "give each once")
        variables[name] = value
    return variables


def secret_settings(options: Iterable[str], plain: Iterable[str]) -> dict[str, str]:
    """Parse variables from the Secret, each NAME or NAME=KEY. Return the key of each.

    Args:
        options: the options of the command.
        plain: variables with plain values, which may not appear here, too.

    Raises:
        InputError: an option is wrong or repeated.
    """
    keys: dict[str, str] = {}
    for text in options:
        written = re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)(?:=([A-Za-z0-9._-]{1,253}))?", text)
        if not written:  # not shown, because it may be a secret value, given by mistake
            raise InputError("is not a variable with its key", "--secret-env", "write NAME or NAME=KEY")
        name, key = written[1], written[2] or written[1]
        if name in keys or name in plain:
            raise InputError(f"{name} is given twice", "--secret-env", "give each once, here or by --env")
        keys[name] = key
    return keys


def cautions(needs: ClusterNeeds, kubernetes: Kubernetes, runs: str) -> list[str]:
    """Return what the cluster must have or allow for a render, a line each, that no manifest can say.

    Args:
        needs: what the job needs of its cluster.
        kubernetes: the options of the render.
        runs: the folder of the runs.
    """
    kinds = [group.accelerator for group in needs.groups() if group.accelerator]
    unknown = [kind for kind in kinds if accelerator_label(kind, kubernetes.platform)[0] == ACCELERATOR]
    without_right = (
        kubernetes.platform == "gke" and runs.startswith("gs://") and not kubernetes.service_account
    )
    lines = {
        "resources.notices lets the pods ask their node's metadata, which hold its credentials; on EKS its hop "
        "limit must be 2": needs.notices,
        f"the nodes must carry the label {ACCELERATOR}={' or '.join(unknown)}, as the pods select them by it": unknown,
        "the pods have no right to gs://: on GKE --service-account gives them that of an account": without_right,
        "Kueue's ClusterQueue must cover ephemeral-storage, as it covers cpu and memory": (
            kubernetes.queue.startswith(KUEUE)
        ),
        "KubeRay's operator must have the feature gate RayJobDeletionPolicy for --keep-failed": (
            kubernetes.keep_failed is not None
        ),
    }
    return [line for line, applies in lines.items() if applies]


def ask_server(files: dict[str, Any], kubeconfig: Path) -> None:
    """Let an API server check the manifests as if they were applied (a dry run), including unknown fields.

    Raises InputError with the first problem.

    Args:
        files: the manifests by file name.
        kubeconfig: the kubeconfig that names the API server.
    """
    words = ["apply", "--filename=-", "--server-side", "--force-conflicts", "--dry-run=server"]
    words += ["--validate=strict", "--field-manager=orchestrator"]
    # One by one, so that the error names the file.
    for name, manifest in files.items():
        if refusal := _kubectl(kubeconfig, words, yaml_of(manifest)):
            raise InputError(refusal, f"{name}, by the API server of {kubeconfig}", "fix what it names")


def check_queue(queue: str, namespace: str, kubeconfig: Path | None) -> None:
    """Raise InputError if `queue` is malformed, or unknown to the API server: a job would wait for it forever.

    Args:
        queue: the option --queue.
        namespace: the namespace of the queue.
        kubeconfig: names the API server; None to skip that check.
    """
    match = re.fullmatch(r"(kueue|volcano):([a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?)", queue)
    if match is None:
        hint = "write kueue:NAME or volcano:NAME, in small letters, digits, dots and dashes"
        raise InputError(f"{queue!r} is not a queue", "--queue", hint)
    if kubeconfig is None:
        return
    kind = QUEUES[match[1]]
    if refusal := _kubectl(kubeconfig, ["get", kind, match[2], "--namespace", namespace, "--output=name"]):
        raise InputError(
            f"there is no such queue ({refusal})", f"--queue {queue}", f"see `kubectl get {kind} -A`"
        )


def _kubectl(kubeconfig: Path, words: list[str], text: str = "") -> str:
    """Run kubectl. Return its error message, empty for success. Raises InputError if kubectl cannot run."""
    if not kubeconfig.is_file():
        raise InputError(f"there is no file {kubeconfig}", "--kubeconfig", "give the file of a cluster")
    command = ["kubectl", "--kubeconfig", str(kubeconfig), f"--request-timeout={SECONDS}s", *words]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=2 * SECONDS)
    except FileNotFoundError:
        raise InputError("kubectl is not there", "--kubeconfig", "install it, or use --crds") from None
    except subprocess.TimeoutExpired:
        hint = "try again, or leave it out"
        raise InputError(f"the API server said nothing for {2 * SECONDS} s", "--kubeconfig", hint) from None
    if not done.returncode:
        return ""
    message = " ".join(done.stderr.split()).removeprefix("error: ")[:400]
    return message or f"exit code {done.returncode}"
