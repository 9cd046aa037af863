"""Patterns of names of parameters: what they match is there, and is trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workloads.adapters.frozen import check_groups
from workloads.errors import WorkloadError
from workloads.load import load
from workloads.workload import Vocabulary


def test_groups_have_trained_parameters_that_no_group_before_has() -> None:
    small = {"hidden": 32, "heads": 4, "layers": 2, "intermediate": 64}
    plain = load("gpt-tiny", "causal_lm", Vocabulary(160, 0), changes=small, sequence_length=16)
    check_groups([["tokens.*"], ["*.weight"]], plain)
    for groups, told in (
        ([["token.*"]], r"'token\.\*' matches no trained parameter .* the nearest are tokens\.weight"),
        (
            [["*.weight"], ["tokens.*"]],
            r"'tokens\.\*' matches no trained parameter that no group before it has",
        ),
    ):
        with pytest.raises(WorkloadError, match=told):
            check_groups(groups, plain)
    frozen = replace(plain, frozen=frozenset({"tokens.weight"}))
    with pytest.raises(WorkloadError, match="no trained parameter"):
        check_groups([["tokens.*"]], frozen)
    check_groups([["tokens.*"]], replace(frozen, thawed_after={"tokens.weight": 2}))
