"""One table as JSONL, CSV, Parquet, Arrow and `Dataset.save_to_disk`, written by Hugging Face's library: the same
records of every kind, for every objective that reads such; and which label a number is, whatever the order of names."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tokenizers import Tokenizer

from orchestrator.config.errors import InputError
from orchestrator.config.records import COLUMNS, COMPARED, REWARDED
from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.encoding import tokenizer
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.prepare.records import Record, RecordKind, records_of
from orchestrator.data.sources.named_columns import check_columns
from orchestrator.data.sources.rejected import Rejected
from workloads.record_format import MARK, from_bits, unpack

KINDS = ("jsonl", "csv", "parquet", "arrow", "saved")
TEMPLATE = (
    "{% for t in tools or [] %}<t>{{ t | tojson }}</t>{% endfor %}{% for m in messages %}{{ m.role }}: "
    "{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}|{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def library() -> Any:
    """Hugging Face's, which is not needed to read what it wrote."""
    found = pytest.importorskip("datasets")
    found.disable_progress_bars()
    return found


@pytest.fixture(scope="module")
def encoder() -> Tokenizer:
    return tokenizer.encoder(train_bytes(["a good film, a bad film"] * 20, 300, ()))


def call(city: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city, **more}}}


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "rome?"}]
TALKS = [
    [*ASKED, {"role": "assistant", "content": "good"}],
    [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call("rome"), call("oslo", days=3)]}],
    [*ASKED, {"role": "assistant", "content": "bad"}, *ASKED, {"role": "assistant", "content": "é"}],
]
TEXTS = ["a good film", 'so\nbad, "a"', "it is é"]
TABLES: dict[str, dict[str, list[Any]]] = {
    "sequence_classification": {"text": TEXTS, "pair": TEXTS[::-1], "label": ["good", "bad", "good"]},
    "multi_label_classification": {"text": TEXTS, "labels": [["good"], ["bad", "good"], []]},
    "sentence_embeddings": {"anchor": TEXTS, "positive": TEXTS[::-1], "negative": [*TEXTS[1:], TEXTS[0]]},
    "regression": {"text": TEXTS, "label": [1.5, -2.0, 0.25]},
    "token_classification": {"words": [t.split() for t in TEXTS], "labels": [["O", "B", "O"], ["B", *"OO"], [*"OOO"]]},
    "span_extraction": {"question": TEXTS, "context": TEXTS, "answer": ["good film", None, "é"], "start": [2, None, 6]},
    "seq2seq": {"source": TEXTS, "target": TEXTS[::-1]},
    "conversation": {"messages": TALKS, "tools": [[TOOL], [TOOL], None]},
    "dpo": {"prompt": TEXTS, "chosen": ["a", "b", "c"], "rejected": ["d", "e", "f"]},
    "kto": {"prompt": TEXTS, "completion": ["a", "b", "c"], "label": [True, False, True]},
    **{name: {"prompt": TEXTS, "answer": ["a", None, "é"], "level": ["1", "2", "3"]} for name in REWARDED},
}  # fmt: skip
TABLES |= dict.fromkeys(COMPARED, TABLES["dpo"])
LABELS = {
    "sequence_classification": ("good", "bad"),
    "multi_label_classification": ("good", "bad"),
    "token_classification": ("B", "O"),
}
"""In another order than the features below have them."""
OF_MESSAGES = {
    "dpo": {"prompt": [ASKED] * 2, "chosen": [TALKS[0][1:], TALKS[1][1:]], "rejected": [TALKS[2][1:2]] * 2},
    "kto": {"prompt": [ASKED] * 2, "completion": [TALKS[0][1:], TALKS[1][1:]], "label": [True, False]},
}


def features(library: Any, objective: str) -> Any:
    """Those of a table whose labels are numbers with names, None where the library is to find them."""
    label = library.ClassLabel(names=["bad", "good"]), library.ClassLabel(names=["O", "B"])
    text = library.Value("string")
    return {
        "sequence_classification": library.Features(text=text, pair=text, label=label[0]),
        "multi_label_classification": library.Features(text=text, labels=library.List(label[0])),
        "token_classification": library.Features(words=library.List(text), labels=library.List(label[1])),
    }.get(objective)


