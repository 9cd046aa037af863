"""What `init` sees in rows with labels, in every kind of file; and the jobs that it writes of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import ClassLabel, Dataset, Features, Sequence, Value

from orchestrator.config.errors import InputError
from orchestrator.launch.first_job import first_job
from orchestrator.launch.first_rows import rows_at
from orchestrator.launch.labelled_rows import labelled_rows

ROWS = [
    {"id": n, "review": f"a film of {n} minutes", "sentiment": ("good", "bad", "good")[n % 3]}
    for n in range(9)
]


def of(folder: Path, rows: list[dict[str, Any]], asked: str | None = None) -> Any:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return labelled_rows([str(folder / "rows.jsonl")], asked, reads_spans=True)


def test_labels_are_listed_and_counted_in_every_kind_of_file(tmp_path: Path) -> None:
    table = Dataset.from_list(ROWS)
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    wanted = of(tmp_path, ROWS)
    assert (wanted.objective, wanted.field) == (
        "sequence_classification",
        {"text": "review", "label": "sentiment"},
    )
    assert wanted.labels == {"bad": 3, "good": 6}
    assert wanted.line == "9 rows; labels: bad (3), good (6)"
    for name in ("rows.parquet", "saved", "rows.json", "rows.csv"):
        assert labelled_rows([str(tmp_path / name)], None, reads_spans=False) == wanted


def test_names_of_a_class_label_keep_their_order(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["pos", "neg", "none"])})
    table = Dataset.from_list([{"text": "a", "label": 1}, {"text": "b", "label": 0}] * 3, features=features)
    table.save_to_disk(str(tmp_path / "saved"))
    found = labelled_rows([str(tmp_path / "saved")], None, reads_spans=False)
    assert found is not None
    assert [*found.labels.items()] == [("pos", 3), ("neg", 3), ("none", 0)]
    features = Features(
        {"tokens": Sequence(Value("string")), "ner_tags": Sequence(ClassLabel(names=["O", "PER"]))}
    )
    tagged = Dataset.from_list([{"tokens": ["a", "Ann"], "ner_tags": [0, 1]}] * 2, features=features)
    tagged.to_parquet(str(tmp_path / "tagged.parquet"))
    found = labelled_rows([str(tmp_path / "tagged.parquet")], None, reads_spans=False)
    assert found is not None
    assert (found.objective, found.labels) == ("token_classification", {"O": 2, "PER": 2})


@pytest.mark.parametrize(
    ("rows", "asked", "objective", "field", "labels"),
    [
        ([{"text": "a", "label": 0.5}, {"text": "b", "label": 1}], None, "regression",
         {"text": "text", "label": "label"}, {}),
        ([{"text": "a", "stars": n} for n in (1, 5, 5)], None, "sequence_classification",
         {"text": "text", "label": "stars"}, {"1": 1, "5": 2}),
        ([{"text": "a", "stars": n} for n in (1, 5, 5)], "regression", "regression",
         {"text": "text", "label": "stars"}, {}),
        ([{"premise": "a", "hypothesis": "b", "label": True}], None, "sequence_classification",
         {"text": "premise", "pair": "hypothesis", "label": "label"}, {"true": 1}),
        ([{"question": "a?", "context": "b", "answers": {"text": ["b"], "answer_start": [0]}}], None,
         "span_extraction", {"question": "question", "context": "context", "answer": "answers.text.0",
         "start": "answers.answer_start.0"}, {}),
    ],
)  # fmt: skip
def test_the_rows_say_the_objective(
    tmp_path: Path, rows: list[dict[str, Any]], asked: str | None, objective: str, field: Any, labels: Any
) -> None:
    found = of(tmp_path, rows, asked)
    assert (found.objective, found.field, dict(found.labels)) == (objective, field, labels)


@pytest.mark.parametrize("digits", [False, True])
def test_many_names_of_a_class_label_are_labels(tmp_path: Path, digits: bool) -> None:
    names = [str(n) if digits else f"intent {n}" for n in range(77)]
    features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
    table = Dataset.from_list([{"text": "a", "label": n} for n in range(77)], features=features)
    table.to_parquet(str(tmp_path / "rows.parquet"))
    found = labelled_rows([str(tmp_path / "rows.parquet")], None, reads_spans=False)
    assert found is not None
    assert (found.objective, [*found.labels]) == ("sequence_classification", names)


@pytest.mark.parametrize("row", [[0, 1, 0], [0.0, 1.0, 0.0]])
def test_labels_without_names_are_asked_for(tmp_path: Path, row: list[float]) -> None:
    with pytest.raises(InputError, match="its column labels has 0 or 1 for each label, and no names"):
        of(tmp_path, [{"text": "a", "labels": row}, {"text": "b", "labels": row[::-1]}])
    assert of(tmp_path, [{"text": "a", "labels": [0, 1]}, {"text": "b", "labels": [1]}]).labels == {
        "0": 1,
        "1": 2,
    }


def test_a_long_text_of_a_csv_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"text,label\n{'long ' * 40_000},good\nshort,bad\n")
    found = labelled_rows([str(path)], None, reads_spans=False)
    assert found is not None
    assert found.line == "2 rows; labels: bad (1), good (1)"
    limit = csv.field_size_limit()
    monkeypatch.setattr("orchestrator.launch.first_rows.LINE_BYTES", 1000)
    with pytest.raises(InputError, match="field larger than field limit"):
        labelled_rows([str(path)], None, reads_spans=False)
    csv.field_size_limit(limit)


def test_the_beginning_of_a_long_json_list_is_not_called_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.launch.first_rows.PEEK", 2000)
    path = tmp_path / "rows.json"
    for rows, begin in ((ROWS, "9 rows; labels"), (ROWS * 20, "the first ")):
        path.write_text(json.dumps(rows, indent=1))
        found = labelled_rows([str(path)], None, reads_spans=False)
        assert found is not None
        assert found.line.startswith(begin)
        assert found.more == (found.rows < len(rows))


def test_rows_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    assert of(tmp_path, [{"text": "a", "n": 1}]) is None
    with pytest.raises(InputError, match="has no column with a label, only text, n; name its column label"):
        of(tmp_path, [{"text": "a", "n": 1}], "sequence_classification")
    with pytest.raises(InputError, match="its rows fit sequence_classification, not token_classification"):
        of(tmp_path, ROWS, "token_classification")


def test_rows_without_a_label_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('text,label\n"a, ""b""\nc",good\nd,bad\ne,\nf\n')
    found = labelled_rows([str(path)], None, reads_spans=False)
    assert found is not None
    assert found.line == "4 rows; labels: bad (1), good (1); without a label: 2, which a run refuses"


def test_a_folder_of_saved_conversations_is_seen(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    Dataset.from_list([{"messages": talk}] * 3).save_to_disk(str(tmp_path / "saved"))
    found = rows_at(str(tmp_path / "saved"))
    assert found is not None
    assert (found.objective, found.field) == ("conversation", {"messages": "messages"})


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (
            "sequence_clasification",
            "there is no objective sequence_clasification; did you mean sequence_classification",
        ),
        ("sequence_classification", "needs a pretrained model"),
        ("kto", "its rows fit conversation, not kto; give --objective conversation"),
    ],
)
def test_an_objective_that_cannot_be_is_one_line(tmp_path: Path, asked: str, wanted: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    with pytest.raises(InputError, match=wanted):
        first_job("mine", [str(tmp_path / "rows.jsonl")], objective_name=asked)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ("grpo", {"prompt": "prompt", "answer": "completion"}),
        ("seq2seq", {"source": "prompt", "target": "completion"}),
        ("causal_lm", "completion"),
    ],
)
def test_the_objective_chooses_the_columns(tmp_path: Path, asked: str, field: Any) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "longer"}))
    written = yaml.safe_load(first_job("mine", [str(tmp_path / "rows.jsonl")], objective_name=asked).text)
    assert (written["workload"]["objective"], written["data"]["sources"][0]["field"]) == (asked, field)
