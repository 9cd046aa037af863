"""What a job reads of the files that people have, told by their first row."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.job.errors import InputError
from orchestrator.launch.first_rows import Rows, rows_at

ASKED, ANSWER = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}
SHAREGPT = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]
PAIR = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
ANSWERED = {"prompt": "prompt", "completion": "completion"}
BOTH = {"chosen": "chosen", "rejected": "rejected"}


def told(folder: Path, row: dict[str, Any]) -> Rows | None:
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return rows_at(str(folder / "rows.jsonl"))


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"text": "a", "id": 1}, Rows("", None, ("id",), False)),
        ({"body": {"text": "a"}, "n": 1}, Rows("", "body.text", ("n",), False)),
        ({"id": 1, "messages": [ASKED]}, Rows("conversation", {"messages": "messages"}, ("id",), True)),
        ({"conversations": SHAREGPT}, Rows("conversation", {"messages": "conversations"}, (), True)),
        (
            {"instruction": "a", "input": "", "output": "b", "text": "a b"},
            Rows("conversation", {"prompt": "{instruction}\n\n{input}", "completion": "output"}, ("text",), True),
        ),
        ({"prompt": "a", "completion": "b"}, Rows("conversation", ANSWERED, (), True)),
        ({"prompt": [ASKED], "completion": [ANSWER]}, Rows("conversation", ANSWERED, (), True)),
        (
            {"prompt": "a", "completion": "b", "label": True},
            Rows("kto", {**ANSWERED, "label": "label"}, (), False),
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "by": 1}, Rows("dpo", PAIR, ("by",), False)),
        ({"prompt": [ASKED], "chosen": [ANSWER], "rejected": [ANSWER]}, Rows("dpo", PAIR, (), True)),
        ({"chosen": [ASKED, ANSWER], "rejected": [ASKED, ANSWER]}, Rows("dpo", BOTH, (), True)),
        ({"prompt": "a", "chosen": [ASKED, ANSWER], "rejected": [ASKED]}, Rows("dpo", BOTH, ("prompt",), True)),
        (
            {"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": SHAREGPT[1]},
            Rows("dpo", {**BOTH, "prompt": "conversations"}, (), True),
        ),
    ],
)  # fmt: skip
def test_usual_columns_say_the_objective(tmp_path: Path, row: dict[str, Any], wanted: Rows) -> None:
    assert told(tmp_path, row) == wanted


def test_of_a_table_the_columns_that_are_left_are_told(tmp_path: Path) -> None:
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["review", "sentiment", "stars"], ["a long review", "good", "5"]])
    assert rows_at(str(tmp_path / "rows.csv")) == Rows("", "review", ("sentiment", "stars"), False)


def test_an_encoder_decoder_reads_one_column_and_answers_by_the_other(tmp_path: Path) -> None:
    found = told(tmp_path, {"instruction": "a", "output": "b"})
    assert found is not None
    assert found.as_pair() == Rows("seq2seq", {"source": "instruction", "target": "output"}, (), False)
    talk = told(tmp_path, {"messages": [ASKED]})
    assert talk is not None
    assert talk.as_pair() is talk


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"chosen": "a", "rejected": "b"},
            "has a chosen and a rejected answer, and no prompt; name its column",
        ),
        ({"conversations": [{"who": "a", "what": "b"}]}, "no message but has who, what; write them as"),
        ({"messages": ["a"]}, "no message but has str; write them as"),
    ],
)
def test_what_no_objective_reads_is_told_before_a_run(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        told(tmp_path, row)
