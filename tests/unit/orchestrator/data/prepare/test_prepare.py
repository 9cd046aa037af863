"""Preparing records without a cluster: what is refused before a row is encoded, and what a run that began with an
earlier format gets again."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.config import DataSpec
from orchestrator.data.encoding import tokenizer
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.prepare import part_tasks
from orchestrator.data.prepare.fingerprint import chosen_tokenizer, fingerprint
from orchestrator.data.prepare.prepare import prepare
from orchestrator.data.prepare.record_kind import kind_of
from orchestrator.data.prepare.records import RecordKind
from orchestrator.data.store.tokens import Tokens
from workloads.record_format import unpack

KIND = RecordKind("sequence_classification", ("good", "bad"))
FEATURES = {"info": {"features": {"label": {"names": ["bad", "good"], "_type": "ClassLabel"}}}}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run in this process."""

    def run(task: Any, rows: list[dict[str, Any]], cache: str, *_: Any, **__: Any) -> Iterator[int]:
        for done, row in enumerate(rows, 1):
            part_tasks.raise_error(part_tasks.run_task(task, cache, row))
            yield done

    monkeypatch.setattr(part_tasks, "run_tasks", run)


@pytest.fixture
def data(tmp_path: Path) -> DataSpec:
    (tmp_path / "tokenizer.json").write_text(train_bytes(["a few words"], 300, ()))
    schema = pa.schema([("text", pa.string()), ("label", pa.int64())], {"huggingface": json.dumps(FEATURES)})
    pq.write_table(pa.table({"text": ["a", "b", "c"], "label": [0, 1, 1]}, schema), tmp_path / "a.parquet")
    field = {"text": "text", "label": "label"}
    return DataSpec(
        sources=[{"uri": str(tmp_path / "a.parquet"), "field": field}],
        labels=list(KIND.labels),
        tokenizer=str(tmp_path / "tokenizer.json"),
        sequence_length=8,
    )


@pytest.mark.usefixtures("here")
def test_another_process_may_read_the_tokenizer(
    data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller leaves it to one that has transformers imported: all of it travels there and back."""
    read: list[bool] = []
    load, elsewhere = tokenizer.load, [False]

    def counted(*arguments: Any) -> Any:
        read.append(elsewhere[0])
        return load(*arguments)

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        sent, given = pickle.loads(pickle.dumps((function, arguments)))
        elsewhere[0] = True
        answer = sent(*given)
        elsewhere[0] = False
        return pickle.loads(pickle.dumps(answer))

    monkeypatch.setattr(tokenizer, "load", counted)
    asked = partial(kind_of, data, KIND.objective)
    uri = prepare(data, (), str(tmp_path / "cache"), kind_of=asked, call=call)
    assert read
    assert all(read)
    assert labels_of(uri) == [1, 0, 0]
    assert prepare(data, (), str(tmp_path / "cache"), kind_of=asked) == uri


def labels_of(uri: str) -> list[int]:
    tokens = Tokens.open(uri)
    ends = tokens.document_ends(0).tolist()
    words = [tokens.window(0, a, b - a)[:-1] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    return [int(unpack(each)[2][0]) for each in words]


@pytest.mark.usefixtures("here")
def test_numbers_are_labels_by_name_but_for_a_run_that_began_before(data: DataSpec, tmp_path: Path) -> None:
    assert labels_of(prepare(data, (), str(tmp_path / "cache"), kind_of=lambda _: KIND)) == [1, 0, 0]
    files, chosen = sources.resolve(data.sources), chosen_tokenizer(data, ())
    before = fingerprint(files, chosen, sources.part_size(files), 5, KIND)
    uri = prepare(data, (), str(tmp_path / "cache"), kind_of=lambda _: KIND, before=before)
    assert uri.endswith(before)
    assert labels_of(uri) == [0, 1, 1]


@pytest.mark.usefixtures("here")
def test_a_column_that_no_row_has_is_refused_but_of_a_run_that_began_before(
    data: DataSpec, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a", "label": "bad", "other": "b"}\n')
    wrong = {"uri": str(rows), "field": {"text": "text", "label": "label", "pair": "othr"}}
    data = data.model_copy(update={"sources": [type(data.sources[0])(**wrong)]})
    with pytest.raises(InputError, match=r"data.sources.0.field: names 'othr', .* did you mean 'other'\?"):
        prepare(data, (), str(tmp_path / "cache"), kind_of=lambda _: KIND)
    files, chosen = sources.resolve(data.sources), chosen_tokenizer(data, ())
    before = fingerprint(files, chosen, sources.part_size(files), 5, KIND)
    with pytest.raises(InputError, match="its pair is empty"):  # as it was told then
        prepare(data, (), str(tmp_path / "cache"), kind_of=lambda _: KIND, before=before)