def write(library: Any, objective: str, table: dict[str, list[Any]], folder: Path) -> dict[str, Path]:
    """The table in files of all kinds. JSONL and CSV say labels by name, as they have no numbers with names; CSV has
    lists and messages as JSON."""
    made = library.Dataset.from_dict(table, features(library, objective))
    found = {kind: folder / f"rows.{kind}" for kind in KINDS[:-1]} | {"saved": folder / "saved"}
    rows = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    named = library.Dataset.from_list(rows)
    named.to_json(found["jsonl"])
    as_text = [{k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows]
    library.Dataset.from_list(as_text).to_csv(found["csv"])
    made.to_parquet(found["parquet"])
    with pa.ipc.new_stream(found["arrow"], made.data.table.schema) as writer:
        writer.write_table(made.data.table)
    made.save_to_disk(found["saved"])
    return found


def read(
    path: Path, kind: RecordKind, columns: dict[str, str], encoder: Tokenizer, **asked: Any
) -> list[Record]:
    files = sources.resolve([Source(uri=str(path), field=columns)], on_error=asked.pop("on_error", "fail"))
    parts = sources.cut(files, 2**20)
    return [
        record for part in parts for span in part for record in records_of(span, kind, encoder, 0, **asked)
    ]


@pytest.mark.contract
@pytest.mark.proves("records", objective="objective", table="jsonl, csv, parquet, arrow, save_to_disk")
@pytest.mark.parametrize(
    ("objective", "table"),
    [*TABLES.items(), *OF_MESSAGES.items()],
    ids=[*TABLES, *(f"{name} of messages" for name in OF_MESSAGES)],
)
def test_all_kinds_of_files_have_the_same_records(
    objective: str, table: dict[str, list[Any]], library: Any, encoder: Tokenizer, tmp_path: Path
) -> None:
    kind = RecordKind(objective, LABELS.get(objective, ()), TEMPLATE)
    columns = {name: name for name in table}
    found = {}
    for name, path in write(library, objective, table, tmp_path).items():
        found[name] = [record.words.tolist() for record in read(path, kind, columns, encoder)]
    assert len(found["jsonl"]) == len(next(iter(table.values())))
    for name in KINDS:
        assert found[name] == found["jsonl"], name
    if objective == "sequence_classification":
        assert [unpack(read_back)[2].tolist() for read_back in _words(found["saved"])] == [[0], [1], [0]]
    if objective == "multi_label_classification":
        assert [unpack(each)[2].tolist() for each in _words(found["csv"])] == [[0], [0, 1], []]
    if objective == "token_classification":
        marks = [[m for m in unpack(each)[1].tolist() if m] for each in _words(found["parquet"])]
        assert marks == [[LABELS[objective].index(x) + 1 for x in row] for row in table["labels"]]
    if objective == "regression":
        assert [from_bits(int(unpack(each)[2][0])) for each in _words(found["csv"])] == table["label"]


def _words(found: list[list[int]]) -> Any:
    return [np.array(each, np.uint32) for each in found]


def test_no_objective_that_reads_records_is_left_out() -> None:
    assert {*TABLES} == {*COLUMNS}


NAMES = ["bad", "fine", "good"]


def numbered(
    library: Any, folder: Path, names: list[str] = NAMES, numbers: list[int] | None = None, wrap: Any = None
) -> list[Path]:
    """A table of numbers that have these names: as Parquet, as a folder, and as JSONL below the card of a dataset."""
    numbers = list(range(len(names))) if numbers is None else numbers
    label = library.ClassLabel(names=names)
    rows = {"t": ["a"] * len(numbers), "in": [{"stars": n} for n in numbers], "all": [[n] for n in numbers]}
    kinds = {"t": library.Value("string"), "in": {"stars": label}, "all": library.List(label)}
    made = library.Dataset.from_dict(rows, library.Features(kinds))
    made.to_parquet(folder / "a.parquet")
    made.save_to_disk(folder / "saved")
    made.to_json(folder / "hub" / "data" / "a.jsonl")
    card_of(library, made.features, folder / "hub")
    return [folder / "a.parquet", folder / "saved", folder / "hub" / "data" / "a.jsonl"]


def card_of(library: Any, features: Any, folder: Path) -> None:
    """The README.md of a dataset, as the library writes its features."""
    info = library.DatasetInfo(features=features)._to_yaml_dict()
    folder.mkdir(exist_ok=True)
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'dataset_info': info})}---\n# A dataset\n")


