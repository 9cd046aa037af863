"""Rollouts that a run keeps as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.errors import InputError
from orchestrator.observe.pages.kept_rollouts import rollouts_shown
from orchestrator.train.rollouts.prompts import Prompt
from orchestrator.train.rollouts.rollout_data import Rollout, Scored
from orchestrator.train.rollouts.stored_rollouts import KeptRollouts, kept_steps, read_kept
from workloads.model.answers import Drawn


def rollout(text: str) -> Rollout:
    answer = Scored(Drawn([4, 2], [-0.5, -0.1], 0.7, True), text, {"a": float("nan"), "b": 1.0}, float("nan"))
    return Rollout([], 0, {}, [Prompt(12, [3, 4], {"level": 2}, 0)], [[answer, answer]], version=3)


def test_what_is_kept_is_read_again_and_a_later_attempt_replaces_it(tmp_path: Path) -> None:
    kept = KeptRollouts(str(tmp_path))
    kept.add(3, ["why?"], rollout("first"))
    kept.add(10, ["why?"], rollout("at ten"))
    kept.add(3, ["why?"], rollout("line\nbreak é"))
    kept.close()
    assert kept_steps(str(tmp_path)) == [3, 10]
    step, lines = read_kept(str(tmp_path))
    assert (step, lines[0]["answer"]) == (10, "at ten")
    step, lines = read_kept(str(tmp_path), 3)
    assert lines[1] == {
        "prompt_number": 12, "k": 1, "prompt": "why?", "answer": "line\nbreak é", "tokens": 2, "version": 3,
        "ended": True, "reward": None, "rewards": {"a": None, "b": 1.0}, "columns": {"level": 2}, "epoch": 1,
    }  # fmt: skip


def test_what_was_not_kept_is_said_with_what_was(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has kept no rollouts; rollout\.keep_every says"):
        read_kept(str(tmp_path))
    kept = KeptRollouts(str(tmp_path))
    kept.add(50, ["why?"], rollout("a"))
    kept.close()
    with pytest.raises(InputError, match=r"has kept no rollouts of step 7; rollout\.keep_every says which"):
        read_kept(str(tmp_path), 7)


def test_storage_that_fails_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    kept = KeptRollouts(str(tmp_path))
    for step in range(1, 4):
        kept.add(step, ["why?"], rollout("a"))
    kept.close()


def test_line_separators_in_answers_end_no_line_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    kept = KeptRollouts(str(tmp_path))
    text = "a\u2028b\u2029c\x85d\x0ce"
    kept.add(3, ["why?"], rollout(text))
    kept.close()
    assert [line["answer"] for line in read_kept(str(tmp_path), 3)[1]] == [text, text]
    (tmp_path / "rollouts/step-00000005.jsonl").write_text('{"prompt_number": 1')
    with pytest.raises(InputError, match="has damaged rollouts of step 5"):
        read_kept(str(tmp_path))
    assert [each["step"] for each in rollouts_shown(str(tmp_path))] == [3]
