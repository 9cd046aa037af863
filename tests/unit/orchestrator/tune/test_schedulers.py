"""What samples and what explores, without Ray running."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.tune.schedulers import ASHAScheduler
from ray.tune.schedulers.pbt import _PBTTrialState

from orchestrator.storage.run_directory import RunDir
from orchestrator.tune.config import TuneSpec
from orchestrator.tune.pb2 import Gain
from orchestrator.tune.schedulers import Asha, Pb2, Pbt, Tpe
from orchestrator.tune.trial_records import TrialEnd, TrialRecords

LR = "train.optimizer.lr"


def tpe(sweep: Path, names: list[str]) -> tuple[Tpe, TrialRecords]:
    tune = TuneSpec(space={LR: {"loguniform": [1e-4, 1.0]}}, trials=40, sampler="tpe")  # type: ignore[arg-type]
    records = TrialRecords(RunDir(str(sweep)))
    return Tpe(tune, 7, records, names, lambda name, config: {"trial": name, "params": config}), records


def search(sampler: Tpe, records: TrialRecords, count: int) -> list[float]:
    """Learning rates drawn one after the other; the best one is 0.01."""
    found = []
    for number in range(count):
        given = sampler.suggest(str(number))["assignment"]
        rate = given["params"][LR]
        found.append(rate)
        sampler.on_trial_complete(str(number), {"value": abs(rate - 0.01), "failed": ""})
        records.end(given["trial"], TrialEnd("done", given["trial"], 1, abs(rate - 0.01)))
    return found


def test_tune_can_pickle_what_samples_as_it_does_at_the_start_of_every_search(tmp_path: Path) -> None:
    assert cloudpickle.loads(cloudpickle.dumps(tpe(tmp_path, [])[0]))


def test_tpe_learns_and_a_search_taken_up_again_draws_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    whole = search(*tpe(tmp_path / "whole", []), 30)
    first = search(*tpe(tmp_path / "halves", []), 14)
    names = list(TrialRecords(RunDir(str(tmp_path / "halves"))).configs)
    again = search(*tpe(tmp_path / "halves", names), 30)
    assert first == whole[:14]
    assert again == whole
    assert len(set(whole)) == 30
    near = [sum(1e-3 < rate < 0.1 for rate in rates) for rates in (whole[:10], whole[20:])]
    assert near[1] > near[0], "the last ten are nearer than the first ten, which are random"


@pytest.mark.parametrize("halves", [False, True])
def test_two_metrics_are_drawn_as_optuna_alone_draws_them(tmp_path: Path, halves: bool) -> None:
    """Optuna's own loop over the same seeds is the oracle; a search that goes on draws what it would have drawn."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def values(rate: float) -> tuple[float, float]:
        return abs(rate - 0.01), rate

    space = {LR: {"loguniform": [1e-4, 1.0]}}
    tune = TuneSpec.model_validate(
        {"space": space, "trials": 20, "sampler": "tpe", "metric": ["loss", "tokens_per_second"]}
    )
    assert tune.directions == ("min", "max")
    drawn: list[float] = []
    for count in (9, 20) if halves else (20,):
        records = TrialRecords(RunDir(str(tmp_path)))
        sampler = Tpe(
            tune, 7, records, list(records.configs), lambda name, config: {"trial": name, "params": config}
        )
        drawn = []
        for number in range(count):
            given = sampler.suggest(str(number))["assignment"]
            first, second = values(given["params"][LR])
            drawn.append(given["params"][LR])
            sampler.on_trial_complete(str(number), {"value": first, "second": second, "failed": ""})
            records.end(given["trial"], TrialEnd("done", given["trial"], 1, first, second=second))
    distributions: dict[str, Any] = {LR: optuna.distributions.FloatDistribution(1e-4, 1.0, log=True)}
    wanted: list[float] = []
    for number in range(20):
        own = optuna.samplers.TPESampler(seed=7 * 1_000_003 + number, constant_liar=True)
        study = optuna.create_study(directions=["minimize", "maximize"], sampler=own)
        for rate in wanted:
            study.add_trial(
                optuna.trial.create_trial(params={LR: rate}, distributions=distributions, values=values(rate))
            )
        wanted.append(study.ask(distributions).params[LR])
    assert drawn == wanted
    assert TrialRecords(RunDir(str(tmp_path))).ended["0003"].second == values(drawn[3])[1]


