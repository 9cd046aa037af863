"""What samples and what explores, without Ray running."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.rundir import RunDir
from orchestrator.tune.ledger import Ended, Ledger
from orchestrator.tune.schedulers import Pbt, Tpe
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
