"""Exports beside a run at work, whose commits come and go meanwhile."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import scripted
from jobs import job
from scripted import fake_cluster

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import commit_folder
from orchestrator.checkpoint.retention import Retention, prune
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.config.errors import InputError
from orchestrator.config.smoke import smoke_of
from orchestrator.config.spec import parse
from orchestrator.controller import background_export
from orchestrator.controller.background_export import BackgroundExport, export_commit
from orchestrator.export import hub, hugging_face
from orchestrator.launch.path_checks import check_written
from orchestrator.storage.run_directory import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(str(tmp_path / "run"))
    run.create()
    commit(run, 1)
    return run


def commit(run: RunDir, step: int) -> None:
    """Commit a step and remove what was before, as a run with `checkpoint.keep: 1`."""
    store = Store(run.commits)
    piece = RawPiece("model.w", "F32", (1,), (0,), (1,), memoryview(bytes(4)))
    store.publish(step, store.write_raw(step, 0, [piece]), {"position": step, "receipt": ""})
    prune(store, Retention(keep=1))


def test_where_the_commit_is_gone_the_newest_is_exported(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it goes while it is read, although the export holds it."""
    asked = list[int]()

    def export(uri: str, step: int, target: str) -> dict[str, Any]:
        asked.append(step)
        if step < 3:
            commit(run, step + 1)
            shutil.rmtree(Path(run.commits) / commit_folder(step))
            raise FileNotFoundError("manifest.json")
        return {"step": step}

    monkeypatch.setattr(hugging_face, "export", export)
    assert export_commit(run.uri, 1, "target") == {"step": 3}
    assert asked == [1, 2, 3]
    assert export_commit(run.uri, 2, "target") == {"step": 3}


def test_what_was_exported_in_place_of_an_earlier_one_is_known(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def export(uri: str, step: int, target: str, best: bool = False) -> dict[str, Any]:
        asked.append(step)
        return {"step": step}

    monkeypatch.setattr(hugging_face, "export", export)
    document = job("none")
    document["checkpoint"] |= {"export": "hf", "export_at": "commit", "keep": 1}
    spec = parse(document)
    cluster = fake_cluster(lambda: pytest.fail("no gang"))
    exports = BackgroundExport(cluster, spec.checkpoint, spec.evaluate, run, pytest.fail)
    for step in (2, 3):
        commit(run, step)
    for step in (1, 2, 3):  # heard of late
        exports.published(step)
    assert exports.has_last(3)
    assert asked == [3]


class Writes:
    """An export under way, whose process has come so far as to publish the model when it is ended, or not."""

    def __init__(self, target: str, step: int | None) -> None:
        self._target, self._step = Path(target), step

    def done(self) -> bool:
        return False

    def result(self) -> Any:
        pytest.fail("it was ended")

    def cancel(self) -> None:
        if self._step is not None:
            self._target.mkdir(exist_ok=True)
            (self._target / "export.json").write_text(json.dumps({"step": self._step, "files": []}))


@pytest.mark.parametrize(("published", "there"), [(3, True), (None, False), (2, False)])
def test_a_stop_finds_a_model_that_was_published_in_that_moment(
    run: RunDir, published: int | None, there: bool
) -> None:
    document = job("none")
    document["checkpoint"] |= {"export": "hf"}
    cluster = dataclasses.replace(
        fake_cluster(lambda: pytest.fail("no gang")),
        run_task=lambda *_, **__: Writes(run.at("export"), published),
    )
    spec = parse(document)
    exports = BackgroundExport(cluster, spec.checkpoint, spec.evaluate, run, pytest.fail)
    Writes(run.at("export"), 1).cancel()  # that of an earlier command
    exports.advance(3)
    assert not exports.has_last(3)
    assert exports.stop_export(3) is there
    assert exports.done.get("step") == published
    assert exports.stop_export(3) is there


class Upload:
    """A push under way, which ends with what it is given or not at all."""

    def __init__(self, ending: object) -> None:
        self._ending = ending
        self.cancelled = False

    def done(self) -> bool:
        return self._ending is not None

    def result(self) -> Any:
        if isinstance(self._ending, Exception):
            raise self._ending
        return self._ending

    def cancel(self) -> None:
        self.cancelled = True


def pushing(run: RunDir, upload: Upload, told: list[str], **keys: Any) -> tuple[BackgroundExport, list[str]]:
    """Exports of a job that pushes, and the names of the functions that they call."""
    asked = list[str]()

    def run_task(function: Any, *arguments: Any) -> Any:
        asked.append(function.__name__)
        if function is hub.push:
            assert arguments == (run.at("export"), "me/model", True, True)
            return upload
        return scripted.RemoteTask(lambda: {"step": arguments[1]})

    document = job("none")
    document["checkpoint"] |= {"export": "hf", "push": "me/model", **keys}
    spec = parse(document)
    cluster = fake_cluster(lambda: pytest.fail("no gang"), run_task=run_task)
    return BackgroundExport(cluster, spec.checkpoint, spec.evaluate, run, told.append), asked


@pytest.mark.parametrize(
    ("ending", "late", "stopped", "wanted"),
    [
        ("https://hub/me/model", False, False, "is pushed to https://hub/me/model"),
        (
            RuntimeError("no rights"),
            False,
            False,
            "is not pushed: no rights; `orchestrator checkpoint export",
        ),
        (ChildProcessError("killed"), False, False, "is not pushed: killed"),
        (None, True, False, "is not pushed: it was not done after"),
        (None, False, True, "is not pushed: the run is stopped"),
    ],
)
def test_no_end_of_a_push_fails_the_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, ending: object, late: bool, stopped: bool, wanted: str
) -> None:
    told = list[str]()
    upload = Upload(ending)
    exports, asked = pushing(run, upload, told)
    exports.advance(1)
    exports.advance(1)
    assert asked == ["export", "push"]
    assert exports.done == {"step": 1}, "known before the push ends"
    assert told[0].startswith("step 1 is exported")
    assert not exports.has_last(1)
    if late:
        monkeypatch.setattr(background_export, "LONGEST_PUSH", -1.0)
    exports.stop_export(1) if stopped else exports.advance(1)
    assert exports.has_last(1)
    assert exports.failed(1) == ""
    assert len(told) == 2
    assert told[1].startswith(f"the export {wanted}")
    assert ("pushed" in exports.done, "not_pushed" in exports.done) == (
        isinstance(ending, str),
        not isinstance(ending, str),
    )
    assert upload.cancelled
    exports.advance(1)
    assert asked == ["export", "push"]


