"""What a label in a row means: its name wins, and a number counts only where no label could be meant by name."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.encoding.tokenizer import encoder
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.prepare.labels import Labels
from orchestrator.data.prepare.records import RecordKind, records_of
from orchestrator.data.prepare.rejections import notes, totals
from orchestrator.data.sources.rejected import Rejected, Unfit
from workloads.record_format import unpack

STARS, SIGNS, TRUTHS = ("1", "2", "3", "4", "5"), ("-1", "0", "1"), ("true", "false")


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    return encoder(train_bytes((), 300, ()))


@pytest.mark.parametrize(
    ("names", "value", "number"),
    [
        *((STARS, star, star - 1) for star in range(1, 6)),
        *((SIGNS, sign, sign + 1) for sign in (-1, 0, 1)),
        (TRUTHS, True, 0),
        (TRUTHS, False, 1),
        (("False", "True"), True, 1),
        (("No", "TRUE"), True, 1),
        (("1", "0"), True, 0),
        (STARS, 5.0, 4),
        (("0.5", "1.5"), 1.5, 1),
        (("1.0", "2.0"), 2, 1),
        (("bad", "good"), 1, 1),
        (("bad", "good"), "1", 1),
        (("bad", "good"), True, 1),
        (("bad", "good"), 1.0, 1),
    ],
    ids=str,
)
def test_a_number_or_a_truth_is_the_label_of_that_name(
    names: tuple[str, ...], value: Any, number: int
) -> None:
    labels = Labels(names)
    assert labels.number_of(value) == number
    assert labels.is_by_number([value]) == (names == ("bad", "good"))
    assert labels.number_of(names[number]) == number
    assert not labels.is_by_number(list(names))


@pytest.mark.parametrize(
    ("names", "value"),
    [
        (STARS, 0),
        (STARS, "0"),
        (SIGNS, 2),
        (("true", "maybe"), False),
        (("1", "other"), False),
        (("bad", "good"), "²"),
        (("bad", "good"), "9" * 5000),
        (("bad", "good"), 0.5),
        (("bad", "good"), float("nan")),
        (("bad", "good"), float("inf")),
        (("bad", "good"), -1),
        (("bad", "good"), None),
        (("bad", "good"), [1]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_no_label_is_called_is_refused_where_labels_are_numbers_or_truths(
    names: tuple[str, ...], value: Any
) -> None:
    with pytest.raises(Unfit, match=r"its label .* is not (one of|among)"):
        Labels(names).number_of(value)


def test_a_run_of_an_earlier_version_reads_its_labels_as_it_began() -> None:
    assert Labels(STARS, 5).number_of(1) == 1
    assert Labels(TRUTHS, 5).number_of(True) == 1
    assert not Labels(STARS, 5).is_by_number(1)


ROWS = [("one", "1", True), ("five", "5", False), ("two", "2", True)]


@pytest.mark.parametrize("column", ["star", "truth"])
def test_every_kind_of_file_says_the_same(column: str, letters: Tokenizer, tmp_path: Path) -> None:
    """As text, as numbers and as truths of JSON and of a table."""
    names = STARS if column == "star" else ("false", "true")
    rows = [{"text": text, "star": int(star), "truth": truth} for text, star, truth in ROWS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("text", "star", "truth"), *((t, s, str(b).lower()) for t, s, b in ROWS)])
    found = {
        kind: read(tmp_path / f"rows.{kind}", names, column, letters) for kind in ("jsonl", "parquet", "csv")
    }
    wanted = [int(star) - 1 for _, star, _ in ROWS] if column == "star" else [1, 0, 1]
    assert found == dict.fromkeys(found, (wanted, []))


def read(
    path: Path, names: tuple[str, ...], column: str, letters: Tokenizer
) -> tuple[list[int], list[dict[str, Any]]]:
    files = sources.resolve([Source(uri=str(path), field={"text": "text", "label": column})])
    kind, rejected = RecordKind("sequence_classification", names), Rejected()
    spans = [span for part in sources.cut(files, 2**20) for span in part]
    found = [record for span in spans for record in records_of(span, kind, letters, 0, rejected)]
    return [int(unpack(record.words)[-1][0]) for record in found], rejected.to_json()


def test_labels_by_number_are_said_once_with_their_count(letters: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": "a", "label": n % 2}) + "\n" for n in range(9)))
    found, told = read(path, ("bad", "good"), "label", letters)
    assert found == [n % 2 for n in range(9)]
    (line,) = notes(totals(told), "here")
    assert line == "9 documents read by number (label 9); see here/rejected.jsonl"
    assert told[0]["examples"][0]["what"] == "takes a label by its number"


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_the_numbers_of_a_class_label_are_its_names(kind: str, letters: Tokenizer, tmp_path: Path) -> None:
    library = pytest.importorskip("datasets")
    names = ["2", "3", "1"]
    features = {"text": library.Value("string"), "label": library.ClassLabel(names=names)}
    made = library.Dataset.from_dict({"text": list("abc"), "label": [0, 1, 2]}, library.Features(features))
    if kind == "parquet":
        made.to_parquet(tmp_path / "rows.parquet")
    else:
        made.save_to_disk(tmp_path / "rows.arrow")
    found = read(tmp_path / f"rows.{kind}", ("1", "2", "3"), "label", letters)
    assert found == ([1, 2, 0], [])
    with pytest.raises(InputError, match="name the labels as the column does: 2, 3, 1"):
        read(tmp_path / f"rows.{kind}", ("one", "two", "three"), "label", letters)
