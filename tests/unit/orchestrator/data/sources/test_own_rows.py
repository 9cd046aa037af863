"""What a job file says of rows that a function makes; `tests/ray/data/test_own_rows.py` makes some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.config.errors import InputError
from orchestrator.config.paths import resolve_paths
from orchestrator.config.spec import JobSpec, dump, parse
from orchestrator.data.sources import resolve
from orchestrator.data.sources.check import check_sources
from orchestrator.launch.own_sources import make_own_sources


def job_of(source: dict[str, Any], **data: Any) -> JobSpec:
    text = {"tokenizer": {"train_bpe": 320}, "sequence_length": 16, "cache": "cache"}
    document = {"sources": [source], **text, **data}
    return parse(
        {"name": "a", "seed": 1, "workload": {"model": "gpt-tiny"}, "data": document, "train": TRAIN}
    )


TRAIN = {"steps": 4, "global_batch": 4, "optimizer": {"lr": 1e-3}}
OWN = {"own": "news:articles", "fingerprint": "v1"}


def test_the_rows_are_in_the_cache_by_function_options_and_fingerprint(tmp_path: Path) -> None:
    spec = resolve_paths(job_of(OWN), tmp_path)
    (place,) = spec.data.sources[0].places
    assert place.startswith(f"{tmp_path}/cache/own-articles-")
    assert place.endswith("/*.parquet")
    others = (
        {**OWN, "fingerprint": "v2"},
        {**OWN, "own": {"use": "news:articles", "options": {"year": 2026}}},
        {**OWN, "own": "news:letters"},
    )
    places = {job_of(each).data.sources[0].name for each in (OWN, *others)}
    assert len(places) == 4
    same = {"use": "news:articles", "options": {}}
    assert job_of({**OWN, "own": same}).data.sources == job_of(OWN).data.sources


def test_a_stored_job_is_the_same_job_in_another_cache_too(tmp_path: Path) -> None:
    spec = resolve_paths(job_of(OWN), tmp_path)
    document = yaml.safe_load(dump(spec))
    assert parse(document) == spec
    document["data"]["cache"] = "/elsewhere"
    moved = parse(document)
    assert moved.data.sources[0].name.startswith("/elsewhere/own-articles-")
    del document["data"]["cache"]
    assert parse(document).identity()["data"]["sources"][0]["fingerprint"] == "v1"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ({"own": "news:articles"}, "own needs fingerprint, your name for its rows"),
        ({"uri": "a.txt", "fingerprint": "v1"}, "fingerprint is the name of the rows of own"),
        ({"own": "news", "fingerprint": "v1"}, r"data\.sources\.0\.own"),
        ({}, r"data\.sources\.0\.uri"),
    ],
)
def test_what_is_wrong_is_told(source: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        job_of(source)


def test_held_out_text_is_in_files() -> None:
    with pytest.raises(InputError, match=r"data\.validation\.sources\.0\.uri"):
        job_of({"uri": "a.txt"}, validation={"sources": [OWN]})


def test_rows_that_are_not_made_say_how_to_make_them(tmp_path: Path) -> None:
    sources = resolve_paths(job_of(OWN), tmp_path).data.sources
    folder = Path(sources[0].name).parent
    folder.mkdir(parents=True)
    (folder / "part-00000.parquet").write_bytes(b"of a process that was killed before it wrote all rows")
    with pytest.raises(
        InputError, match="the rows of news:articles are not made yet; `orchestrator data prepare JOB`"
    ):
        resolve(sources)


def test_rows_need_a_folder_for_all_nodes() -> None:
    data = job_of(OWN, cache=None).data
    with pytest.raises(InputError, match=r"data\.cache: is unset, and rows of `own` are written there"):
        make_own_sources(data, None, print)
    with pytest.raises(InputError, match=r"data\.cache: is unset"):  # before their rows are missed
        check_sources(data, "causal_lm", {})
    make_own_sources(job_of({"uri": "a.txt"}, cache=None).data, None, print)