@pytest.mark.parametrize("labels", [("good", "bad", "fine"), ("other", *NAMES)])
def test_csv_has_the_names_of_its_card_too(
    labels: tuple[str, ...], library: Any, encoder: Tokenizer, tmp_path: Path
) -> None:
    label = library.ClassLabel(names=NAMES)
    columns = {"t": library.Value("string"), "one": label, "all": library.List(label)}
    card_of(library, library.Features(columns), tmp_path)
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["t", "one", "all"], ["a", "0", "[2]"], ["a", "2", "[0]"], ["a", "good", '["bad"]']]
        )
    one = read(
        tmp_path / "a.csv",
        RecordKind("sequence_classification", labels),
        {"text": "t", "label": "one"},
        encoder,
    )
    assert [labels[unpack(record.words)[2][0]] for record in one] == ["bad", "good", "good"]
    words = {"words": "words", "labels": "all"}
    (tmp_path / "b.csv").write_text('words,all\n"[""a"", ""b""]","[0, 2]"\n')
    (found,) = read(tmp_path / "b.csv", RecordKind("token_classification", labels), words, encoder)
    assert [labels[mark - 1] for mark in unpack(found.words)[1].tolist() if mark] == ["bad", "good"]


@pytest.mark.parametrize("path", ["in.stars", "all[0]", "all.0"])
@pytest.mark.parametrize("labels", [("good", "bad", "fine"), ("other", *NAMES)])
def test_a_number_is_the_label_of_its_name(
    labels: tuple[str, ...], path: str, library: Any, encoder: Tokenizer, tmp_path: Path
) -> None:
    kind = RecordKind("sequence_classification", labels)
    for place in numbered(library, tmp_path):
        records = read(place, kind, {"text": "t", "label": path}, encoder)
        assert [labels[unpack(record.words)[2][0]] for record in records] == NAMES


@pytest.mark.parametrize(
    ("names", "numbers", "labels", "said"),
    [
        (NAMES, [0], ("negative", "neutral", "positive"), "its label 0 is called 'bad' by its column"),
        (["1", "2", "3"], [0], ("bad", "fine", "good"), "its label 0 is called '1' by its column"),
        (["5", "1", "0"], [1], tuple(NAMES), "its label 1 is called '1' by its column"),
        (NAMES, [-1], tuple(NAMES), "its label -1 is not among 0 to 2, which its column names"),
        (["0", "1", "2"], [0, 1, 2], tuple(NAMES), ""),
    ],
)  # fmt: skip
def test_a_name_that_the_job_does_not_have_is_refused(
    names: list[str], numbers: list[int], labels: tuple[str, ...], said: str,
    library: Any, encoder: Tokenizer, tmp_path: Path,
) -> None:  # fmt: skip
    kind, columns = RecordKind("sequence_classification", labels), {"text": "t", "label": "in.stars"}
    for place in numbered(library, tmp_path, names, numbers):
        if not said:  # names that say the numbers themselves name nothing
            found = read(place, kind, columns, encoder)
            assert [unpack(record.words)[2][0] for record in found] == numbers
            continue
        with pytest.raises(InputError) as caught:
            read(place, kind, columns, encoder)
        assert f"row 1: {said}" in str(caught.value) or said in str(caught.value)
        rejected = Rejected()
        assert read(place, kind, columns, encoder, on_error="skip", rejected=rejected) == []
        assert rejected.to_json()[0]["count"] == len(numbers)