def test_running_trials_count_as_bad_ones_whatever_optuna_takes_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna has `constant_liar` by default since version 5. Here it is asked for."""
    import optuna

    own, asked = optuna.samplers.TPESampler, list[dict[str, Any]]()
    assert inspect.signature(own).parameters["constant_liar"].default is True
    monkeypatch.setattr(optuna.samplers, "TPESampler", lambda **given: asked.append(given) or own(**given))
    tpe(tmp_path, [])[0].suggest("a")
    assert [given["constant_liar"] for given in asked] == [True]


def test_a_failed_trial_is_no_value_to_tpe(tmp_path: Path) -> None:
    sampler, _ = tpe(tmp_path, [])
    sampler.suggest("a")
    sampler.on_trial_complete("a", {"value": float("inf"), "failed": "out of memory"})
    sampler.suggest("b")
    sampler.on_trial_complete("b", error=True)
    assert [sampler._known(name).state.name for name in "ab"] == ["FAIL", "FAIL"]


def test_a_trial_that_waits_at_a_rung_or_was_stopped_there_is_a_value_to_tpe(tmp_path: Path) -> None:
    sampler, _ = tpe(tmp_path, [])
    for name in "ab":
        sampler.suggest(name)
    assert sampler._known("a").state.name == "RUNNING"
    sampler.on_trial_result("a", {"value": 3.0, "failed": ""})
    assert (sampler._known("a").state.name, sampler._known("a").value) == ("COMPLETE", 3.0)
    sampler.on_trial_complete("a")
    assert (sampler._known("a").state.name, sampler._known("a").value) == ("COMPLETE", 3.0)


class Tune:
    """Drives trials as Tune does, one at a time: what each tells at a step is a function of its name and the step.

    One that tells infinity has failed, and where it would tell no number its process has died.
    """

    search_alg = None

    def __init__(
        self, scheduler: Asha | Pbt, names: str, losses: Callable[[str, int], float], rungs: list[int]
    ) -> None:
        self.scheduler, self.losses, self.rungs = scheduler, losses, rungs
        self.trials = [Trial(name) for name in names]
        self.story: list[tuple[str, int]] = []

    def get_trials(self) -> list[Trial]:
        return self.trials

    def get_live_trials(self) -> list[Trial]:
        """As in Tune: with those whose process died."""
        return [trial for trial in self.trials if trial.status != "TERMINATED"]

    def stop_trial(self, trial: Trial) -> None:
        trial.status = "TERMINATED"

    def run(self) -> list[tuple[str, int]]:
        """(trial, step) of every result, in order."""
        while trial := self.scheduler.choose_trial_to_run(self):
            assert self.scheduler.choose_trial_to_run(self) is trial, "asked again it says the same"
            trial.status = "RUNNING"
            while trial.status == "RUNNING":
                trial.step = next(rung for rung in self.rungs if rung > trial.step)
                self.story.append((trial.name, trial.step))
                result = {"step": trial.step, "value": self.losses(trial.name, trial.step), "failed": ""}
                if math.isnan(result["value"]):
                    trial.status = "ERROR"
                elif trial.step == self.rungs[-1] or math.isinf(result["value"]):
                    trial.status = "TERMINATED"
                    self.scheduler.on_trial_complete(self, trial, result)
                elif self.scheduler.on_trial_result(self, trial, result) == "PAUSE":
                    trial.status = "PAUSED"
        assert all(trial.is_finished() for trial in self.trials)
        return self.story


@dataclass(eq=False)
class Trial:
    name: str
    experiment_tag: str = ""
    status: str = "PENDING"
    step: int = 0

    def is_finished(self) -> bool:
        return self.status in ("TERMINATED", "ERROR")


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("names", ["abcdefghi", "ihgfedcba", "eiachbgdf"])
def test_asha_lets_the_best_of_each_rung_go_on(mode: str, names: str) -> None:
    """Of nine trials the best three come to the second rung and the best to the end, in whatever order they come."""
    sign, rungs = 1.0 if mode == "min" else -1.0, [1, 3, 9]
    story = Tune(Asha(rungs, 3, mode), names, lambda name, step: sign * ord(name), rungs).run()
    assert [name for name, step in story if step == 1] == list(names)
    assert {name for name, step in story if step == 3} >= {"a", "b", "c"}
    assert "a" in {name for name, step in story if step == 9}


class TestRaysOwnAsha:
    """Why ASHA is not Ray Tune's."""

    @staticmethod
    def commands(names: str) -> list[str]:
        """What Tune's scheduler answers to each trial's first rung, in a search that begins."""
        theirs = ASHAScheduler("step", "value", "min", max_t=9, grace_period=1, reduction_factor=3)
        found = []
        for name in names:
            trial: Any = SimpleNamespace(trial_id=name)
            theirs.on_trial_add(None, trial)  # type: ignore[arg-type]
            found.append(theirs.on_trial_result(None, trial, {"step": 1, "value": float(ord(name))}))  # type: ignore[arg-type]
        return found

    def test_it_trains_all_trials_to_the_end_if_each_is_better_than_those_before(self) -> None:
        assert self.commands("ihgfedcba") == ["CONTINUE"] * 9

    def test_a_search_that_is_continued_promotes_what_it_would_have_stopped(self) -> None:
        """Tune's rungs are in memory; the trials that an earlier command stopped are not run again."""
        assert self.commands("abcd")[-1] == "STOP"
        assert self.commands("abc")[-1] == "STOP"
        assert self.commands("d") == ["CONTINUE"]


