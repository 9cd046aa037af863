"""Which paths of a job file become absolute, and which stay."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import spec
from orchestrator.config.paths import resolve_paths
from orchestrator.data.config import TrainBpe

SMALLEST: dict[str, Any] = {
    "name": "small",
    "workload": {"model": "gpt-tiny"},
    "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 32},
    "train": {"steps": 100, "global_batch": 8},
}


def changed(key: str, value: Any) -> dict[str, Any]:
    """The smallest job with one value put in."""
    document = copy.deepcopy(SMALLEST)
    place: Any = document
    *parents, last = key.split(".")
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    return document


def test_relative_paths_become_absolute_and_others_stay() -> None:
    document = changed("data.cache", "cache") | {
        "workload": {"model": "hf:models/a"},
        "tracking": {"uri": "sqlite:///mlflow.db"},
    }
    document["checkpoint"] = {"export_to": "out"}
    document["data"]["tokenizer"] = "../tokenizer.json"
    document["data"]["sources"] = [
        {"uri": "a/*.txt"}, {"uri": "/b.txt"}, {"uri": "s3://bucket/c.txt"}, {"uri": "zip://d.txt::e.zip"},
    ]  # fmt: skip
    job = resolve_paths(spec.parse(document), Path("/work/here"))
    assert [s.uri for s in job.data.sources] == [
        "/work/here/a/*.txt", "/b.txt", "s3://bucket/c.txt", "zip://d.txt::e.zip",
    ]  # fmt: skip
    assert job.data.tokenizer == "/work/tokenizer.json"
    assert job.data.cache == "/work/here/cache"
    assert job.checkpoint.export_to == "/work/here/out"
    assert job.workload.model == "hf:/work/here/models/a"
    assert job.tracking is not None
    assert job.tracking.uri == "sqlite:////work/here/mlflow.db"


@pytest.mark.parametrize(
    ("notices", "there"),
    [("aws", "aws"), ("http://x/notice", "http://x/notice"), ("notice", "/here/notice"), (None, None)],
)
def test_where_notices_of_preemption_come_from(notices: str | None, there: str | None) -> None:
    job = resolve_paths(spec.parse({**SMALLEST, "resources": {"notices": notices}}), Path("/here"))
    assert job.resources.notices == there


def test_what_is_not_given_stays_so() -> None:
    job = resolve_paths(spec.parse(SMALLEST), Path("/here"))
    assert (job.data.cache, job.checkpoint.export_to, job.tracking) == (None, None, None)


@pytest.mark.parametrize("uri", ["http://host:5000", "sqlite:////abs/mlflow.db", "postgresql://host/db"])
def test_tracking_that_is_no_relative_file_stays(uri: str) -> None:
    job = resolve_paths(spec.parse(changed("tracking", {"uri": uri})), Path("/here"))
    assert job.tracking is not None
    assert job.tracking.uri == uri


def test_resolving_twice_changes_nothing() -> None:
    once = resolve_paths(spec.parse(SMALLEST), Path("/here"))
    assert resolve_paths(once, Path("/elsewhere")) == once
    assert once.data.tokenizer == TrainBpe(train_bpe=512)
    assert once.workload.model == "gpt-tiny"


def test_paths_of_held_out_text_become_absolute() -> None:
    document = changed("data.validation.sources", [{"uri": "held.txt"}])
    document["evaluate"] = {"sets": {"wiki": {"sources": [{"uri": "wiki/*.jsonl"}, {"uri": "s3://b/c.txt"}]}}}
    job = resolve_paths(spec.parse(document), Path("/here"))
    assert {
        name: (where, [s.uri for s in sources]) for name, (where, sources) in job.set_sources.items()
    } == {
        "validation": ("data.validation.sources", ["/here/held.txt"]),
        "wiki": ("evaluate.sets.wiki.sources", ["/here/wiki/*.jsonl", "s3://b/c.txt"]),
    }
    assert list(job.set_sources) == job.set_names
