"""Paths that one machine has and a cluster does not."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config.overrides import override
from orchestrator.config.spec import JobSpec, parse
from orchestrator.launch.job_paths import local, read_paths, written_paths

DEFAULT_REGIONS = {
    "data.sources": "[{uri: corpus/*.txt}]",
    "evaluate.sets.wiki.sources": "[{uri: wiki.txt}]",
    "data.tokenizer": "tokenizer.json",
    "data.cache": "cache",
    "data.chat_template": "chat.jinja",
    "workload.model": "hf:models/mine",
    "workload.init_from": "runs/base@best",
    "distill": "{teacher: 'runs/large@best'}",
    "resources.notices": "/etc/notice",
    "limits.prices": "prices.csv",
    "tracking": "{uri: 'sqlite:///mlflow.db'}",
    "checkpoint.export_to": "out",
}
SHARED = {
    "data.sources": "[{uri: 's3://b/*.txt'}]",
    "evaluate.sets.wiki.sources": "[{uri: 's3://b/wiki.txt'}]",
    "data.tokenizer": "gs://b/tokenizer.json",
    "data.cache": "s3://b/cache",
    "data.chat_template": "shipped:qwen3",
    "workload.model": "gpt-tiny",
    "workload.init_from": "s3://b/base@5",
    "distill": "{teacher: 's3://b/large@5'}",
    "resources.notices": "aws",
    "limits.prices": "s3://b/prices.csv",
    "tracking": "{uri: 'https://mlflow'}",
    "checkpoint.export_to": "s3://b/out",
}


def job(**given: str) -> JobSpec:
    document: dict[str, Any] = {
        "name": "a",
        "workload": {"model": "gpt-tiny"},
        "data": {"sources": [{"uri": "s3://b"}], "tokenizer": {"train_bpe": 300}, "sequence_length": 16},
        "train": {"steps": 1, "global_batch": 1},
    }
    for key, value in given.items():
        override(document, f"{key}={value}")
    return parse(document)


def reads(spec: JobSpec, mounted: str = "") -> list[str]:
    return local(read_paths(spec), mounted)


def writes(spec: JobSpec, mounted: str = "") -> list[str]:
    return [key for key, path in written_paths(spec).items() if local([path], mounted)]


@pytest.mark.parametrize("key", DEFAULT_REGIONS)
def test_each_local_path_is_named_once(key: str) -> None:
    spec = job(**{**SHARED, key: DEFAULT_REGIONS[key]})
    found = reads(spec) + writes(spec)
    assert len(found) == 1
    bare = DEFAULT_REGIONS[key].removeprefix("hf:").strip("[{}]").removeprefix("uri: ")
    bare = bare.removeprefix("teacher: ").strip("'").removesuffix("@best")
    assert bare in found[0]


def test_what_all_machines_share_is_not_named() -> None:
    spec = job(**SHARED)
    assert reads(spec) + writes(spec) == []


def test_what_the_claim_holds_is_not_named() -> None:
    spec = job(**{
        "data.sources": "[{uri: '/runs/corpus/*.txt'}]",
        "workload.model": "hf:/runs/model",
        "tracking": "{uri: 'sqlite:////runs/mlflow.db'}",
        "checkpoint.export_to": "file:///runs/out",
        "data.cache": "/runs2/cache",
    })  # fmt: skip
    assert reads(spec, "/runs") == []
    assert writes(spec, "/runs") == ["data.cache /runs2/cache"]
    assert len(reads(spec) + writes(spec)) == 5
