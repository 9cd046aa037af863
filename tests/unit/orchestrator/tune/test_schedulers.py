"""What samples and what explores, without Ray running."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.rundir import RunDir
from orchestrator.tune.bandit import Gain
from orchestrator.tune.ledger import Ended, Ledger
from orchestrator.tune.schedulers import Pb2, Pbt, Tpe
from orchestrator.tune.spec import TuneSpec

LR = "train.optimizer.lr"


def tpe(sweep: Path, names: list[str]) -> tuple[Tpe, Ledger]:
    tune = TuneSpec(space={LR: {"loguniform": [1e-4, 1.0]}}, trials=40, sampler="tpe")  # type: ignore[arg-type]
    ledger = Ledger(RunDir(str(sweep)))
    return Tpe(tune, 7, ledger, names, lambda name, config: {"trial": name, "params": config}), ledger


def search(sampler: Tpe, ledger: Ledger, count: int) -> list[float]:
    """Learning rates drawn one after the other; the best one is 0.01."""
    found = []
    for number in range(count):
        given = sampler.suggest(str(number))["given"]
        rate = given["params"][LR]
        found.append(rate)
        sampler.on_trial_complete(str(number), {"value": abs(rate - 0.01), "failed": ""})
        ledger.end(given["trial"], Ended("done", given["trial"], 1, abs(rate - 0.01)))
    return found


def test_tpe_learns_and_a_search_taken_up_again_draws_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    whole = search(*tpe(tmp_path / "whole", []), 30)
    first = search(*tpe(tmp_path / "halves", []), 14)
    names = list(Ledger(RunDir(str(tmp_path / "halves"))).configs)
    again = search(*tpe(tmp_path / "halves", names), 30)
    assert first == whole[:14]
    assert again == whole
    assert len(set(whole)) == 30
    near = [sum(1e-3 < rate < 0.1 for rate in rates) for rates in (whole[:10], whole[20:])]
    assert near[1] > near[0], "the last ten are nearer than the first ten, which are random"


def test_a_failed_trial_is_no_value_to_tpe(tmp_path: Path) -> None:
    sampler, _ = tpe(tmp_path, [])
    sampler.suggest("a")
    sampler.on_trial_complete("a", {"value": float("inf"), "failed": "out of memory"})
    sampler.suggest("b")
    sampler.on_trial_complete("b", error=True)
    assert [trial.state.name for trial in sampler._study.trials] == ["FAIL", "FAIL"]


def test_an_exploit_takes_the_donor_s_values_changed_and_keeps_the_trial_s_name() -> None:
    tune = TuneSpec(space={LR: {"uniform": [0.1, 0.9]}}, trials=4, scheduler="pbt")  # type: ignore[arg-type]
    trial, donor = (
        SimpleNamespace(config={"given": {"trial": name, "params": {LR: rate}}})
        for name, rate in (("0001", 0.2), ("0002", 0.5))
    )
    new: dict[str, Any] = Pbt(tune, 5, 0)._get_new_config(trial, donor)[0]["given"]
    assert new["trial"] == "0001"
    assert new["params"][LR] not in (0.2, 0.5)
    assert trial.config["given"]["params"] == {LR: 0.2}


def test_pb2_learns_what_each_trial_gained_and_goes_on_from_the_donor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tune = TuneSpec(space={LR: {"uniform": [0.1, 0.9]}}, trials=4, scheduler="pb2")  # type: ignore[arg-type]
    monkeypatch.setattr(Pbt, "on_trial_result", lambda *_: "CONTINUE")
    scheduler = Pb2(tune, 5, 0)
    trial, donor = (
        SimpleNamespace(config={"given": {"trial": name, "params": {LR: rate}}})
        for name, rate in (("0001", 0.2), ("0002", 0.5))
    )
    for one, values in ((trial, (9.0, 8.0)), (donor, (9.0, 5.0))):
        for step, value in zip((5, 10), values, strict=True):
            scheduler.on_trial_result(None, one, {"step": step, "value": value})
    assert scheduler._gains == [Gain(5, {LR: 0.2}, 1.0), Gain(5, {LR: 0.5}, 4.0)]
    new = scheduler._get_new_config(trial, donor)[0]["given"]
    assert new["trial"] == "0001"
    scheduler.on_trial_result(None, trial, {"step": 15, "value": 4.0})
    assert scheduler._gains[-1].value == 1.0, "from the donor's 5, not from its own 8"
