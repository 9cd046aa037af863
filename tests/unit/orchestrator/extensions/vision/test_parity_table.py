"""Every model of images gives what that of transformers gives for the same weights."""

from pathlib import Path

import pytest

from orchestrator.extensions.vision.parity_table import CASES, Case, difference
from workloads.hf.check.parity_table import TOLERANCE


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_the_model_equals_that_of_transformers(case: Case) -> None:
    assert max(difference(case)) < TOLERANCE


def test_the_page_has_a_row_for_each() -> None:
    page = (Path(__file__).parents[5] / "docs" / "parity.md").read_text()
    assert [case.title for case in CASES if f"| {case.title} | `{case.kind}` |" not in page] == []
