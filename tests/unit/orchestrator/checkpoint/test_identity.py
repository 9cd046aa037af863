"""Whose directory it is: every commit tells which run made it, whatever becomes of job.yaml."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from jobs import job, write_text
from prepared import prepare_here
from scripted import drive

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import (
    IDENTITY,
    SHARDS,
    Extension,
    check_commit,
    check_same_run,
    check_shards,
    differences,
    extension_of,
    job_of_commit,
    read_job,
    shown,
)
from orchestrator.checkpoint.manifest import CommitManifest, commit_folder
from orchestrator.checkpoint.retention import rewind
from orchestrator.config.errors import InputError
from orchestrator.config.overrides import override
from orchestrator.config.spec import JobSpec, dump, parse
from orchestrator.controller.run_history import RunHistory
from orchestrator.data.config import Source, ValidationSpec
from orchestrator.evaluate.config import EvaluateSpec
from orchestrator.storage.run_directory import RunDir


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobSpec, Path]:
    """A run that was stopped at step 6, with a commit."""
    place = tmp_path_factory.mktemp("identity")
    spec = parse(job(write_text(place, 20_000)))
    prepare_here(spec, str(place / "runs" / "_data"))
    drive(spec, str(place / "runs" / "half"), until=6)
    return spec, place / "runs" / "half"


@pytest.fixture
def copy(half: tuple[JobSpec, Path], tmp_path: Path) -> tuple[JobSpec, RunDir]:
    """The same, to be spoiled; its data is where it was."""
    spec, run = half
    shutil.copytree(run, tmp_path / "half")
    data = spec.data.model_copy(update={"cache": str(run.parent / "_data")})
    return spec.model_copy(update={"data": data}), RunDir(str(tmp_path / "half"))


def retold(run: RunDir, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Every commit with another meta in its manifest."""
    store = Store(run.at("checkpoints"))
    for step in store.steps():
        told = store.manifest(step)
        told = dataclasses.replace(told, meta=change(told.meta))
        Path(f"{run.path}/checkpoints/{commit_folder(step)}/manifest.json").write_bytes(told.to_bytes())


