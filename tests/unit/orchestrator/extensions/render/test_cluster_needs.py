"""What a job needs, as groups of nodes with names that Kubernetes takes."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.extensions.render.checks import LABEL
from orchestrator.extensions.render.cluster_needs import DNS_LENGTH, ClusterNeeds, dns_name

NEEDS = ClusterNeeds(
    "a", "i", 3, 9, cpu=2, gpu=1, memory_gib=10, per_node=4, accelerators=("H100", "A100"), spot=True
)


def test_workers_become_nodes_and_the_first_device_holds_the_minimum() -> None:
    first, second = NEEDS.groups()
    assert (first.name, first.min, first.max, first.accelerator) == ("h100-spot", 1, 3, "H100")
    assert (second.name, second.min, second.max, second.accelerator) == ("a100-spot", 0, 3, "A100")
    assert (first.cpu, first.gpu, first.memory_gib, first.spot) == (8, 4, 40, True)


def test_without_a_device_type_the_group_says_what_it_has() -> None:
    assert [g.name for g in dataclasses.replace(NEEDS, accelerators=()).groups()] == ["gpu-spot"]
    assert [g.name for g in ClusterNeeds("a", "i", 1, 1).groups()] == ["cpu"]


@pytest.mark.parametrize("name", ["quickstart", "a-b-c", "x" * DNS_LENGTH])
def test_a_good_name_stays(name: str) -> None:
    assert dns_name(name) == name


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True))
def test_every_job_name_becomes_a_dns_label(name: str) -> None:
    found = dns_name(name)
    assert LABEL.fullmatch(found)
    assert len(found) <= DNS_LENGTH


def test_names_that_differ_stay_apart() -> None:
    names = ["Run", "run", "r.un", "r_un", "run-", "x" * 60, "x" * 61, "1", "2"]
    assert len({dns_name(name) for name in names}) == len(names)
