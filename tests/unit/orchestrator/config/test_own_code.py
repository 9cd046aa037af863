"""The user's own code is part of a run, and that which cleaned its text of the run's data."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest
from jobs import job, write_text
from prepared import prepare_here
from scripted import drive

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import CLEANED_BY, CODE, IDENTITY
from orchestrator.checkpoint.manifest import commit_folder
from orchestrator.config.errors import InputError
from orchestrator.config.own_code import check_same_cleaning, cleaning_code
from orchestrator.config.spec import JobSpec, parse
from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.models.continued import continuation_of
from orchestrator.resolve.prepared_data import PreparedData, prepared
from orchestrator.storage.run_directory import RunDir

STEP = "def f(text, row):\n    return text\n"
CHANGED = r"the code of steps_of_run:f has changed since it cleaned the run's text"


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobSpec:
    """A job whose text is cleaned by a function in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "steps_of_run", raising=False)
    (tmp_path / "steps_of_run.py").write_text(STEP)
    document = job(write_text(tmp_path, 20_000))
    document["data"]["clean"] = [{"own": {"function": "steps_of_run:f"}}]
    return parse(document)


def cleaned_by(spec: JobSpec) -> dict[str, str]:
    (step,) = spec.data.clean
    return {"steps_of_run:f": cleaning_code(step.options)}


def test_other_code_is_refused_unless_it_is_accepted(spec: JobSpec, tmp_path: Path) -> None:
    before = cleaned_by(spec)
    check_same_cleaning(spec.data.clean, spec.accept_code, before, "runs/here")
    (tmp_path / "steps_of_run.py").write_text(STEP + "CHANGED = True\n")
    with pytest.raises(InputError, match=CHANGED) as error:
        check_same_cleaning(spec.data.clean, spec.accept_code, before, "runs/here")
    (hashed,) = re.findall(r"accept_code: \[(\w+)\]", error.value.hint)
    accepts = spec.model_copy(update={"accept_code": [hashed]})
    check_same_cleaning(accepts.data.clean, accepts.accept_code, before, "runs/here")
    with pytest.raises(InputError, match="read it anew"):
        check_same_cleaning(accepts.data.clean, accepts.accept_code, before, "runs/here", "read it anew")
    check_same_cleaning(spec.data.clean, spec.accept_code, {}, "of an earlier version")


def test_a_run_does_not_go_on_by_other_code(spec: JobSpec, tmp_path: Path) -> None:
    plain = spec.model_copy(update={"data": spec.data.model_copy(update={"clean": []})})
    data, run = prepare_here(plain, str(tmp_path / "runs" / "_data")), RunDir(str(tmp_path / "runs" / "here"))
    drive(plain, run.uri, until=6)
    store = Store(run.at("checkpoints"))
    told = store.manifest(6)
    meta = {**told.meta, IDENTITY: spec.identity(), CLEANED_BY: cleaned_by(spec), CODE: {}}
    told = dataclasses.replace(told, meta=meta)
    Path(f"{run.path}/checkpoints/{commit_folder(6)}/manifest.json").write_bytes(told.to_bytes())
    found = manifest.read(DataFolder(data))
    assert found is not None
    manifest.write(DataFolder(data), dataclasses.replace(found, code=cleaned_by(spec)))
    prepared(spec, run, PreparedData(data), lambda *_, **__: None)

    (tmp_path / "steps_of_run.py").write_text(STEP + "CHANGED = True\n")
    with pytest.raises(InputError, match=CHANGED):
        drive(spec, run.uri)
    with pytest.raises(InputError, match=CHANGED):  # it has prepared, and has no commit yet
        prepared(spec, run, PreparedData(data), lambda *_, **__: None)
    phase = spec.train.model_copy(update={"steps": 20}).model_dump() | {"continue_from": {"run": run.uri}}
    after = parse(spec.model_dump() | {"train": phase})
    with pytest.raises(InputError, match=f"{CHANGED}.*position: restart"):
        continuation_of(after).source(RunDir(str(tmp_path / "runs" / "after")))