def spoil(run: RunDir, how: str) -> None:
    """Something befalls job.yaml."""
    path = Path(run.path) / "job.yaml"
    text = path.read_text()
    match how:
        case "gone":
            path.unlink()
        case "empty":
            path.write_text("")
        case "cut":
            path.write_text(text[: len(text) // 4])
        case "flipped":
            path.write_text(text.replace("seed: 3", "seed: 2"))
        case "binary":
            path.write_bytes(b"\xff\xfe\x00")


HOW = ("gone", "empty", "cut", "flipped", "binary")


@pytest.mark.parametrize("how", ["whole", *HOW])
def test_commits_tell_whose_they_are_whatever_becomes_of_the_job(
    copy: tuple[JobSpec, RunDir], how: str
) -> None:
    spec, run = copy
    spoil(run, how)
    other = spec.model_copy(update={"seed": 4})
    with pytest.raises(
        InputError, match="seed is 3 in this run and 4 in the job file; a run stays the same run"
    ):
        drive(other, run.uri)
    summary = drive(spec, run.uri)
    assert (summary["state"], summary["step"]) == ("done", 12)
    assert read_job(run) == spec


@pytest.mark.parametrize("how", [h for h in HOW if h != "gone"])
def test_before_there_is_a_commit_a_damaged_job_is_named(copy: tuple[JobSpec, RunDir], how: str) -> None:
    spec, run = copy
    shutil.rmtree(f"{run.path}/checkpoints")
    before = {path.name: path.read_bytes() for path in Path(run.path).iterdir() if path.is_file()}
    spoil(run, how)
    with pytest.raises(InputError) as found:
        drive(spec, run.uri)
    assert str(run.uri) in found.value.where
    assert found.value.hint
    assert {path.name: path.read_bytes() for path in Path(run.path).iterdir() if path.is_file()} == before | {
        "job.yaml": (Path(run.path) / "job.yaml").read_bytes()
    }


def test_commits_of_an_earlier_version_are_not_compared(copy: tuple[JobSpec, RunDir]) -> None:
    spec, run = copy
    retold(run, lambda meta: {key: value for key, value in meta.items() if key not in (IDENTITY, SHARDS)})
    with pytest.raises(InputError, match="seed is 3 in this run"):
        check_same_run(spec.model_copy(update={"seed": 4}).run_identity, run)
    assert drive(spec, run.uri)["step"] == 12


def test_keys_that_are_new_since_the_commit_take_their_defaults(copy: tuple[JobSpec, RunDir]) -> None:
    spec, run = copy

    def older(meta: dict[str, Any]) -> dict[str, Any]:
        workload = {key: value for key, value in meta[IDENTITY]["workload"].items() if key != "mup"}
        return {**meta, IDENTITY: {**meta[IDENTITY], "workload": workload}}

    retold(run, older)
    check_same_run(spec.run_identity, run)
    other = spec.workload.model_copy(update={"mup": {"hidden": 16}})
    with pytest.raises(InputError, match=r"workload\.mup"):
        check_same_run(spec.model_copy(update={"workload": other}).run_identity, run)


def test_a_commit_of_rollouts_is_read_whatever_its_run_saves() -> None:
    """An identity has no checkpoint.every, whose default is a multiple of few rollouts."""
    document = job("rows.jsonl", global_batch=16) | {"rewards": [{"kind": "exact_match"}]}
    document["workload"]["objective"] = "grpo"
    document["data"] |= {"sources": [{"uri": "rows.jsonl", "field": {"prompt": "q"}}], "tokenizer": "t"}
    document["rollout"] = {"max_tokens": 8, "epochs": 3}
    document["checkpoint"]["every"] = 3
    spec = parse(document)
    commit = SimpleNamespace(step=3, meta={IDENTITY: spec.identity()})
    found = job_of_commit(cast(CommitManifest, commit))
    assert found is not None
    assert found.identity() == spec.identity()


def test_a_set_that_is_read_otherwise_is_refused(copy: tuple[JobSpec, RunDir]) -> None:
    """Its data is there, so that the column in the job file was passed over in silence."""
    spec, run = copy

    def reading(column: str) -> JobSpec:
        held_out = ValidationSpec(sources=[Source(uri="/held.jsonl", field=column)])
        data = spec.data.model_copy(update={"validation": held_out})
        return spec.model_copy(update={"data": data, "evaluate": EvaluateSpec(every=4)})

    (Path(run.path) / "job.yaml").write_text(dump(reading("text")))
    check_same_run(reading("text").run_identity, run)
    with pytest.raises(
        InputError, match=r"validation\.sources\.0: the run has read this set as field text, format"
    ):
        check_same_run(reading("body").run_identity, run)
    spoil(run, "binary")
    check_same_run(reading("body").run_identity, run)


def test_a_run_whose_chat_template_has_asked_the_clock_takes_a_date(copy: tuple[JobSpec, RunDir]) -> None:
    """The key is newer than the run, and its template cannot be read without."""
    spec, run = copy

    def of(day: str) -> JobSpec:
        return spec.model_copy(
            update={"data": spec.data.model_copy(update={"chat_date": date.fromisoformat(day)})}
        )

    check_same_run(of("2024-07-26").run_identity, run)
    retold(run, lambda meta: {**meta, IDENTITY: of("2024-07-26").identity()})
    check_same_run(of("2024-07-26").run_identity, run)
    with pytest.raises(
        InputError, match=r"data\.chat_date is '2024-07-26' in this run and '2024-07-27' in the job"
    ):
        check_same_run(of("2024-07-27").run_identity, run)


def test_other_token_shards_under_the_same_name_are_refused(copy: tuple[JobSpec, RunDir]) -> None:
    spec, run = copy
    commit = check_same_run(spec.run_identity, run)
    assert commit is not None
    check_shards(commit, commit.meta[SHARDS], "data")
    with pytest.raises(
        InputError, match="data: the token shards differ from those that the run began with; remove"
    ):
        check_shards(commit, "0" * 32, "data")
    retold(run, lambda meta: {**meta, SHARDS: "0" * 32})
    before = Store(run.at("checkpoints")).steps()
    with pytest.raises(InputError, match="the token shards differ from those"):
        drive(spec, run.uri)
    assert Store(run.at("checkpoints")).steps() == before


def test_lost_events_do_not_make_an_attempt_anew(copy: tuple[JobSpec, RunDir]) -> None:
    """Its number, the data and the fence stand beside the commits too."""
    spec, run = copy
    for name in ("events.jsonl", "metrics.jsonl"):
        (Path(run.path) / name).unlink()
    drive(spec, run.uri)
    starts = [event for event in run.rows("events.jsonl") if event["phase"] == "start"]
    assert [event["attempt"] for event in starts] == [2]
    assert Store(run.at("checkpoints")).fenced() == 2


def test_a_job_before_any_run_is_none(tmp_path: Path) -> None:
    assert read_job(RunDir(str(tmp_path))) is None
    (tmp_path / "job.yaml").write_text(dump(parse(job("a.txt"))))
    assert read_job(RunDir(str(tmp_path))) == parse(job("a.txt"))


# -- length


def under(spec: JobSpec, schedule: str, steps: int) -> JobSpec:
    """The job with that schedule and length."""
    optimizer = spec.train.optimizer.model_copy(
        update={"schedule": schedule, "decay": 5 if schedule == "wsd" else 0}
    )
    train = spec.train.model_copy(update={"steps": steps, "optimizer": optimizer})
    return parse(spec.model_copy(update={"train": train}).model_dump(mode="json"))


def finished(spec: JobSpec, run: RunDir, schedule: str) -> JobSpec:
    """A run of 12 steps in the place of the half, with commits at 4, 8 and 12."""
    shutil.rmtree(run.path)
    short = under(spec, schedule, 12)
    drive(short, run.uri)
    assert Store(run.at("checkpoints")).steps() == [4, 8, 12]
    return short


def lengths(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The steps before and after each extension that was told."""
    told = [event["extended"] for event in events if event.get("extended")]
    return [(one["before"], one["after"]) for one in told]


def files(run: RunDir) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(run.path).rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("schedule", "settled", "step"), [("constant", 12, 12), ("inverse_sqrt", 12, 12), ("wsd", 7, 4)]
)
def test_a_run_is_extended_from_the_last_commit_that_a_longer_one_has_too(
    copy: tuple[JobSpec, RunDir], schedule: str, settled: int, step: int
) -> None:
    spec, run = copy
    short, longer = finished(spec, run, schedule), under(spec, schedule, 20)
    store = Store(run.at("checkpoints"))
    assert extension_of(short.identity(), run, store.latest()) is None
    assert extension_of(longer.identity(), run, store.latest()) == Extension(12, 20, settled, step)
    for commit in map(store.manifest, store.steps()):
        if commit.step <= step:
            check_commit(commit, longer.identity(), longer.own_code, longer.accept_code, run.uri)
        else:
            with pytest.raises(InputError, match=r"train\.steps is 12 in this run and 20 in the job file"):
                check_commit(commit, longer.identity(), longer.own_code, longer.accept_code, run.uri)
    summary = drive(longer, run.uri)
    assert (summary["state"], summary["step"], summary["missing_rows"]) == ("done", 20, [])
    events = run.rows("events.jsonl")
    assert lengths(events) == [(12, 20)]
    assert [event["step"] for event in events if event["phase"] == "start"] == [0, step]
    # Extended once more, and once only told although a controller comes twice.
    drive(under(spec, schedule, 30), run.uri, until=22)
    drive(under(spec, schedule, 30), run.uri)
    assert lengths(run.rows("events.jsonl")) == [(12, 20), (20, 30)]


@pytest.mark.parametrize(
    ("schedule", "steps", "wanted"),
    [
        ("linear", 20, "20 in the job file: every learning rate of schedule linear depends on it; .*wsd"),
        ("cosine", 20, "20 in the job file: every learning rate of schedule cosine depends on it; .*wsd"),
        ("constant", 8, "8 in the job file: it cannot be lowered; .*--until"),
        ("wsd", 11, "11 in the job file: it cannot be lowered; .*--until"),
    ],
)
def test_a_length_that_would_make_another_run_is_refused(
    copy: tuple[JobSpec, RunDir], schedule: str, steps: int, wanted: str
) -> None:
    spec, run = copy
    finished(spec, run, schedule)
    before = files(run)
    with pytest.raises(InputError, match=f"train.steps is 12 in this run and {wanted}"):
        drive(under(spec, schedule, steps), run.uri)
    assert files(run) == before


def test_what_the_refusal_of_a_length_says_trains_longer(copy: tuple[JobSpec, RunDir]) -> None:
    spec, run = copy
    finished(spec, run, "cosine")
    longer = under(spec, "cosine", 20)
    with pytest.raises(InputError) as told:
        drive(longer, run.uri)
    words = shlex.split(told.value.hint.partition("orchestrator run JOB ")[2])
    document = longer.model_dump(mode="json")
    for option, value in zip(words[::2], words[1::2], strict=True):
        if option == "--set":
            override(document, value)
    summary = drive(parse(document), words[words.index("--run-dir") + 1])
    assert (summary["state"], summary["step"]) == ("done", 20)


def test_all_keys_that_differ_are_told(copy: tuple[JobSpec, RunDir]) -> None:
    spec, run = copy
    optimizer = spec.train.optimizer.model_copy(update={"lr": 0.5, "eps": 0.5})
    train = spec.train.model_copy(update={"optimizer": optimizer})
    with pytest.raises(InputError) as told:
        check_same_run(spec.model_copy(update={"seed": 4, "train": train}).run_identity, run)
    assert [each.what.split()[0] for each in told.value.each()] == [
        "seed",
        "train.optimizer.eps",
        "train.optimizer.lr",
    ]


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("constant", r"warmup is 3 in this run and 5 in the job file; .* --set train\.optimizer\.warmup=3"),
        ("cosine", r"train\.steps is 12 in this run and 20 in the job file: every learning rate"),
    ],
)
def test_a_warm_up_that_is_a_share_is_told_of_where_a_run_is_extended(
    copy: tuple[JobSpec, RunDir], schedule: str, wanted: str
) -> None:
    spec, run = copy

    def job_of(steps: int) -> JobSpec:
        document = under(spec, schedule, steps).model_dump(mode="json")
        document["train"]["optimizer"]["warmup"] = "25%"
        return parse(document)

    shutil.rmtree(run.path)
    drive(job_of(12), run.uri)
    before = files(run)
    with pytest.raises(InputError, match=wanted):
        drive(job_of(20), run.uri)
    assert files(run) == before


def test_without_a_commit_before_the_decay_a_run_is_not_extended(copy: tuple[JobSpec, RunDir]) -> None:
    spec, run = copy
    finished(spec, run, "wsd")
    shutil.rmtree(f"{run.path}/checkpoints/{commit_folder(4)}")
    before = files(run)
    with pytest.raises(InputError, match="no checkpoint up to step 7 is left to continue from; put it back"):
        drive(under(spec, "wsd", 20), run.uri)
    assert files(run) == before
    rewind(Store(run.at("checkpoints")), -1)
    with pytest.raises(InputError, match="no checkpoint up to step 7 is left"):
        check_same_run(under(spec, "wsd", 20).run_identity, run)


def test_a_command_that_dies_while_it_extends_is_given_again(copy: tuple[JobSpec, RunDir]) -> None:
    """It has written the job and the event only. The same command continues, and so does the shorter one."""
    spec, run = copy
    short, longer = finished(spec, run, "wsd"), under(spec, "wsd", 20)
    history = RunHistory(longer, run)
    history.close()
    assert read_job(run) == longer
    check_same_run(short.run_identity, run)
    assert drive(longer, run.uri)["step"] == 20
    assert len([event for event in run.rows("events.jsonl") if event.get("extended")]) == 1
    with pytest.raises(InputError, match="it cannot be lowered"):
        check_same_run(short.run_identity, run)


def from_(spec: JobSpec, uri: str) -> JobSpec:
    sources = [spec.data.sources[0].model_copy(update={"uri": uri})]
    return spec.model_copy(update={"data": spec.data.model_copy(update={"sources": sources})})


@pytest.mark.parametrize("renewed", ["https://host/a.txt?sig=new/b", "https://ann:new@host/a.txt"])
def test_a_run_whose_sources_have_renewed_credentials_is_the_same(
    copy: tuple[JobSpec, RunDir], renewed: str
) -> None:
    """Also one of an earlier version, whose commits have the old ones."""
    spec, run = copy
    now, other = from_(spec, renewed), from_(spec, "https://host/b.txt?sig=private")
    old = [{"uri": "https://host/a.txt?sig=old/private", "weight": 1.0, "field": "text"}]
    for sources in (old, from_(spec, old[0]["uri"]).identity()["data"]["sources"]):

        def told(meta: dict[str, Any], sources: Any = sources) -> dict[str, Any]:
            identity = meta[IDENTITY]
            return {**meta, IDENTITY: {**identity, "data": {**identity["data"], "sources": sources}}}

        retold(run, told)
        assert check_same_run(now.run_identity, run) is not None
        with pytest.raises(InputError, match=r"data\.sources is") as refused:
            check_same_run(other.run_identity, run)
        assert "private" not in str(refused.value)
    assert "private" not in str(sources)


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        ({}, {"rope_scaling": None}, [("rope_scaling", "not set", "null")]),
        ({"rope_scaling": None}, {}, [("rope_scaling", "null", "not set")]),
        ({"x": 1}, {"x": True}, [("x", "1", "True")]),
        ({"x": 1}, {"x": 1.0}, [("x", "1", "1.0")]),
        ({"x": [1, 0]}, {"x": [True, False]}, [("x", "[1, 0]", "[True, False]")]),
        ({"x": {}}, {}, [("x", "{}", "not set")]),
        ({"x": {}}, {"x": None}, [("x", "{}", "null")]),
        ({"x": {"a": None}}, {"x": {}}, [("x.a", "null", "not set")]),
        ({"x": {"a": {}}}, {"x": {"a": {"b": 1}}}, [("x.a.b", "not set", "1")]),
        ({"x": {"a": 1}}, {"x": 1}, [("x", "{'a': 1}", "1")]),
        ({"x": "1"}, {"x": 1}, [("x", "'1'", "1")]),
        ({"x": {"b": 1, "a": 2}}, {"x": {"a": 2, "b": 1}}, []),
        ({"x": float("nan")}, {"x": float("nan")}, []),
    ],
    ids=str,
)
def test_values_that_a_file_writes_otherwise_are_others(
    was: dict[str, Any], now: dict[str, Any], told: list[tuple[str, str, str]]
) -> None:
    """A model that has `rope_scaling: null` is another one than that of the folder, whose value it takes away."""

    def with_changes(changes: dict[str, Any]) -> JobSpec:
        document = job("a.txt")
        return parse(document | {"workload": document["workload"] | {"changes": changes}})

    found = differences(with_changes(now).identity(), with_changes(was).identity())
    assert [(key, shown(before), shown(after)) for key, before, after in found] == [
        (f"workload.changes.{key}", before, after) for key, before, after in told
    ]


def test_a_run_is_not_gone_on_with_under_a_key_that_is_null(copy: tuple[JobSpec, RunDir]) -> None:
    spec, run = copy
    other = spec.workload.model_copy(update={"changes": {**spec.workload.changes, "rope_scaling": None}})
    with pytest.raises(InputError, match=r"workload\.changes\.rope_scaling is not set in this run and null"):
        check_same_run(spec.model_copy(update={"workload": other}).run_identity, run)
