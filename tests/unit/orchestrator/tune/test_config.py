"""What a job's search may say, and in which words it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from orchestrator.config import spec
from orchestrator.config.errors import InputError
from orchestrator.tune.space import check

LR = "train.optimizer.lr"
JOB: dict[str, Any] = {
    "name": "small",
    "workload": {"model": "gpt-tiny"},
    "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 32},
    "train": {"steps": 100, "global_batch": 8},
}


def parsed(space: dict[str, Any] | None = None, **tune: Any) -> spec.JobSpec:
    space = {LR: {"loguniform": [1e-4, 1e-2]}} if space is None else space
    return spec.parse({**JOB, "tune": {"space": space, "trials": 4, **tune}})


def test_a_whole_search_is_accepted_and_written_out_again() -> None:
    space = {
        LR: {"loguniform": ["1e-4", "1e-2"]},
        "train.global_batch": {"choice": [8, 16]},
        "workload.changes.hidden": {"integer": [32, 64]},
        "parallel.zero": {"choice": [0, 1]},
        "train.optimizer.weight_decay": {"uniform": [0.0, 0.2]},
    }
    job = parsed(
        space, scheduler="asha", sampler="tpe", promote=[{"at": 50, "set": {"resources.workers": 2}}]
    )
    assert check(job) is job.tune
    text = spec.dump(job)
    assert "uniform: null" not in text
    import yaml

    assert spec.parse(yaml.safe_load(text)) == job
    two = parsed(space, metric=["loss", "tokens_per_second"], sampler="tpe")
    assert check(two) is two.tune
    assert two.tune.directions == ("min", "max")
    assert spec.parse(yaml.safe_load(spec.dump(two))) == two
    Draft202012Validator(spec.JobSpec.model_json_schema()).validate(yaml.safe_load(spec.dump(two)))
    Draft202012Validator(spec.JobSpec.model_json_schema()).validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("space", "tune", "line"),
    [
        ({"train.optimizer.lrr": {"choice": [1]}}, {}, "tune.space.train.optimizer.lrr: unknown key; did you mean"),
        ({LR: {"choice": ["fast"]}}, {}, "tune.space.train.optimizer.lr: should be a number"),
        ({LR: {"uniform": [-1, 1]}}, {}, "tune.space.train.optimizer.lr: should be greater than 0"),
        ({"name": {"choice": ["a"]}}, {}, "tune.space.name: is not searched"),
        ({"train.steps.x": {"choice": [1]}}, {}, "tune.space.train.steps.x: 'steps' is not a mapping"),
        ({LR: {"uniform": [2, 1]}}, {}, "the range 2.0 to 1.0 is empty"),
        ({LR: {"loguniform": [0, 1]}}, {}, "a logarithm needs values above 0"),
        ({LR: {"uniform": [1, 2], "choice": [1]}}, {}, "gives choice and uniform; give exactly one"),
        ({LR: {}}, {}, "gives nothing; give exactly one"),
        ({LR: {"uniforn": [1, 2]}}, {}, "unknown key; did you mean 'uniform'?"),
        ({LR: {"min": 1}}, {}, "lr.min: unknown key; known keys: grid, choice, uniform, loguniform, integer"),
        ({}, {}, "should have at least 1 item"),
        (None, {"sampler": "grid", "trials": None}, "sampler grid needs listed values, and train.optimizer.lr"),
        ({LR: {"grid": [1, 2]}}, {}, "is a grid, but sampler is random; write choice"),
        ({LR: {"grid": [1, 2]}}, {"sampler": "grid"}, "leave trials out"),
        (None, {"trials": None}, "trials is missing; say how many"),
        ({LR: {"grid": [1]}}, {"sampler": "grid", "trials": None, "scheduler": "pbt"}, "use sampler: random"),
        ({"workload.changes.hidden": {"choice": [32]}}, {"scheduler": "pbt"}, "pbt cannot change workload.changes"),
        ({"train.optimizer.name": {"choice": ["lion"]}}, {"scheduler": "pbt"}, "pbt cannot change train.optim"),
        (None, {"scheduler": "pbt", "trials": 1}, "pbt needs a population"),
        (None, {"grace": 5}, "grace has no meaning under scheduler none"),
        (None, {"scheduler": "asha", "interval": 5}, "interval has no meaning under scheduler asha"),
        (None, {"scheduler": "asha", "grace": 100}, "tune.grace: 100 is not below train.steps 100"),
        (None, {"promote": [{"at": 100, "set": {"resources.workers": 2}}]}, "step 100 is not before train.steps"),
        (None, {"promote": [{"at": 50, "set": {"train.steps": 2}}]}, "train.steps makes it another run"),
        (None, {"metric": ["loss"]}, "metric lists 1; give one metric, or a list of two"),
        (None, {"metric": ["loss", "loss"]}, "metric names loss twice; name two different ones"),
        (None, {"metric": ["loss", "parameterz"]}, "no step has the metric 'parameterz'"),
        (None, {"metric": ["loss", "validation.loss"]}, "tune.metric validation.loss is not measured"),
        (None, {"metric": "parameters"}, "parameters is for a list of two metrics"),
        (None, {"metric": "bytes"}, "bytes is for a list of two metrics"),
        (None, {"metric": ["loss", "parameters"], "mode": "min"}, "mode min is for one metric; give a list for both"),
        (None, {"metric": ["loss", "parameters"], "mode": ["min"]}, "mode lists 1, and there are 2 metrics"),
        (None, {"metric": ["loss", "parameters"], "scheduler": "asha"},
         "asha decides by one metric which trials continue, but this search has two; set scheduler: none"),
        (None, {"metric": ["loss", "parameters"], "register_as": "m"}, "register_as is for one best model"),
        ({"train": {"choice": [{}]}, LR: {"choice": [1]}}, {}, "tune.space.train: train.optimizer.lr lies within it"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(space: Any, tune: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        check(parsed(space, **tune))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_job_without_a_search_says_so() -> None:
    with pytest.raises(InputError, match="there is no search"):
        check(spec.parse(JOB))


def test_the_search_is_no_part_of_the_run_s_identity() -> None:
    assert parsed().identity() == spec.parse(JOB).identity()


@pytest.mark.parametrize(
    ("tune", "mode"),
    [
        ({}, "min"),
        ({"metric": "validation.loss"}, "min"),
        ({"metric": "validation.accuracy"}, "max"),
        ({"metric": "validation.accuracy", "mode": "min"}, "min"),
    ],
    ids=str,
)
def test_more_of_an_accuracy_is_better(tune: dict[str, Any], mode: str) -> None:
    found = spec.TuneSpec.model_validate({"space": {LR: {"uniform": [0.1, 0.2]}}, "trials": 4, **tune})
    assert found.direction == mode


def test_a_search_over_the_parts_of_a_loss_needs_another_metric() -> None:
    """The loss is their weighted sum: less weight makes it smaller, whatever the student has learnt."""
    tune = {"space": {"distill.logits.weight": {"uniform": [0.1, 0.9]}}, "trials": 4}
    measured = {"data": {**JOB["data"], "validation": {"share": 0.1}}, "evaluate": {}}
    job = {**JOB, **measured, "distill": {"teacher": "hf:large"}}
    with pytest.raises(
        InputError, match=r"the weighted sum that distill\.logits\.weight changes.*set metric to valid"
    ):
        spec.parse({**job, "tune": tune})
    assert spec.parse({**job, "tune": {**tune, "metric": "validation.loss"}}).tune is not None
