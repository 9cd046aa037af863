"""A column that `field` names and no row has: refused with the nearest name; what some rows have is no mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_files import arrow, parquet, separated, tar

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.clean.config import CleanStep, columns_of_steps
from orchestrator.data.config import Source
from orchestrator.data.sources.named_columns import check_columns, check_columns_of_steps, first_parts

SQUAD = {"question": "q", "context": "c", "answer": "answers.text.0", "start": "answers.answer_start.0"}
ROW = {"q": "is it", "c": "a film", "answers": {"text": ["film"], "answer_start": [2]}}
NO_ANSWER = ROW | {"answers": {"text": [], "answer_start": []}}
TALK = {"messages": [{"role": "user", "content": "a"}], "tools": None, "more": {"tools": "[]"}}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def check(
    path: Path, field: Any, objective: str = "", on_error: str = "fail", part_bytes: int = 2**20
) -> None:
    files = sources.resolve([Source(uri=str(path), field=field)], on_error=on_error)
    check_columns(sources.cut(files, part_bytes), "data.sources", objective)
    check_columns(first_parts(files, part_bytes), "data.sources", objective)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "json"])
@pytest.mark.parametrize(
    ("rows", "field", "objective", "said"),
    [
        ([ROW], SQUAD, "span_extraction", ""),
        ([NO_ANSWER, NO_ANSWER], SQUAD, "span_extraction", ""),
        ([ROW], SQUAD | {"answer": "answers.texts.0"}, "span_extraction", "no row .* did you mean 'answers.text.0'"),
        ([NO_ANSWER], SQUAD | {"start": "answers.anser_start.0"}, "span_extraction", "mean 'answers.answer_start.0'"),
        ([ROW], SQUAD | {"answer": "answer.text.0"}, "span_extraction", "did you mean 'answers.text.0'"),
        ([ROW], SQUAD | {"answer": "q.text"}, "span_extraction", "'q' is str, into which no path leads"),
        ([TALK], {"messages": "messages", "tools": "toolz"}, "conversation", "did you mean 'tools'"),
        ([TALK], {"messages": "messages", "tools": "more.tool"}, "conversation", "did you mean 'more.tools'"),
        ([TALK], {"messages": "messages", "tools": "functions"}, "conversation", "there are messages, tools, more"),
        ([TALK], {"messages": "messages", "tools": "tools"}, "conversation", ""),
        ([{"t": "a", "l": 1}], {"text": "t", "label": "l", "pair": "pear"}, "sequence_classification", "names 'pear'"),
        ([{"p": "a", "c": "b", "r": "d"}], {"chosen": "c", "rejected": "r", "prompt": "q"}, "dpo", "names 'q'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_column_that_no_row_has(
    rows: list[dict[str, Any]],
    field: Any,
    objective: str,
    said: str,
    on_error: str,
    suffix: str,
    tmp_path: Path,
) -> None:
    path = write(tmp_path / f"a.{suffix}", rows)
    if not said:
        check(path, field, objective, on_error)
        return
    with pytest.raises(InputError, match=rf"{said}|has no column") as caught:
        check(path, field, objective, on_error)
    assert len(str(caught.value).splitlines()) == 1
    if suffix != "parquet" or on_error == "skip":  # a table that is to have all says so of itself
        assert caught.value.where == "data.sources.0.field"


def test_what_only_some_rows_have_is_no_mistake(tmp_path: Path) -> None:
    field = {"messages": "messages", "tools": "tools"}
    without = {"messages": TALK["messages"]}
    check(write(tmp_path / "a.jsonl", [without] * 50 + [TALK]), field, "conversation")
    for name, row in (("b1", without), ("b2", TALK)):
        write(tmp_path / f"{name}.jsonl", [row])
    check(tmp_path / "b*.jsonl", field, "conversation")
    with pytest.raises(InputError, match="put rows with other columns into a separate source"):
        check(write(tmp_path / "c.jsonl", [without] * 50 + [TALK]), field, "conversation", part_bytes=500)


def test_a_null_on_the_way_leaves_it_open(tmp_path: Path) -> None:
    null = ROW | {"answers": None}
    check(write(tmp_path / "a.jsonl", [null]), SQUAD, "span_extraction")
    wrong = SQUAD | {"answer": "answers.texts.0"}
    check(write(tmp_path / "b.jsonl", [null]), wrong, "span_extraction")  # of which nothing can be told
    with pytest.raises(InputError, match=r"did you mean 'answers.text.0'"):
        check(write(tmp_path / "c.jsonl", [null, ROW]), wrong, "span_extraction")


def test_where_rows_may_be_left_out_only_what_may_be_null_is_looked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"t": "a"}])
    check(path, {"text": "t", "label": "l"}, "sequence_classification", "skip")  # each is counted as left out
    check(path, "text", "", "repair")
    with pytest.raises(InputError, match="names 'l', which no row"):
        check(path, {"text": "t", "label": "l"}, "sequence_classification")
    with pytest.raises(InputError, match=r"names 'text', which no row .*there are t;"):
        check(path, "{t}: {text}")
    (tmp_path / "a.txt").write_text("text")
    check(tmp_path / "a.txt", "text")


def test_all_kinds_of_rows_are_looked_at(tmp_path: Path) -> None:
    rows = [{"text": "a", "more": {"title": ["x"]}, "label": "good"}] * 3
    made = {"csv": separated, "tar": tar, "parquet": parquet, "arrow": arrow}
    for kind, write_kind in made.items():
        (tmp_path / f"a.{kind}").write_bytes(write_kind(rows))
        name = "TXT" if kind == "tar" else "text"
        check(
            tmp_path / f"a.{kind}", {"text": name, "label": "cls" if kind == "tar" else "label"}, "regression"
        )
        field = {"text": name, "label": name, "pair": "lable"}
        with pytest.raises(InputError, match="lable"):
            check(tmp_path / f"a.{kind}", field, "regression", "skip")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "json"])
@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("score", ""),
        ("meta.mark", ""),
        ("null", ""),
        ("scroe", "names 'scroe', which no row of the first part of any source has; did you mean 'score'"),
        ("meta.mrak", "did you mean 'meta.mark'"),
        ("other", "there are text, score, meta, null"),
    ],
)
def test_a_column_of_a_cleaning_step(column: str, said: str, suffix: str, tmp_path: Path) -> None:
    rows = [{"text": "a", "score": 1, "meta": {"mark": 2}, "null": None}, {"text": "b"}]
    write(tmp_path / f"a.{suffix}", rows)
    (tmp_path / "b.txt").write_text("plain text has no columns")
    steps = [CleanStep.model_validate({"own": {"function": "own:keep", "columns": [column]}})]
    for name in (f"a.{suffix}", "b.txt"):  # one source with the column suffices
        given = [Source(uri=str(tmp_path / each)) for each in dict.fromkeys((name, f"a.{suffix}"))]
        files = sources.resolve(given)
        if said:
            with pytest.raises(InputError, match=said) as caught:
                check_columns_of_steps(first_parts(files, 2**20), columns_of_steps(steps))
            assert caught.value.where == "data.clean.own.columns"
        else:
            check_columns_of_steps(first_parts(files, 2**20), columns_of_steps(steps))


def test_text_files_have_no_columns_for_a_cleaning_step(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    files = sources.resolve([Source(uri=str(tmp_path / "a.txt"))])
    steps = [CleanStep.model_validate({"url": {"domains": ["a.org"]}}), CleanStep.model_validate("normalize")]
    with pytest.raises(InputError, match=r"names 'url', .*; text files have no columns") as caught:
        check_columns_of_steps(first_parts(files, 2**20), columns_of_steps(steps))
    assert caught.value.where == "data.clean.url.column"
