"""Where the text of a run is found again; none of this makes any, which takes Ray."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import job, write_job, write_text
from prepared import prepare_here, prepare_sets_here

from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.config.errors import InputError
from orchestrator.config.records import WITHOUT_SENTINELS
from orchestrator.config.spec import JobSpec, load, parse
from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import DataManifest
from orchestrator.data.store.tokens import Tokens
from orchestrator.resolve.prepared_data import (
    PreparedData,
    format_at,
    has_all_files,
    prepared,
    prepared_before,
)
from orchestrator.storage.run_directory import RunDir
from workloads.objectives import NAMES, special_tokens


def spec_of(folder: Path, **evaluate: Any) -> JobSpec:
    """A job with one set of its own text."""
    (folder / "wiki.txt").write_text("Some words of another text.\n<|endoftext|>\nAnd more. " * 9)
    document = job(write_text(folder, 20_000))
    document["data"]["cache"] = str(folder / "cache")
    document["evaluate"] = {"sets": {"wiki": {"sources": [{"uri": str(folder / "wiki.txt")}]}}, **evaluate}
    return parse(document)


def nothing(what: str, done: int, total: int, text_bytes: int = 0) -> None:
    pytest.fail(f"{what} was made")


def test_a_set_is_prepared_by_the_tokenizer_of_the_run(tmp_path: Path) -> None:
    spec, run = spec_of(tmp_path), RunDir(str(tmp_path / "runs" / "small"))
    uri = prepare_here(spec, str(tmp_path / "cache"))
    data = prepared(spec, run, PreparedData(), nothing)
    assert data == PreparedData(uri, prepare_sets_here(spec, str(tmp_path / "cache"), uri))
    own, training = Tokens.open(data.sets["wiki"]), Tokens.open(uri)
    assert own.tokenizer().to_str() == training.tokenizer().to_str()
    assert own.manifest.roles == training.manifest.roles


def test_a_set_is_found_where_the_cache_is_now_and_without_its_text(tmp_path: Path) -> None:
    spec, run = spec_of(tmp_path), RunDir(str(tmp_path / "runs" / "small"))
    prepare_here(spec, str(tmp_path / "cache"))
    before = prepared(spec, run, PreparedData(), nothing)
    shutil.move(tmp_path / "cache", tmp_path / "moved")
    assert not has_all_files(before)
    moved = spec.model_copy(update={"data": spec.data.model_copy(update={"cache": str(tmp_path / "moved")})})
    now = prepared(moved, run, before, nothing)
    assert now.sets["wiki"] == before.sets["wiki"].replace("/cache/", "/moved/")
    (tmp_path / "wiki.txt").unlink()
    assert has_all_files(now)
    assert prepared(moved, run, now, nothing) == now


@pytest.mark.parametrize("gone", [True, False])
def test_the_text_of_a_set_does_not_change_within_a_run(tmp_path: Path, gone: bool) -> None:
    """Else values of different text would be compared, and the best commit chosen by them."""
    spec, run = spec_of(tmp_path), RunDir(str(tmp_path / "runs" / "small"))
    prepare_here(spec, str(tmp_path / "cache"))
    before = prepared(spec, run, PreparedData(), nothing)
    if gone:  # the text is another, and what was made of it is lost
        shutil.rmtree(before.sets["wiki"])
        (tmp_path / "wiki.txt").write_text("Other words.")
        now = spec
    else:  # the job names another
        (tmp_path / "other.txt").write_text("Other words.")
        now = spec_of(tmp_path, sets={"wiki": {"sources": [{"uri": str(tmp_path / "other.txt")}]}})
    told = (
        "evaluate.sets.wiki.sources: differs from the text that the run has evaluated so far; restore it, or"
    )
    with pytest.raises(InputError, match=told):
        prepared(now, run, before, nothing)


def test_a_set_that_is_not_evaluated_is_not_prepared(tmp_path: Path) -> None:
    document = job(write_text(tmp_path, 20_000))
    document["data"] |= {
        "cache": str(tmp_path / "cache"),
        "validation": {"sources": [{"uri": "nowhere.txt"}]},
    }
    spec = parse(document)
    uri = prepare_here(spec, str(tmp_path / "cache"))
    assert prepared(spec, RunDir(str(tmp_path / "run")), PreparedData(), nothing) == PreparedData(uri)


def test_text_of_a_set_that_is_not_there_is_told_by_its_key(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    prepare_here(spec, str(tmp_path / "cache"))
    (tmp_path / "wiki.txt").unlink()
    with pytest.raises(
        InputError, match=r"evaluate.sets.wiki.sources.0.uri \S+/wiki.txt: there is no such file"
    ):
        prepared(spec, RunDir(str(tmp_path / "run")), PreparedData(), nothing)


def test_data_that_is_there_is_found_without_torch(tmp_path: Path) -> None:
    """Who looks for it is to start the workers next, which import it meanwhile."""
    path = write_job(tmp_path, job(write_text(tmp_path / "text", 20_000)))
    uri = prepare_here(load(path), str(tmp_path / "runs" / "_data"))
    code = f"""
import sys
from orchestrator.data.progress import StageLine
from orchestrator.config.spec import load
from orchestrator.resolve.prepared_data import PreparedData, prepared
from orchestrator.storage.run_directory import RunDir

found = prepared(load({str(path)!r}), RunDir({str(tmp_path / "runs" / "small")!r}), PreparedData(), StageLine(print))
print(found.uri, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [uri, "False"], done.stderr


def test_objectives_without_sentinels_are_known_without_them() -> None:
    assert {name for name in NAMES if not special_tokens(name)} == WITHOUT_SENTINELS


def test_a_run_that_has_begun_is_checked_in_the_format_of_its_data(tmp_path: Path) -> None:
    """What only newer data refuses, such as a head of other labels, does not stop a run of an earlier version."""
    spec, run = spec_of(tmp_path), RunDir(str(tmp_path / "runs" / "small"))
    before = DataManifest("", "<u2", "tokenizer.json", 12, {"eos": 0}, (), (), 0, 0, 0, 0.0, 0.0, format=5)
    (tmp_path / "cache" / "old").mkdir(parents=True)
    manifest.write(DataFolder(str(tmp_path / "cache" / "old")), before)
    commit = CommitManifest(4, 0, "", "", {"data": "/gone/old"}, 1, {}, {}, (), {}, 2)
    place = prepared_before(spec.data, run, commit)
    assert place == str(tmp_path / "cache" / "old")
    assert format_at(place) == 5
    assert format_at(prepared_before(spec.data, run, None)) == manifest.FORMAT
    Path(place, "manifest.json").write_text("{")
    assert prepared_before(spec.data, run, commit) == ""  # the run makes it again