def test_asha_promotes_as_soon_as_enough_have_come() -> None:
    rungs = [1, 3, 9]
    story = Tune(Asha(rungs, 3, "min"), "abcdefghi", lambda name, step: ord(name), rungs).run()
    order = [("a", 1), ("b", 1), ("c", 1), ("a", 3), ("d", 1), ("e", 1), ("f", 1), ("b", 3)]
    assert story == [*order, ("g", 1), ("h", 1), ("i", 1), ("c", 3), ("a", 9)]


def test_asha_with_few_trials_trains_its_leader_to_the_end() -> None:
    rungs, losses = [1, 3, 9], {"a": 5.0, "b": 4.0}
    story = Tune(Asha(rungs, 3, "min"), "ab", lambda name, step: losses[name], rungs).run()
    assert story == [("a", 1), ("b", 1), ("b", 3), ("b", 9)]


def test_asha_decides_at_its_own_rungs_only() -> None:
    """A promotion to a wider layout is a rung of the trial, and none of the scheduler."""
    rungs, losses = [1, 2, 3, 9], {"a": 5.0, "b": 4.0}
    story = Tune(Asha([1, 3, 9], 3, "min"), "ab", lambda name, step: losses[name], rungs).run()
    assert story == [("a", 1), ("b", 1), ("b", 2), ("b", 3), ("b", 9)]


def decisions(
    monkeypatch: pytest.MonkeyPatch,
    began: dict[str, int],
    losses: Callable[[str, int], float],
    warmup: int = 0,
) -> Any:
    """Under PBT with an interval of 10 up to step 50: the (trial, step) of each decision."""
    found: list[tuple[str, int]] = []
    space = {LR: {"uniform": [0.1, 0.9]}}
    scheduler = Pbt(TuneSpec(space=space, trials=4, scheduler="pbt"), 10, warmup, seed=0)  # type: ignore[arg-type]
    scheduler.set_search_properties("value", "min")
    tune = Tune(scheduler, "".join(began), losses, [10, 20, 25, 30, 40, 50])
    for trial in tune.trials:
        trial.step = began[trial.name]
        scheduler._trial_state[trial] = _PBTTrialState(trial)
    monkeypatch.setattr(
        scheduler, "_checkpoint_or_exploit", lambda trial, *_, **__: found.append((trial.name, trial.step))
    )
    tune.run()
    return found


