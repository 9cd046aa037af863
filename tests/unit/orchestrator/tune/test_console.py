"""What a search shows while it runs."""

from __future__ import annotations

import io

from orchestrator.tune.console import SearchDisplay


def test_a_warning_is_a_line_of_its_own_that_the_state_does_not_replace() -> None:
    stream = io.StringIO()
    with SearchDisplay(stream) as display:
        display.update({"warning": "asha compares trials at step 2, within the warm-up of 4 steps"})
        display.update({"note": "preparing text"})
    assert stream.getvalue().splitlines() == [
        "orchestrator: asha compares trials at step 2, within the warm-up of 4 steps",
        "preparing text",
    ]
