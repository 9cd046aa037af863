"""Check RayCluster and RayJob manifests beyond KubeRay's schema. Each check yields a line for each violation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

Manifest = dict[str, Any]

MAX_NAME_LENGTH = {"RayCluster": 53, "RayJob": 47}
"""Characters in a name; KubeRay's operator adds suffixes to it (MaxRayClusterNameLength, MaxRayJobNameLength)."""
GENERATED = 5
"""Characters that a server adds to `generateName`."""
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""A DNS label of RFC 1035."""
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
"""A DNS label of RFC 1123, which may begin with a digit."""
SUBDOMAIN = re.compile(rf"{NAMESPACE.pattern}(\.{NAMESPACE.pattern})*")
_NUMBER = r"(\d+(\.\d*)?|\.\d+)"
QUANTITY = re.compile(rf"\+?{_NUMBER}([KMGTPE]i|[numkMGTPE]|[eE][+-]?{_NUMBER})?")
"""A number with one unit, as Kubernetes reads it."""
LARGEST = 2**18 - 2**12
"""The largest manifest in bytes. `kubectl apply` also stores it in an annotation, which is limited to 256 KiB."""
MAX_REPLICAS = 2**31 - 1
SECRET_NAME = re.compile(r"(?i)token|secret|password|credential|access_?key")
SWITCH = re.compile(r"(?i)true|false|[01]")
"""A value that turns something on or off, which is no secret whatever its name."""


def check(manifest: Manifest) -> list[str]:
    """Return all violations of a RayCluster or RayJob, in the order of `RULES`."""
    return [line for rule in RULES for line in rule(manifest)]


def manifests_can_be_applied(manifest: Manifest) -> Iterator[str]:
    """Limit the size, because kubectl stores an applied manifest in an annotation of it."""
    size = len(json.dumps(manifest, ensure_ascii=False).encode())
    if size > LARGEST:
        problem = f"is {size // 1024} KiB long, and kubectl applies {LARGEST // 1024}"
        yield f"{problem}; name many files by one pattern, such as data/*.jsonl"


def names_are_dns_labels(manifest: Manifest) -> Iterator[str]:
    """Check the names of the cluster and its groups, which become names of services and pods."""
    longest = MAX_NAME_LENGTH.get(manifest["kind"], 63)
    metadata = manifest["metadata"]
    prefix = metadata.get("generateName", "")
    name = metadata.get("name", f"{prefix}{'x' * GENERATED}" if prefix else "")
    names = {"metadata.name": (name, longest)}
    for i, group in enumerate(_groups(manifest)):
        names[f"workerGroupSpecs[{i}].groupName"] = (group["groupName"], 63)
    for where, (name, maximum) in names.items():
        if not LABEL.fullmatch(name) or len(name) > maximum:
            yield f"{where}: {name!r} is not a DNS label of at most {maximum} characters; use a-z, 0-9 and -"


def references_are_dns_names(manifest: Manifest) -> Iterator[str]:
    """Check the names of the namespace, the Secret, the service account and the volume claim, as a server does."""
    namespace = manifest["metadata"].get("namespace", "default")
    if not NAMESPACE.fullmatch(namespace) or len(namespace) > 63:
        yield f"metadata.namespace: {namespace!r} is not a DNS label of at most 63 characters; use a-z, 0-9 and -"
    secret = _cluster(manifest).get("authOptions", {}).get("secretName")
    references = {"authOptions.secretName": secret} if secret else {}
    for where, template in _templates(manifest):
        spec = template["spec"]
        if "serviceAccountName" in spec:
            references[f"{where}: serviceAccountName"] = spec["serviceAccountName"]
        for secret in spec.get("imagePullSecrets", []):
            references[f"{where}: pull secret"] = secret["name"]
        for volume in spec.get("volumes", []):
            if "persistentVolumeClaim" in volume:
                references[f"{where}: claimName"] = volume["persistentVolumeClaim"]["claimName"]
        for container in spec["containers"]:
            for variable in container.get("env", []):
                if referred := variable.get("valueFrom", {}).get("secretKeyRef"):
                    references[f"{where}: Secret of {variable['name']}"] = referred["name"]
    for where, name in references.items():
        if not SUBDOMAIN.fullmatch(name) or len(name) > 253:
            yield f"{where}: {name!r} is not a name of at most 253 characters of a-z, 0-9, - and ."


def group_names_are_unique(manifest: Manifest) -> Iterator[str]:
    """Require distinct group names, because the autoscaler counts nodes by them."""
    names = [group["groupName"] for group in _groups(manifest)]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield f"workerGroupSpecs: two groups are named {name!r}; give each its own name"


def replicas_are_ordered(manifest: Manifest) -> Iterator[str]:
    """Require 0 <= minReplicas <= replicas <= maxReplicas, with the operator's defaults for missing values."""
    for group in _groups(manifest):
        minimum, maximum = group.get("minReplicas", 0), group.get("maxReplicas", MAX_REPLICAS)
        where = f"group {group['groupName']!r}"
        if not 0 <= minimum <= maximum:
            yield f"{where}: minReplicas {minimum} and maxReplicas {maximum} are no range; swap or raise them"
        elif not minimum <= group.get("replicas", minimum) <= maximum:
            yield f"{where}: replicas {group['replicas']} is outside {minimum} to {maximum}; leave it out"


