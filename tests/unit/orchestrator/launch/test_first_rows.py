"""What a job reads of the files that people have, told by their first row."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.config.errors import InputError
from orchestrator.launch.first_rows import ReadColumns, rows_at

ASKED, ANSWER = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}
SHAREGPT = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]
PAIR = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
ANSWERED = {"prompt": "prompt", "completion": "completion"}
BOTH = {"chosen": "chosen", "rejected": "rejected"}


def told(folder: Path, row: dict[str, Any]) -> ReadColumns | None:
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return rows_at(str(folder / "rows.jsonl"))


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"text": "a", "id": 1}, ReadColumns("", None, ("id",), False)),
        ({"body": {"text": "a"}, "n": 1}, ReadColumns("", "body.text", ("n",), False)),
        ({"id": 1, "messages": [ASKED]}, ReadColumns("conversation", {"messages": "messages"}, ("id",), True)),
        ({"conversations": SHAREGPT}, ReadColumns("conversation", {"messages": "conversations"}, (), True)),
        (
            {"instruction": "a", "input": "", "output": "b", "text": "a b"},
            ReadColumns(
                "conversation", {"prompt": "{instruction}\n\n{input}", "completion": "output"}, ("text",), True
            ),
        ),
        ({"prompt": "a", "completion": "b"}, ReadColumns("conversation", ANSWERED, (), True)),
        ({"prompt": [ASKED], "completion": [ANSWER]}, ReadColumns("conversation", ANSWERED, (), True)),
        (
            {"prompt": "a", "completion": "b", "label": True},
            ReadColumns("kto", {**ANSWERED, "label": "label"}, (), False),
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "by": 1}, ReadColumns("dpo", PAIR, ("by",), False)),
        ({"prompt": [ASKED], "chosen": [ANSWER], "rejected": [ANSWER]}, ReadColumns("dpo", PAIR, (), True)),
        ({"chosen": [ASKED, ANSWER], "rejected": [ASKED, ANSWER]}, ReadColumns("dpo", BOTH, (), True)),
        ({"prompt": "a", "chosen": [ASKED, ANSWER], "rejected": [ASKED]}, ReadColumns("dpo", BOTH, ("prompt",), True)),
        (
            {"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": SHAREGPT[1]},
            ReadColumns("dpo", {**BOTH, "prompt": "conversations"}, (), True),
        ),
    ],
)  # fmt: skip
def test_usual_columns_say_the_objective(tmp_path: Path, row: dict[str, Any], wanted: ReadColumns) -> None:
    assert told(tmp_path, row) == wanted


def test_of_a_table_the_columns_that_are_left_are_told(tmp_path: Path) -> None:
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["review", "sentiment", "stars"], ["a long review", "good", "5"]])
    assert rows_at(str(tmp_path / "rows.csv")) == ReadColumns("", "review", ("sentiment", "stars"), False)


def test_an_encoder_decoder_reads_one_column_and_answers_by_the_other(tmp_path: Path) -> None:
    found = told(tmp_path, {"instruction": "a", "output": "b"})
    assert found is not None
    assert found.as_pair() == ReadColumns("seq2seq", {"source": "instruction", "target": "output"}, (), False)
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
        ({"conversations": [{"who": "a", "what": "b"}]}, "is not a message but has who, what; write them as"),
        ({"messages": ["a"]}, "is not a message but has str; write them as"),
    ],
)
def test_what_no_objective_reads_is_told_before_a_run(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        told(tmp_path, row)


def _as(kind: str, row: dict[str, Any], path: Path) -> Path:
    if kind in ("parquet", "arrow"):
        table = pa.Table.from_pylist([row])
        if kind == "parquet":
            pq.write_table(table, path)
            return path
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    elif kind == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([row, row.values()])
    elif kind == "json":
        path.write_text(json.dumps([row, row], indent=2))
    else:
        data = (json.dumps(row) + "\n").encode()
        path.write_bytes(gzip.compress(data) if kind == "jsonl.gz" else data)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "ndjson", "parquet", "arrow", "csv"])
def test_all_kinds_of_files_say_the_same(kind: str, tmp_path: Path) -> None:
    """Messages may stand as JSON in a text, as CSV has them."""
    talk = {"id": "a", "messages": json.dumps([ASKED, ANSWER])}
    pair = {"prompt": json.dumps([ASKED]), "chosen": json.dumps([ANSWER]), "rejected": json.dumps([ANSWER])}
    wanted = ReadColumns("conversation", {"messages": "messages"}, ("id",), True)
    assert rows_at(str(_as(kind, talk, tmp_path / f"a.{kind}"))) == wanted
    assert rows_at(str(_as(kind, pair, tmp_path / f"b.{kind}"))) == ReadColumns("dpo", PAIR, (), True)
    if kind != "csv":
        listed = {"id": "a", "messages": [ASKED, ANSWER]}
        assert rows_at(str(_as(kind, listed, tmp_path / f"c.{kind}"))) == wanted