def test_what_was_exported_beside_training_is_pushed_at_the_end(run: RunDir) -> None:
    exports, asked = pushing(run, Upload("there"), [], export_at="commit")
    exports.published(1)
    exports.published(1)
    assert not exports.has_last(1)
    for _ in range(2):
        exports.advance(1)
    assert exports.has_last(1)
    assert asked == ["export_commit", "push"]


@pytest.mark.parametrize("token", [None, "hf_x"])
def test_a_missing_token_is_told_while_training_is_young(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    told = list[str]()
    exports, _ = pushing(run, Upload(None), told)
    exports.check_push()
    assert len(told) == (token is None)
    assert token or "the export will not be pushed: checkpoint.push: there is no token of the Hub" in told[0]


@pytest.mark.parametrize(
    ("push", "export_to", "wanted"),
    [
        ("model", None, "checkpoint.push model: is not a repository of the Hub"),
        ("me/model", "s3://bucket/there", "checkpoint.push: only a folder"),
        ("me/model", None, "checkpoint.push: there is no token"),
    ],
)
def test_a_push_that_cannot_be_is_refused_before_training(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, push: str, export_to: str | None, wanted: str
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    document = job("none")
    document["checkpoint"] |= {"export": "hf", "push": push, "export_to": export_to}
    spec = parse(document)
    with pytest.raises(InputError, match=wanted):
        check_written(spec.checkpoint, spec.data, run, None)
    if "token" in wanted:  # another machine may have it
        check_written(spec.checkpoint, spec.data, run, "ray://elsewhere")


def test_nothing_but_an_export_is_pushed() -> None:
    document = job("none")
    document["checkpoint"] |= {"export": None, "push": "me/model"}
    with pytest.raises(InputError, match="leave out push, or set export to hf"):
        parse(document)
    document["checkpoint"]["export"] = "hf"
    assert smoke_of(parse(document), lambda _: True).checkpoint.push is None