def test_pbt_decides_when_all_are_at_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found = decisions(monkeypatch, {"a": 0, "b": 0}, lambda name, step: 1.0)
    assert sorted(found) == [(name, step) for name in "ab" for step in (10, 20, 30, 40)]


@pytest.mark.parametrize(("warmup", "first"), [(9, 10), (10, 20), (15, 20), (31, 40)])
def test_pbt_decides_nothing_during_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, warmup: int, first: int
) -> None:
    found = decisions(monkeypatch, {"a": 0, "b": 0}, lambda name, step: 1.0, warmup)
    assert sorted({step for _, step in found}) == list(range(first, 50, 10))


def test_trials_that_are_behind_when_a_search_is_taken_up_again_catch_up_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for began in ({"a": 20, "b": 10}, {"a": 10, "b": 20}):
        found = decisions(monkeypatch, began, lambda name, step: 1.0)
        assert sorted(found) == [(name, step) for name in "ab" for step in (30, 40)]


@pytest.mark.parametrize("told", [math.inf, math.nan])
def test_a_population_whose_last_trial_fails_at_a_decision_goes_on(
    monkeypatch: pytest.MonkeyPatch, told: float
) -> None:
    began = {"a": 0, "b": 0, "c": 0}
    found = decisions(monkeypatch, began, lambda name, step: told if (name, step) == ("c", 20) else 1.0)
    assert [step for name, step in found if name == "a"] == [10, 30, 40]


def test_an_exploit_takes_the_donor_s_values_changed_and_keeps_the_trial_s_name() -> None:
    tune = TuneSpec(space={LR: {"uniform": [0.1, 0.9]}}, trials=4, scheduler="pbt")  # type: ignore[arg-type]
    trial, donor = (
        SimpleNamespace(config={"assignment": {"trial": name, "params": {LR: rate}}})
        for name, rate in (("0001", 0.2), ("0002", 0.5))
    )
    new: dict[str, Any] = Pbt(tune, 5, 0, seed=0)._get_new_config(trial, donor)[0]["assignment"]
    assert new["trial"] == "0001"
    assert new["params"][LR] not in (0.2, 0.5)
    assert trial.config["assignment"]["params"] == {LR: 0.2}


def test_pb2_learns_what_each_trial_gained_and_goes_on_from_the_donor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tune = TuneSpec(space={LR: {"uniform": [0.1, 0.9]}}, trials=4, scheduler="pb2")  # type: ignore[arg-type]
    monkeypatch.setattr(Pbt, "on_trial_result", lambda *_, **__: "CONTINUE")
    scheduler = Pb2(tune, 5, 0, seed=0)
    trial, donor = (
        SimpleNamespace(config={"assignment": {"trial": name, "params": {LR: rate}}})
        for name, rate in (("0001", 0.2), ("0002", 0.5))
    )
    for one, values in ((trial, (9.0, 8.0)), (donor, (9.0, 5.0))):
        for step, value in zip((5, 10), values, strict=True):
            scheduler.on_trial_result(None, one, {"step": step, "value": value})
    assert scheduler._gains == [Gain(5, {LR: 0.2}, 1.0), Gain(5, {LR: 0.5}, 4.0)]
    new = scheduler._get_new_config(trial, donor)[0]["assignment"]
    assert new["trial"] == "0001"
    scheduler.on_trial_result(None, trial, {"step": 15, "value": 4.0})
    assert scheduler._gains[-1].value == 1.0, "from the donor's 5, not from its own 8"