def test_a_template_over_numbers_with_names_is_refused(
    library: Any, encoder: Tokenizer, tmp_path: Path
) -> None:
    kind = RecordKind("sequence_classification", tuple(NAMES))
    for place in numbered(library, tmp_path):
        with pytest.raises(
            InputError, match=r"'in.stars' holds the numbers of bad, fine, good, and a template"
        ):
            read(place, kind, {"text": "t", "label": "{in.stars}"}, encoder)


def test_data_of_an_earlier_format_is_read_as_it_was(
    library: Any, encoder: Tokenizer, tmp_path: Path
) -> None:
    kind = RecordKind("sequence_classification", tuple(reversed(NAMES)))
    for place in numbered(library, tmp_path):
        records = read(place, kind, {"text": "t", "label": "in.stars"}, encoder, data_format=5)
        assert [unpack(record.words)[2][0] for record in records] == [0, 1, 2]


def test_kto_reads_yes_and_no_of_csv_and_of_names(library: Any, encoder: Tokenizer, tmp_path: Path) -> None:
    kind = RecordKind("kto")
    columns = {name: name for name in ("prompt", "completion", "label")}
    made = library.Dataset.from_dict(
        {"prompt": ["a"] * 2, "completion": ["b"] * 2, "label": [0, 1]},
        library.Features(
            prompt=library.Value("string"),
            completion=library.Value("string"),
            label=library.ClassLabel(names=["True", "false"]),
        ),
    )
    made.to_parquet(tmp_path / "a.parquet")
    found = read(tmp_path / "a.parquet", kind, columns, encoder)
    assert [unpack(record.words)[1].tolist() for record in found] == [[1], [0]]
    (tmp_path / "a.csv").write_text("prompt,completion,label\na,b,True\na,b,no\n")
    with pytest.raises(InputError, match=r"line 3, at byte [0-9]+: its label 'no' is not true or false"):
        read(tmp_path / "a.csv", kind, columns, encoder)


def test_a_text_that_is_no_conversation_stays_a_text(encoder: Tokenizer, tmp_path: Path) -> None:
    said = json.dumps(ASKED)
    rows = [
        {"prompt": "write a chat in JSON", "chosen": said, "rejected": "no"},
        {"prompt": "[1, 2]", "chosen": "[3]", "rejected": "[]"},
        {"prompt": ASKED, "chosen": said, "rejected": "no"},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {name: name for name in rows[0]}
    found = read(path, RecordKind("dpo", (), TEMPLATE), columns, encoder)
    answers = [[unpack(record.words)[0], unpack(record.words)[1]] for record in found]
    decoded = [[_decoded(words, encoder) for words in pair] for pair in answers]
    assert said in decoded[0][0]
    assert decoded[1][0].startswith("[1, 2][3]")
    assert said in decoded[2][0]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv", "json"])
def test_a_null_argument_is_none_unless_it_stands_in_a_text(
    suffix: str, encoder: Tokenizer, tmp_path: Path
) -> None:
    """A table gives a call the arguments of all others, with null, and so do lines that were made of one."""
    explicit = {
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "rome", "x": null}'},
    }
    with_nulls = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call("rome", x=None, y={"z": None})]},
    ]
    talks = [
        with_nulls,
        [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call("rome", x=3, y={"z": 1})]}],
    ]
    rows = [{"m": json.dumps(talk) if suffix == "csv" else talk} for talk in talks]
    path = _written(tmp_path / f"a.{suffix}", rows)
    found = read(path, RecordKind("conversation", (), TEMPLATE), {"messages": "m"}, encoder)
    assert 'weather{"city": "rome", "y": {}}|' in _text(found[0], encoder)
    assert 'weather{"city": "rome", "x": 3, "y": {"z": 1}}|' in _text(found[1], encoder)
    said = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [explicit]}]
    path = _written(tmp_path / f"b.{suffix}", [{"m": json.dumps(said) if suffix == "csv" else said}])
    (found_,) = read(path, RecordKind("conversation", (), TEMPLATE), {"messages": "m"}, encoder)
    assert 'weather{"city": "rome", "x": null}|' in _text(found_, encoder)


