"""Datasets as `Dataset.save_to_disk` of Hugging Face writes them: the same rows as that library reads."""

from __future__ import annotations

import json
import random
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.encoding.tokenizer import encoder
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.prepare.records import RecordKind, records_of
from orchestrator.data.sources.documents import pieces

KIND = RecordKind("sequence_classification", ("bad", "good"))
FIELD = {"text": "in.review", "label": "stars"}


@pytest.fixture(scope="module")
def library() -> Any:
    """Hugging Face's, which is not needed to read what it wrote."""
    return pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def saved(library: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with a dataset of several batches and files, `one`, and one of splits, `splits`; its rows."""
    folder, drawn = tmp_path_factory.mktemp("saved"), random.Random(0)
    texts = [f"row {n} " + "word " * drawn.randrange(1, 40) for n in range(3500)]
    rows = {
        "in": [{"review": text, "length": len(text)} for text in texts],
        "stars": [n % 2 for n in range(3500)],
    }
    features = {
        "in": {"review": library.Value("string"), "length": library.Value("int64")},
        "stars": library.ClassLabel(names=["bad", "good"]),
        "text": library.Value("string"),
    }
    found = library.Dataset.from_dict(rows | {"text": texts}, library.Features(features)).shuffle(seed=1)
    found.save_to_disk(folder / "one", num_shards=2)
    splits = library.DatasetDict({"train": found, "test": found.select(range(5))})
    splits.save_to_disk(folder / "splits")
    return folder, found.to_list()


def parts(uri: Path, field: Any, part_bytes: int = 2**16) -> list[sources.Part]:
    """The parts, as tasks on other nodes get them."""
    found = sources.cut(sources.resolve([Source(uri=str(uri), field=field)]), part_bytes)
    return [sources.from_json(sources.to_json(part, 1000)) for part in found]


def test_text_and_records_are_those_that_the_library_reads(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, rows = saved
    texts = parts(folder / "one", "text")
    assert len(texts) > 3
    assert [piece.text for part in texts for span in part for piece in pieces(span)] == [
        r["text"] for r in rows
    ]
    tokenizer = encoder(train_bytes((), 300, ()))
    found = [
        json.loads(record.text)
        for part in parts(folder / "one", FIELD)
        for span in part
        for record in records_of(span, KIND, tokenizer, 0)
    ]
    names = KIND.labels
    assert found == [{"text": row["in"]["review"], "label": names[row["stars"]]} for row in rows]


def test_a_folder_of_splits_names_them(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, rows = saved
    with pytest.raises(InputError) as found:
        parts(folder / "splits", "text")
    uri = folder / "splits"
    line = f"data.sources.0.uri {uri}: holds the splits train, test; name one of them, as in {uri}/train"
    assert str(found.value) == line
    test = parts(folder / "splits" / "test", "text")
    assert [piece.text for part in test for span in part for piece in pieces(span)] == [
        r["text"] for r in rows[:5]
    ]


@pytest.fixture
def mine(saved: tuple[Path, Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0] / "one", tmp_path / "one"))


def read(folder: Path, field: Any = "text", kind: RecordKind = KIND, data_format: int = 6) -> None:
    tokenizer = encoder(train_bytes((), 300, ()))
    for part in parts(folder, field):
        for span in part:
            records = isinstance(field, dict)
            list(records_of(span, kind, tokenizer, 0, data_format=data_format) if records else pieces(span))


def test_what_is_wrong_is_told_in_one_line(mine: Path) -> None:
    file = mine / "data-00000-of-00002.arrow"
    with pytest.raises(InputError, match=r"arrow: has no column 'txt'; set field to one of in, stars, text"):
        read(mine, "txt")
    with pytest.raises(InputError, match=r"row 1: has no text 'stars' but int"):
        read(mine, "stars")
    with pytest.raises(InputError, match="row 1: "):
        read(mine, {"text": "text", "label": "text"})
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-8], b"no Arrow at all", b""):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match="is not an Arrow file"):
            read(mine)
    file.unlink()
    with pytest.raises(InputError, match=r"data-00000-of-00002.arrow"):
        read(mine)


def test_a_dataset_with_an_order_of_its_own_is_refused(mine: Path) -> None:
    state = json.loads((mine / "state.json").read_text())
    (mine / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(
        InputError, match=r"reads its rows in an undefined order; save it after flatten_indices"
    ):
        read(mine)
    (mine / "state.json").write_text("[]")
    with pytest.raises(InputError, match=r"has a state.json without files"):
        read(mine)


def test_a_change_while_it_is_read_is_noticed(mine: Path) -> None:
    found = parts(mine, "text")
    file = mine / "data-00001-of-00002.arrow"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match="has changed since this command began to read it"):
        list(chain.from_iterable(pieces(span) for part in found for span in part))
