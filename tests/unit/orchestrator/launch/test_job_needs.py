"""What the doctor says of a job's optional libraries."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.spec import parse
from orchestrator.launch.job_needs import needed_libraries

DOCUMENT: dict[str, Any] = {
    "name": "a",
    "workload": {"model": "gpt-tiny"},
    "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 32},
    "train": {"steps": 4, "global_batch": 4},
}
HIDE = """
import importlib.machinery as machinery
whole = machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    hidden = name.partition(".")[0] in ("mlflow", "optuna", "sklearn", "matplotlib")
    return None if hidden else whole(name, path, target)
machinery.PathFinder.find_spec = staticmethod(find_spec)
"""


def needs(**more: Any) -> set[tuple[str, str]]:
    return {(need.library, need.extra) for need in needed_libraries(parse(DOCUMENT | more))}


def test_a_plain_job_needs_nothing() -> None:
    assert needs() == set()


@pytest.mark.parametrize("use", ["ext:images", "orchestrator.data.images:Images"])
def test_what_an_extension_offers_needs_its_extra(use: str) -> None:
    """By the name that it has now, and by the one of job files of earlier versions."""
    samples = {"use": use, "options": {"uri": "a", "size": 8}}
    assert needs(data={"samples": samples}, workload={"model": "ext:clip"}) == {("pillow", "image")}


def test_a_store_needs_its_library() -> None:
    data = DOCUMENT["data"] | {"sources": [{"uri": "gs://b/*.txt"}, {"uri": "s3://b/*.txt"}]}
    assert needs(data=data) == {("gcsfs", "gcs")}
    assert needs(checkpoint={"export_to": "az://c/x"}) == {("adlfs", "azure")}


def test_each_key_names_its_library_and_extra() -> None:
    data = DOCUMENT["data"] | {
        "clean": [{"language": {"keep": ["en"]}}, {"near_duplicates": {}}],
        "validation": {"share": 0.1},
    }
    found = needs(data=data, tracking={"uri": "sqlite:///a.db"}, evaluate={"tasks": ["a.yaml"]})
    assert found == {
        ("py3langid", "data"),
        ("rensa", "data"),
        ("datatrove", "clean"),
        ("mlflow", ""),
        ("lm-eval", "eval"),
    }


def test_what_is_missing_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    data = DOCUMENT["data"] | {"clean": [{"near_duplicates": {}}]}
    (_, need) = needed_libraries(parse(DOCUMENT | {"data": data}))
    assert need.finding.row() == [
        "missing",
        "data.clean.near_duplicates needs rensa",
        "not installed",
        "pip install -e '.[data]' in the checkout",
    ]


@pytest.mark.slow
def test_ranks_and_worker_hosts_import_none_of_the_heavy_libraries(tmp_path: Path) -> None:
    code = HIDE + (
        "import orchestrator.train.loop, orchestrator.train.loop, orchestrator.checkpoint.sidecar\n"
        "import cluster.workers.worker_group, cluster.workers.fork_server, orchestrator.launch.controller_actor\n"
        "import orchestrator.export.hugging_face, workloads.hf.check.compare\nimport json; print(json.dumps('all'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == "all"
