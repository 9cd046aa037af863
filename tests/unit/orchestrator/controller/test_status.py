"""The work between two steps, in words."""

from __future__ import annotations

import pytest

from cluster.workers.worker_context import Work
from orchestrator.observe.formatting import work_text


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (Work("evaluation of wiki after step 6", "batches", done=0, of=40, seconds=0.0), "0 of 40 batches"),
        (
            Work("evaluation of wiki after step 6", "batches", done=10, of=40, seconds=30.0),
            "10 of 40 batches, 1 min 30 s left",
        ),
    ],
)
def test_work_between_two_steps_in_words(work: Work, text: str) -> None:
    assert work_text(work) == f"evaluation of wiki after step 6: {text}"
