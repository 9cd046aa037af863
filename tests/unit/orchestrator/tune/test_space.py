"""Values drawn from a space, and the jobs that they make."""

from __future__ import annotations

import random
from typing import Any

import pytest

from orchestrator.config import spec
from orchestrator.config.errors import InputError
from orchestrator.tune.config import TuneSpec
from orchestrator.tune.space import check, distribution_of, drawn, grid, job_of, perturbed

JOB: dict[str, Any] = {
    "name": "small",
    "workload": {"model": "gpt-tiny"},
    "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 32},
    "train": {"steps": 100, "global_batch": 8},
}
SPACE = {
    "train.optimizer.lr": {"loguniform": [1e-4, 1e-2]},
    "train.optimizer.weight_decay": {"uniform": [0.0, 0.2]},
    "train.optimizer.warmup": {"integer": [0, 9]},
    "train.optimizer.schedule": {"choice": ["constant", "cosine"]},
}


def test_draws_are_a_function_of_seed_and_number_and_stay_in_range() -> None:
    tune = TuneSpec(space=SPACE, trials=4)  # type: ignore[arg-type]
    found = [drawn(tune, 7, number) for number in range(400)]
    assert found[123] == drawn(tune, 7, 123) != drawn(tune, 8, 123)
    rates = sorted(config["train.optimizer.lr"] for config in found)
    assert 1e-4 <= rates[0] <= 1.1e-4
    assert 5e-4 < rates[200] < 2e-3, "uniform in the logarithm"
    assert {config["train.optimizer.warmup"] for config in found} == set(range(10))
    assert {config["train.optimizer.schedule"] for config in found} == {"constant", "cosine"}
    assert 0.08 < sum(config["train.optimizer.weight_decay"] for config in found) / 400 < 0.12


def test_a_grid_has_every_point_once() -> None:
    space = {"seed": {"grid": [1, 2, 3]}, "train.global_batch": {"choice": [8, 16]}}
    found = grid(TuneSpec(space=space, sampler="grid"))  # type: ignore[arg-type]
    assert [tuple(config.values()) for config in found] == [(1, 8), (1, 16), (2, 8), (2, 16), (3, 8), (3, 16)]


def test_a_perturbed_value_moves_and_stays_in_range() -> None:
    tune = TuneSpec(space=SPACE, trials=4, scheduler="pbt")  # type: ignore[arg-type]
    source, config = random.Random(0), drawn(tune, 7, 0)
    for _ in range(300):
        before, config = config, perturbed(tune, config, source)
        assert config != before or config["train.optimizer.warmup"] == 0
        assert 1e-4 <= config["train.optimizer.lr"] <= 1e-2
        assert 0 <= config["train.optimizer.weight_decay"] <= 0.2
        assert isinstance(config["train.optimizer.warmup"], int)
        job_of(spec.parse(JOB), config)


def test_small_whole_numbers_move_too() -> None:
    """As in Ray Tune, rounding alone would leave 0, 1 and 2 where they are."""
    tune = TuneSpec(space={"train.optimizer.warmup": {"integer": [0, 8]}}, trials=4, scheduler="pbt")  # type: ignore[arg-type]
    for start in range(9):
        moves = [
            perturbed(tune, {"train.optimizer.warmup": start}, random.Random(seed)) for seed in range(100)
        ]
        found = {move["train.optimizer.warmup"] for move in moves}
        assert {max(start - 1, 0), min(start + 1, 8)} <= found <= set(range(9))
        assert all(isinstance(number, int) for number in found)


def test_a_search_names_the_precisions_it_compares() -> None:
    """One for all trials may be left open: it is chosen once."""
    space = {"train.precision": {"choice": ["bf16", "auto"]}}
    with pytest.raises(InputError, match=r"tune\.space\.train\.precision.*set train.precision: auto for all"):
        check(spec.parse({**JOB, "tune": {"space": space, "trials": 2}}))
    train = {**JOB["train"], "precision": "auto"}
    check(spec.parse({**JOB, "train": train, "tune": {"space": SPACE, "trials": 2}}))


def test_a_trial_s_job_is_the_job_with_its_values_and_no_search() -> None:
    base = spec.parse({**JOB, "tune": {"space": SPACE, "trials": 2}})
    found = job_of(base, {"train.optimizer.lr": 0.5, "parallel.zero": 1}, name="small-0001")
    assert (found.train.optimizer.lr, found.name, found.tune) == (0.5, "small-0001", None)
    assert isinstance(found.parallel, spec.ParallelSpec)
    assert found.parallel.zero == 1
    assert found.data == base.data


def test_values_that_make_no_job_together_are_told() -> None:
    with pytest.raises(InputError, match="warmup 200 is not below steps 100"):
        job_of(spec.parse(JOB), {"train.optimizer.warmup": 200})


def test_a_model_is_registered_where_there_is_a_server() -> None:
    tune = {"space": SPACE, "trials": 2, "register_as": "best"}
    with pytest.raises(InputError, match="no server to register a model on"):
        check(spec.parse({**JOB, "tune": tune}))
    assert (
        check(spec.parse({**JOB, "tune": tune, "tracking": {"uri": "http://127.0.0.1:5000"}})).register_as
        == "best"
    )


def test_trials_that_are_compared_at_steps_have_equally_many() -> None:
    space = {"train.steps": {"choice": [50, 100]}}
    for scheduler in ("asha", "hyperband", "median"):
        with pytest.raises(InputError, match=f"{scheduler} compares trials at the same steps"):
            check(spec.parse({**JOB, "tune": {"space": space, "trials": 2, "scheduler": scheduler}}))
    check(spec.parse({**JOB, "tune": {"space": space, "trials": 2}}))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a/b", "a name without /"),
        ("a:b'", "a name without : or '"),
        ("..", "give another"),
        (" ", "give another"),
    ],
)
def test_a_name_that_mlflow_refuses_is_told_before(name: str, told: str) -> None:
    tune = {"space": SPACE, "trials": 2, "register_as": name}
    with pytest.raises(InputError, match=told):
        check(spec.parse({**JOB, "tune": tune, "tracking": {"uri": "http://127.0.0.1:5000"}}))


def test_a_point_of_a_grid_is_named_once() -> None:
    """YAML reads 1e-4 as a text; of other samplers a value may be named twice, to be drawn more often."""
    space = {"train.optimizer.lr": {"choice": ["1e-4", 1e-3, 0.0001]}}
    with pytest.raises(InputError, match=r"has 0\.0001 twice, and both trials would be the same"):
        check(spec.parse({**JOB, "tune": {"space": space, "sampler": "grid"}}))
    check(spec.parse({**JOB, "tune": {"space": space, "trials": 2}}))


def test_values_that_are_lists_are_drawn_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    space = {"train.optimizer.betas": {"choice": [[0.9, 0.95], [0.9, 0.99]]}}
    tune = TuneSpec(space=space, trials=2)  # type: ignore[arg-type]
    distribution_of(tune.space["train.optimizer.betas"])
    assert not recwarn.list
