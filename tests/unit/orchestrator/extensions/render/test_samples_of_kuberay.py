"""KubeRay's own sample manifests: its schema and the rules of a server refuse none; this project's own rules do.

They need a checkout of ray-project/kuberay in the folder of --peers, and KubeRay's CRD files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peers
import yaml

from orchestrator.extensions.render.checks import MAX_NAME_LENGTH, RULES
from orchestrator.extensions.render.manifests import violations

FOLDERS = ("ray-operator/config/samples", "kubectl-plugin/config/samples")
OF_THIS_PROJECT = {"nothing_runs_as_root", "containers_have_bounds", "authentication_is_on"}
"""Rules that are stricter than Kubernetes and KubeRay."""


def samples(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(each for folder in FOLDERS for each in (root / folder).rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if isinstance(document, dict) and document.get("kind") in MAX_NAME_LENGTH:
                yield path.name, document


def test_no_sample_is_refused_but_by_our_own_rules(
    checkout: Callable[[str], Path], schemas: dict[str, Any]
) -> None:
    found = list(samples(checkout("kuberay")))
    assert [(name, line) for name, sample in found for line in violations(sample, schemas)] == []
    lines = [(rule.__name__, name, line) for name, sample in found for rule in RULES for line in rule(sample)]
    assert [each for each in lines if each[0] not in OF_THIS_PROJECT] == []
    refused = Counter(rule for rule, _ in {(rule, name) for rule, name, _ in lines})
    assert refused["authentication_is_on"] > len(found) / 2
    assert len(found) == peers.SUITES["kuberay-samples"].cases
