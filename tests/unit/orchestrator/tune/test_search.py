"""What is looked at before a search starts anything."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
from jobs import job

from orchestrator.job.errors import InputError
from orchestrator.job.spec import dump, parse
from orchestrator.launch import at_work
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune import search
from orchestrator.tune.trial_records import TrialEnd, TrialRecords

TUNE: dict[str, Any] = {"space": {"train.optimizer.lr": {"choice": [1e-3, 2e-3]}}, "trials": 2}


def test_a_search_that_another_command_drives_is_refused_before_ray_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the run of a trial that is trained, which goes on telling how it is."""
    monkeypatch.setattr(at_work, "EVERY", 0.05)
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
    assert search._as_registered(spec, spec).checkpoint.export == form


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_search_that_is_asked_to_end_ends_as_after_ctrl_c(number: signal.Signals) -> None:
    """Ray Tune hears of SIGINT alone; of another the search knew nothing, and told nothing of its trials."""
    heard: list[int] = []
    before, handlers = signal.getsignal(number), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda found, _: heard.append(found))
    try:
        with search._ends_as_ctrl_c():
            signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGINT, handlers)
    assert heard == [signal.SIGINT]
    assert signal.getsignal(number) == before
