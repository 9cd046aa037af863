"""What a search shows while it runs."""

from __future__ import annotations

import io

from orchestrator.tune.console import SearchDisplay, line


def test_a_warning_is_a_line_of_its_own_that_the_state_does_not_replace() -> None:
    stream = io.StringIO()
    with SearchDisplay(stream) as display:
        display.update({"warning": "asha compares trials at step 2, within the warm-up of 4 steps"})
        display.update({"note": "preparing text"})
    assert stream.getvalue().splitlines() == [
        "orchestrator: asha compares trials at step 2, within the warm-up of 4 steps",
        "preparing text",
    ]


def test_trials_without_a_step_are_said_to_start() -> None:
    progress = {
        "ended": 0,
        "trials": 4,
        "failed": 0,
        "running": ["0000", "0001"],
        "best": None,
        "eta_seconds": None,
    }
    assert line(progress | {"steps": 0}) == "0 of 4 trials ended  2 running, at their start  0 steps"
    assert line(progress | {"steps": 6}) == "0 of 4 trials ended  2 running  6 steps"