def _written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _text(record: Record, encoder: Tokenizer) -> str:
    return _decoded(record.words, encoder)


def _decoded(words: np.ndarray, encoder: Tokenizer) -> str:
    ids = [int(word) & ~MARK for word in words]
    return str(encoder.decode(ids, skip_special_tokens=False))


def test_messages_of_json_text_and_of_the_feature_json(
    library: Any, encoder: Tokenizer, tmp_path: Path
) -> None:
    """As a text, as a list of texts, and as `List(Json())`, which a table holds as texts: what the library gives."""
    kind = RecordKind("conversation", (), TEMPLATE)
    jsons = library.Features(messages=library.List(library.Json()), tools=library.List(library.Json()))
    made = library.Dataset.from_dict({"messages": TALKS, "tools": [[TOOL]] * 3}, jsons)
    made.to_parquet(tmp_path / "json.parquet")
    made.save_to_disk(tmp_path / "saved")
    assert made[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "rome"}
    texts = {"messages": [json.dumps(talk) for talk in TALKS], "tools": [json.dumps([TOOL])] * 3}
    library.Dataset.from_dict(texts).to_parquet(tmp_path / "text.parquet")
    listed = {
        "messages": [[json.dumps(m) for m in talk] for talk in TALKS],
        "tools": [[json.dumps(TOOL)]] * 3,
    }
    library.Dataset.from_dict(listed).to_parquet(tmp_path / "listed.parquet")
    rows = [{"messages": talk, "tools": [TOOL]} for talk in TALKS]
    _written(tmp_path / "rows.jsonl", rows)
    places = ["rows.jsonl", "json.parquet", "saved", "text.parquet", "listed.parquet"]
    columns = {"messages": "messages", "tools": "tools"}
    found = [[r.words.tolist() for r in read(tmp_path / place, kind, columns, encoder)] for place in places]
    assert all(each == found[0] for each in found)


def test_one_source_of_all_kinds_on_a_store(library: Any, encoder: Tokenizer, tmp_path: Path) -> None:
    """Compressed and not, with columns that some files alone have, in whatever encoding of texts and lists."""
    labels = ("good", "bad")
    made = library.Dataset.from_dict(
        {"text": ["a", "b"], "label": [0, 1], "more": [None, None]},
        library.Features(
            text=library.Value("large_string"),
            label=library.ClassLabel(names=["bad", "good"]),
            more=library.Value("null"),
        ),
    )
    made.to_parquet(tmp_path / "0.parquet")
    coded = {
        "text": pa.array(["a", "b"]).dictionary_encode(),
        "label": pa.array(["bad", "good"]).dictionary_encode(),
    }
    pq.write_table(pa.table(coded), tmp_path / "1.parquet")
    rows = [{"text": "a", "label": "bad"}, {"text": "b", "label": "good", "other": {"x": None}}]
    (tmp_path / "2.json.gz").write_bytes(gzip.compress(json.dumps(rows, indent=1).encode()))
    (tmp_path / "3.jsonl.xz").write_bytes(
        lzma.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    )
    (tmp_path / "4.csv").write_text("text,label\na,bad\nb,good\n")
    (tmp_path / "label=bad").mkdir()
    (tmp_path / "label=bad" / "5.jsonl").write_text('{"text": "a"}\n{"text": "b", "label": "good"}\n')
    fs = fsspec.filesystem("memory")
    fs.put(f"{tmp_path}/", "/kinds/", recursive=True)
    try:
        field = {"text": "text", "label": "label"}
        files = sources.resolve([Source(uri="memory://kinds", field=field)])
        check_columns(sources.cut(files, 2**20), "data.sources", "sequence_classification")
        kind = RecordKind("sequence_classification", labels)
        found = read("memory://kinds", kind, field, encoder)
    finally:
        fs.rm("/kinds", recursive=True)
    assert len(files) == 6
    assert [labels[unpack(record.words)[2][0]] for record in found] == ["bad", "good"] * 6
    assert len({record.text for record in found}) == 2  # so that a share holds out the same of each
