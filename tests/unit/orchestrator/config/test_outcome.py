from __future__ import annotations

import pytest

from orchestrator.config.outcome import ENDED, Outcome


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(Outcome.DONE, 0), (Outcome.FAILED, 1), (Outcome.WRONG_INPUT, 2), (Outcome.STOPPED, 3)],
)
def test_exit_codes_are_what_is_documented(outcome: Outcome, code: int) -> None:
    assert outcome.exit_code == code
    assert Outcome.of_exit(code) is outcome


def test_other_exit_codes_are_no_outcome() -> None:
    assert Outcome.of_exit(-9) is None
    assert Outcome.of_exit(137) is None


def test_the_phases_of_a_run_that_ended_are_the_texts_on_disk() -> None:
    assert {"done", "failed", "stopped"} == ENDED
    assert "wrong input" not in ENDED
