"""Every class gives the logits and the loss of transformers for the same weights."""

import pytest

from workloads.hf.parity_table import CASES, TOLERANCE, Case, compare


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_the_class_equals_transformers(case: Case) -> None:
    found = compare(case)
    assert found.logits < TOLERANCE
    assert found.loss < TOLERANCE
