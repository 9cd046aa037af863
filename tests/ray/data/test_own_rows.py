"""Rows of a Ray Data pipeline: written once, in order, whatever happens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from jobs import job

from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.data.config import Source
from orchestrator.data.config import own_rows as place_of
from orchestrator.data.sources import own_rows
from orchestrator.data.store.tokens import Tokens
from orchestrator.resolve.prepared_data import PreparedData, prepared
from orchestrator.storage.run_directory import RunDir

pytestmark = pytest.mark.usefixtures("pipelines", "two_cpus")

PIPELINES = """
import time
import numpy as np
import pyarrow as pa
import ray

def articles(count=1000, blocks=2):
    return ray.data.range(count, override_num_blocks=blocks).map_batches(batch, batch_size=None)

def batch(rows):
    time.sleep(1.0 if rows["id"][0] == 0 else 0.0)  # the first block is ready last
    return {"text": [f"article {n} of {n * 7 % 13}" for n in rows["id"]], "n": rows["id"]}

def raises():
    def fail(row):
        raise ValueError(f"no article {row['id']}")
    return ray.data.range(3).map(fail)

def nothing():
    return ray.data.from_items([])

def number():
    return 5

def with_arrays():
    rows = ray.data.range(40).map_batches(batch, batch_size=None)
    return rows.map(lambda row: {**row, "image": np.zeros((2, 3)), "meta": {"lang": "en", "tags": ["a"]}})

def with_a_gap():
    ids = pa.array([2**53 + 1, None], pa.int64())
    return ray.data.from_arrow(pa.table({"n": ids, "text": ["one", "two"]}))

def mixed():
    return ray.data.range(10000, override_num_blocks=2).map(lambda row: {"a": 1} if row["id"] < 5000 else {"b": 1})
"""


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module of the user's, found before Ray starts: its workers find it too."""
    folder = tmp_path_factory.mktemp("pipelines")
    (folder / "own_pipelines.py").write_text(PIPELINES)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def source(cache: str, function: str, **options: Any) -> Source:
    own = {"use": f"own_pipelines:{function}", "options": options}
    return Source(own=own, fingerprint="v1", uri=f"{cache}/{place_of(own, 'v1')}")


def numbers(folder: Path) -> list[int]:
    return [n for path in sorted(folder.glob("*.parquet")) for n in pq.read_table(path)["n"].to_pylist()]


@pytest.mark.contract
def test_rows_have_the_order_of_the_dataset_and_the_files_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_rows, "BATCH", 100)
    monkeypatch.setattr(own_rows, "FILE_BYTES", 2000)
    given = source(f"{tmp_path}/cache", "articles")
    folder = Path(given.name).parent
    assert not own_rows.is_made(given)
    folder.mkdir(parents=True)
    (folder / "part-00099.parquet").write_bytes(b"of a process that was killed")
    lines: list[str] = []
    own_rows.make_rows(given, "data.sources.0.own", lines.append)
    assert own_rows.is_made(given)
    assert numbers(folder) == list(range(1000))
    names = sorted(path.name for path in folder.iterdir())
    assert names == [own_rows.MADE, *(f"part-{number:05d}.parquet" for number in range(len(names) - 1))]
    assert len(names) > 2
    assert json.loads((folder / own_rows.MADE).read_text())["rows"] == 1000
    assert lines[-1].endswith(": 1000 rows are written")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "no draft is left"


def test_rows_come_as_blocks_end_where_ray_is_not_told_to_keep_their_order() -> None:
    """The default of Ray Data, which neither a seed nor the order of files changes."""
    import ray

    def last(rows: dict[str, Any]) -> dict[str, Any]:
        time.sleep(5.0 if rows["id"][0] == 0 else 0.0)  # while a second worker starts
        return rows

    assert not ray.data.DataContext.get_current().execution_options.preserve_order
    blocks = ray.data.range(8, override_num_blocks=4).map_batches(last, batch_size=None)
    assert [row["id"] for row in blocks.iter_rows()] == [*range(2, 8), 0, 1]


def test_a_null_rounds_no_integer_beside_it(tmp_path: Path) -> None:
    """The default format of Ray Data's batches turns such a block into float64."""
    given = source(f"{tmp_path}/cache", "with_a_gap")
    own_rows.make_rows(given, "data.sources.0.own", print)
    assert numbers(Path(given.name).parent) == [2**53 + 1, None]


def test_the_rows_of_another_process_that_was_faster_stay(tmp_path: Path) -> None:
    given = source(f"{tmp_path}/cache", "articles", count=10)
    own_rows.make_rows(given, "own", lambda _: None)
    folder = Path(given.name).parent
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    own_rows.make_rows(given, "own", lambda _: None)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_files_of_others_in_the_folder_stay(tmp_path: Path) -> None:
    given = source(f"{tmp_path}/cache", "articles", count=10)
    folder = Path(given.name).parent
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(
        InputError,
        match="is a folder with other files than rows of `own`; remove the folder, or give another",
    ):
        own_rows.make_rows(given, "own", lambda _: None)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    given = source(f"{tmp_path}/cache", "articles", count=10)
    with pytest.raises(InputError, match=r"^data.cache .*own-articles-\w+: cannot be read or written \("):
        own_rows.make_rows(given, "own", lambda _: None)


def test_rows_on_an_object_store() -> None:
    given = source("memory://bucket/cache", "articles", count=10)
    own_rows.make_rows(given, "own", lambda _: None)
    assert own_rows.is_made(given)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("raises", "raises: fails: ValueError: no article [012]; correct the function"),
        ("nothing", "nothing: gives no rows"),
        ("number", "number: returns int, not a ray.data.Dataset"),
        ("mixed", "mixed: gives rows of different columns: "),
        ("missing", "has no missing"),
    ],
)
def test_what_a_function_does_wrong_is_told_and_nothing_is_left(
    tmp_path: Path, function: str, line: str
) -> None:
    given = source(f"{tmp_path}/cache", function)
    with pytest.raises(InputError, match=f"^data.sources.0.own own_pipelines.*{line}"):
        own_rows.make_rows(given, "data.sources.0.own", lambda _: None)
    assert not own_rows.is_made(given)
    assert not list(tmp_path.rglob("*.parquet"))


def test_the_rows_become_the_tokens_of_the_same_text_in_files(tmp_path: Path) -> None:
    """Columns that nothing reads may hold anything, such as arrays."""
    given = source(f"{tmp_path}/cache", "with_arrays")
    own_rows.make_rows(given, "own", lambda _: None)
    files = tmp_path / "files.jsonl"
    texts = [f"article {n} of {n * 7 % 13}" for n in range(40)]
    files.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    found = []
    for name, one in (("own", given.model_dump(mode="json")), ("files", {"uri": str(files)})):
        document = job("a.txt")
        document["data"] |= {
            "sources": [one],
            "cache": str(tmp_path / "cache"),
            "tokenizer": {"train_bpe": 320},
        }
        made = prepared(parse(document), RunDir(str(tmp_path / name)), PreparedData(), lambda *_, **__: None)
        tokens = Tokens.open(made.uri)
        found.append(list(tokens.window(0, 0, tokens.length(0))))
    assert found[0] == found[1]
