"""The data that the example of a chat model makes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from orchestrator.data.conversations import Template

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def chat() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chat", EXAMPLES / "chat.py")
    assert spec
    assert spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_questions_about_functions_and_which_answer_is_right(
    chat: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "PACKAGES", ("made_up",))
    made = [(f"made_up.f{number}", f"Does what is number {number}.") for number in range(60)]
    monkeypatch.setattr(chat, "functions", lambda package: iter(made))
    chat.main(str(tmp_path), 40)
    rows = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.iterdir()
    }
    trained = {row["messages"][0]["content"] for row in rows["train"]}
    asked = {row["messages"][0]["content"] for row in rows["test"]}
    assert len(rows["train"]) + len(rows["test"]) == 80
    assert asked
    assert not asked & trained
    answers = {row["messages"][1]["content"] for row in rows["train"]}
    assert {row["messages"][1]["content"] for row in rows["test"]} <= answers
    assert all(row["chosen"] != row["rejected"] for row in rows["pairs"] + rows["pairs_test"])
    assert all(row["choices"][row["label"]] == row["answer"] for row in rows["quiz"])
    text, places = Template((EXAMPLES / "chat.jinja").read_text(), {}).render(rows["test"][0]["messages"])
    quiz = next(row for row in rows["quiz"] if text.startswith(row["question"]))
    assert [text[start:stop] for start, stop in places] == [quiz["answer"] + "<|endoftext|>"]
