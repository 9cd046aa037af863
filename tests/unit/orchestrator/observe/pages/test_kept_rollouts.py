"""The rollouts that a report shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchestrator.observe.pages.kept_rollouts import STEPS_SHOWN, rollouts_shown


def line(prompt: int, answer: str, reward: float | None) -> dict[str, Any]:
    return {
        "prompt_number": prompt,
        "prompt": f"what is\n{prompt}?",
        "answer": answer,
        "tokens": 2,
        "reward": reward,
    }


def test_the_best_and_the_worst_answers_of_steps_from_first_to_last(tmp_path: Path) -> None:
    assert rollouts_shown(str(tmp_path)) == []
    (tmp_path / "rollouts").mkdir()
    for step in (1, *range(50, 501, 50)):
        lines = [line(7, "bad", 0.0), line(7, "good", 1.5), line(7, "unscored", None), line(7, "fair", 1.0)]
        lines += [line(8, "alike", 0.5), line(8, "alike too", 0.5)] + [line(n, "", 0.0) for n in (9, 10)]
        text = "".join(json.dumps(each) + "\n" for each in lines)
        (tmp_path / "rollouts" / f"step-{step:08d}.jsonl").write_text(text)
    shown = rollouts_shown(str(tmp_path))
    assert [rollout["step"] for rollout in shown] == [1, 150, 350, 500]
    assert len(shown) == STEPS_SHOWN
    first, second, third = shown[0]["prompts"]
    assert first["prompt"] == "what is↵ 7?"
    assert [(answer["text"], answer["reward"]) for answer in first["answers"]] == [
        ("good", 1.5),
        ("unscored", None),
    ]
    assert [answer["text"] for answer in second["answers"]] == ["alike"]
    assert third["prompt"] == "what is↵ 9?"