def pods_are_replaced_not_restarted(manifest: Manifest) -> Iterator[str]:
    """Require pods that Kubernetes does not restart, because autoscaler v2 refuses others."""
    cluster = _cluster(manifest)
    if cluster.get("autoscalerOptions", {}).get("version") != "v2":
        return
    for where, template in _templates(manifest):
        policy = template["spec"].get("restartPolicy", "Never")
        if policy != "Never":
            yield f"{where}: restartPolicy is {policy} and autoscaler v2 takes only Never; set it"


def nothing_runs_as_root(manifest: Manifest) -> Iterator[str]:
    """Check users and privileges by the restricted Pod Security Standard."""
    for where, template in _templates(manifest):
        spec = template["spec"]
        if not spec.get("securityContext", {}).get("runAsNonRoot"):
            yield f"{where}: may run as root; set securityContext.runAsNonRoot"
        for container in spec["containers"]:
            if container.get("securityContext", {}).get("allowPrivilegeEscalation") is not False:
                yield f"{where}: container {container['name']!r} may gain privileges; forbid it"


def containers_have_bounds(manifest: Manifest) -> Iterator[str]:
    """Require resource limits. Ray takes a pod's size from them, and without them a worker claims the whole node."""
    for where, template in _templates(manifest):
        for container in template["spec"]["containers"]:
            lacking = {"cpu", "memory"} - container.get("resources", {}).get("limits", {}).keys()
            if lacking:
                yield f"{where}: container {container['name']!r} has no limit of {' and '.join(sorted(lacking))}"


def quantities_have_one_unit(manifest: Manifest) -> Iterator[str]:
    """Check the quantities of container resources, as a server does."""
    for where, template in _templates(manifest):
        for container in template["spec"]["containers"]:
            for kind, amounts in container.get("resources", {}).items():
                for name, amount in amounts.items():
                    if not QUANTITY.fullmatch(str(amount)):
                        yield f"{where}: {kind} of {name} are {amount!r}, not a quantity; write as in 500m or 4Gi"


def authentication_is_on(manifest: Manifest) -> Iterator[str]:
    """Require token authentication. Anyone who reaches a dashboard without it can run code on the cluster."""
    if (
        manifest["kind"] in MAX_NAME_LENGTH
        and _cluster(manifest).get("authOptions", {}).get("mode") != "token"
    ):
        yield "authOptions.mode: token authentication is off; set it to token"


def secrets_are_references(manifest: Manifest) -> Iterator[str]:
    """Refuse plain secrets. Everyone who may list pods can read them, and they stay in version control."""
    for where, template in _templates(manifest):
        for container in template["spec"]["containers"]:
            for variable in container.get("env", []):
                value = variable.get("value")
                if (
                    value is not None
                    and SECRET_NAME.search(variable["name"])
                    and not SWITCH.fullmatch(str(value))
                ):
                    yield f"{where}: {variable['name']} carries its value; refer to a Secret by valueFrom"
    redis = _cluster(manifest).get("gcsFaultToleranceOptions", {}).get("redisPassword", {})
    if "value" in redis:
        yield "gcsFaultToleranceOptions.redisPassword: carries its value; refer to a Secret by valueFrom"


RULES = (
    manifests_can_be_applied,
    names_are_dns_labels,
    references_are_dns_names,
    group_names_are_unique,
    replicas_are_ordered,
    pods_are_replaced_not_restarted,
    nothing_runs_as_root,
    containers_have_bounds,
    quantities_have_one_unit,
    authentication_is_on,
    secrets_are_references,
)


def _cluster(manifest: Manifest) -> Manifest:
    """The specification of the cluster in a RayCluster or a RayJob."""
    spec: Manifest = manifest.get("spec", {})
    result: Manifest = spec.get("rayClusterSpec", spec)
    return result


def _groups(manifest: Manifest) -> list[Manifest]:
    result: list[Manifest] = _cluster(manifest).get("workerGroupSpecs", [])
    return result


def _templates(manifest: Manifest) -> Iterator[tuple[str, Manifest]]:
    cluster = _cluster(manifest)
    if "headGroupSpec" in cluster:
        yield "head", cluster["headGroupSpec"]["template"]
    for group in _groups(manifest):
        yield f"group {group['groupName']!r}", group["template"]
    if "submitterPodTemplate" in manifest.get("spec", {}):
        yield "submitter", manifest["spec"]["submitterPodTemplate"]
