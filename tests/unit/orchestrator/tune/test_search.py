"""What is looked at before a search starts anything."""

from __future__ import annotations

import copy
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import job

from cluster.workers.stop_signals import ENDS
from orchestrator.config.errors import InputError
from orchestrator.config.overrides import set_key
from orchestrator.config.spec import dump, parse
from orchestrator.launch import active_controller
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune import drive_trials, preflight, search
from orchestrator.tune.same_search import check_same_sweep
from orchestrator.tune.trial_records import TrialEnd, TrialRecords

TUNE: dict[str, Any] = {"space": {"train.optimizer.lr": {"choice": [1e-3, 2e-3]}}, "trials": 2}


def test_a_search_that_another_command_drives_is_refused_before_ray_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the run of a trial that is trained, which goes on telling how it is."""
    monkeypatch.setattr(active_controller, "EVERY", 0.05)
    spec = parse(job("a.txt") | {"tune": TUNE})
    sweep = RunDir(str(tmp_path / "sweep"))
    sweep.create()
    sweep.write_text("job.yaml", dump(spec))
    records = TrialRecords(sweep)
    records.begin()
    ended, trained = records.draw([{"train.optimizer.lr": 1e-3}, {"train.optimizer.lr": 2e-3}])
    records.end(ended, TrialEnd("done", ended, 12, 2.0))
    told, read = itertools.count(), RunDir.read_json_or_empty

    def status(run: RunDir, name: str) -> dict[str, Any]:
        moving = name == "status.json" and run.name == trained
        return {"time": next(told)} if moving else read(run, name)

    monkeypatch.setattr(RunDir, "read_json_or_empty", status)
    with RunDir(sweep.uri).lock(), pytest.raises(InputError, match="another command trains this run"):
        search.tune(spec, sweep, None, lambda news: None)


@pytest.mark.parametrize(
    ("more", "model", "form"),
    [
        ({}, "gpt-tiny", None),
        ({"register_as": "m"}, "gpt-tiny", "hf"),
        ({"register_as": "m"}, "net:Net", "safetensors"),
    ],
)
def test_it_is_checked_that_a_model_to_be_registered_can_be_exported(
    more: dict[str, Any], model: str, form: str | None
) -> None:
    document = job("a.txt") | {"tune": TUNE | more, "tracking": {"uri": "http://127.0.0.1:5000"}}
    document["workload"] = {"model": model}
    spec = parse(document)
    assert spec.tune is not None
    assert preflight._registered(spec.tune, spec.checkpoint, model).export == form


@pytest.fixture
def as_tune(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Ray Tune's own handlers, with what they have heard; all are as before at the end."""
    from ray.tune import tune

    heard: list[str] = []
    monkeypatch.setattr(tune.logger, "warning", heard.append)
    before = {number: signal.getsignal(number) for number in (*ENDS, signal.SIGUSR1)}
    for number in ENDS:
        signal.signal(number, signal.default_int_handler)
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDS)
def test_a_search_that_is_asked_to_end_ends_as_after_ctrl_c(
    number: signal.Signals, as_tune: list[str]
) -> None:
    """Ray Tune hears of SIGINT alone; of another the search knew nothing, and told nothing of its trials."""
    from ray.tune.tune import _setup_signal_catching

    def search_() -> None:
        with drive_trials._ends_as_ctrl_c():
            interrupted = _setup_signal_catching()
            signal.raise_signal(number)
            assert interrupted.is_set()
            assert len(as_tune) == 1
            signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt):
        search_()
    assert signal.getsignal(number) == signal.default_int_handler


def test_a_search_is_asked_to_end_before_tune_hears(as_tune: list[str]) -> None:
    def search_() -> None:
        with drive_trials._ends_as_ctrl_c():
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        search_()


def test_what_a_search_ignores_it_goes_on_to_ignore(as_tune: list[str]) -> None:
    """In the background of a script under nohup, where SIGTERM ends it."""
    from ray.tune.tune import _setup_signal_catching

    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with drive_trials._ends_as_ctrl_c():
        interrupted = _setup_signal_catching()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGHUP)
        assert not interrupted.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert interrupted.is_set()
    assert drive_trials.TUNE_HEEDS not in os.environ


MEASURED: dict[str, Any] = {
    "evaluate": {"every": 4, "batches": 4, "sets": {"books": {"sources": [{"uri": "/texts/held.jsonl"}]}}}
}


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"evaluate.batches": 8}, ["evaluate.batches is 4 in this search and 8 in the job file"]),
        ({"evaluate.batches": None}, ["evaluate.batches is 4 in this search and null in the job file"]),
        ({"train.global_batch": 4, "seed": 9}, ["seed is 3 in this search and 9", "train.global_batch is 8"]),
        ({"data.sources.0.uri": "/other/b.txt"}, ["data.sources is [{'uri': 'a.txt'"]),
        (
            {"workload.changes.layers": 3, "tune.mode": "max"},
            ["tune.mode is not what", "workload.changes.layers is 2"],
        ),
        ({"evaluate.sets.books.sources.0.field": "body"}, ["has read this set as field text"]),
    ],
    ids=str,
)
def test_a_search_is_not_gone_on_with_by_another_job(
    keys: dict[str, Any], wanted: list[str], tmp_path: Path
) -> None:
    """All that differs is told by its key, as of a run."""
    sweep = RunDir(str(tmp_path / "sweep"))
    sweep.create()
    document = job("/texts/a.txt") | {"tune": TUNE} | MEASURED
    sweep.write_text("job.yaml", dump(parse(document)))
    other = copy.deepcopy(document)
    for key, value in keys.items():
        set_key(other, key, value, key)
    with pytest.raises(InputError) as told:
        check_same_sweep(parse(other), sweep)
    found = [each.what for each in told.value.each()]
    assert len(found) == len(wanted)
    assert all(any(each.startswith(want) or want in each for each in found) for want in wanted)


def test_a_search_beside_the_run_of_its_job_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    sweep = RunDir(str(tmp_path / "run"))
    sweep.create()
    document = job("/texts/a.txt") | {"tune": TUNE}
    sweep.write_text("job.yaml", dump(parse(document)))
    sweep.append("events.jsonl", [{"phase": "prepare", "time": 1.0}])
    with pytest.raises(InputError, match=f"this is a run, not a search; .* --run-dir {sweep.uri}-search$"):
        check_same_sweep(parse(document), sweep)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"data.sources.0.uri": "/elsewhere/a.txt"},
        {"evaluate.sets.books.sources.0.uri": "/elsewhere/held.jsonl"},
        {"tune.trials": 5, "resources.workers": 1, "evaluate.every": 2},
    ],
    ids=str,
)
def test_what_only_moved_and_how_much_is_searched_may_change(keys: dict[str, Any], tmp_path: Path) -> None:
    sweep = RunDir(str(tmp_path / "sweep"))
    sweep.create()
    document = job("/texts/a.txt") | {"tune": TUNE} | MEASURED
    sweep.write_text("job.yaml", dump(parse(document)))
    for key, value in keys.items():
        set_key(document, key, value, key)
    check_same_sweep(parse(document), sweep)
