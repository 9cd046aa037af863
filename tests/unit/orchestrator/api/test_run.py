"""Runs as Python objects, before there is anything to show, damaged, and with arguments that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import job

from orchestrator.api import run as module
from orchestrator.api.job import Job
from orchestrator.api.run import RunFailed, load_run
from orchestrator.api.start import run, submit
from orchestrator.job.errors import InputError
from orchestrator.job.spec import dump, parse
from orchestrator.storage.run_directory import RunDir


@pytest.fixture
def begun(tmp_path: Path) -> RunDir:
    """The directory of a run that has done nothing yet."""
    found = RunDir(str(tmp_path / "run"))
    found.create()
    found.write_text("job.yaml", dump(parse(job("a.txt"))))
    return found


def test_a_young_run_has_the_columns_of_its_tables(begun: RunDir) -> None:
    found = load_run(begun.uri)
    assert list(found.commits()[["loss", "bytes"]].index) == []
    assert list(found.metrics()["loss"]) == []
    assert found.evaluations().index.name == "step"
    begun.append("metrics.jsonl", [{"step": 1, "attempt": 1, "time": 1.0, "step_seconds": 0.5, "loss": 3.0}])
    assert found.metrics()["loss"].to_dict() == {1: 3.0}


def test_a_commit_that_cannot_be_read_hides_no_other(begun: RunDir) -> None:
    (Path(begun.path) / "checkpoints" / "step-00000004").mkdir(parents=True)
    (Path(begun.path) / "checkpoints" / "step-00000004" / "manifest.json").write_text('{"torn')
    found = load_run(begun.uri)
    assert list(found.commits().index) == [4]
    assert all(found.commits()["problem"])


def test_who_waits_for_a_run_that_nobody_drives_is_told(
    begun: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENCE", 0.2)
    monkeypatch.setattr(module, "EVERY", 0.05)
    begun.write_json("status.json", {"phase": "train", "time": 1.0})
    with pytest.raises(
        RunFailed, match=r"nobody has driven .* the same command goes on from its last commit"
    ):
        load_run(begun.uri).wait()


def test_a_search_is_no_run(begun: RunDir) -> None:
    begun.append("trials.jsonl", [{"trial": "0001", "event": "drawn", "time": 1.0}])
    with pytest.raises(InputError, match="is a search, and no run"):
        load_run(begun.uri)


def test_an_export_has_a_form_that_there_is(begun: RunDir) -> None:
    for names, numbers, form in (("foo", None, "dcp"), (None, "f64", "gguf")):
        with pytest.raises(InputError, match=r"there is no '(foo|f64)'"):
            load_run(begun.uri).export(step=None, form=form, names=names, numbers=numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [run, submit])
@pytest.mark.parametrize(
    ("options", "where"),
    [({"until": 0}, "until"), ({"until": -1}, "until"), ({"until": "6"}, "until"), ({"until": 6.5}, "until"),
     ({"until": True}, "until"), ({"priority": "high"}, "priority"), ({"job": {}}, "job"), ({"job": "a.yaml"}, "job")],
    ids=str,
)  # fmt: skip
def test_arguments_of_a_wrong_kind_are_refused_before_anything_is_done(
    start: Any, options: dict[str, Any], where: str, tmp_path: Path
) -> None:
    given = {"job": Job(**job("a.txt")), "run_dir": tmp_path / "run", **options}
    with pytest.raises(InputError, match=rf"^{where}: "):
        start(**given)
    assert not (tmp_path / "run").exists()
