"""The search space: draw values from it, perturb them, and put them into jobs. Pure; imports neither torch nor Ray."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

from orchestrator.config.errors import InputError
from orchestrator.config.metric_names import PARTS_OF_LOSS, Metric, OfAnswers, OfWords
from orchestrator.config.overrides import set_key
from orchestrator.config.records import PREFERENCES, SAMPLES
from orchestrator.config.spec import JobSpec, dump, parse
from orchestrator.config.workload import WorkloadSpec
from orchestrator.evaluate.config import metrics_of
from orchestrator.observe.mlflow_checks import check_registered_name
from orchestrator.storage.row_types import StepRow
from orchestrator.tune.config import SIZES, Dimension, TuneSpec
from workloads.own.object_reference import is_object_reference

COORDINATES = {"step", "attempt", "time"}
"""Keys of a row that say when it was written, which are no metrics."""
OF_STEPS = {
    key for key, kind in get_type_hints(StepRow).items() if kind in (int, float, float | None)
} - COORDINATES
OF_EXPERTS = {"router_loss", "router_load", "router_dropped", "router_entropy"}
OF_HEADS = {
    "sentence_loss",
    "sentence_accuracy",
    "discriminator_loss",
    "discriminator_accuracy",
    "replaced",
}
"""The metrics of objectives with a second loss."""
OF_PRECISION = {"loss_scale", "skipped"}
NAMED_FIRST = ("loss", "grad_norm", "tokens_per_second", "step_seconds")


def check_metric(workload: WorkloadSpec, metric: str) -> None:
    """Raise InputError if no row of a step can have the metric. A user's own code may report any metric."""
    objective = workload.objective
    is_own = objective == SAMPLES or is_object_reference(workload.model) or is_object_reference(objective)
    known = OF_STEPS | OF_EXPERTS | OF_HEADS | OF_PRECISION | {*PARTS_OF_LOSS}
    if objective in PREFERENCES:
        known |= {"accuracy", "divergence", *get_args(OfAnswers), *get_args(OfWords)}
    elif objective == "sequence_classification":
        known |= {"accuracy"}
    if "." in metric or is_own or metric in known or metric in SIZES:
        return
    others = ", ".join(sorted(known - set(NAMED_FIRST)))
    hint = f"name one of {', '.join(NAMED_FIRST)}; {others}"
    if metric in {*get_args(Metric), *metrics_of(objective)}:
        hint = f"it is a metric of evaluations: add the set's name, as in validation.{metric}"
    raise InputError(f"no step has the metric {metric!r}", "tune.metric", hint)


Config = dict[str, Any]
"""Values by dotted key of the job."""

FACTORS = (0.8, 1.2)
"""The factors by which PBT multiplies a value, one at random (Jaderberg et al., 2017, section 4)."""
RESAMPLE = 0.25
"""The probability that PBT draws a new value instead."""
PRECISION = "train.precision"
STEPS = "train.steps"
NOT_SEARCHED = ("name", "tune", "tracking", "checkpoint", "limits")


def draw(dimension: Dimension, source: random.Random) -> Any:
    """Draw one value at random."""
    if dimension.listed is not None:
        return source.choice(dimension.listed)
    low, high = dimension.ends
    if dimension.loguniform:
        return min(max(math.exp(source.uniform(math.log(low), math.log(high))), low), high)
    return source.randint(int(low), int(high)) if dimension.integer else source.uniform(low, high)


def distribution_of(dimension: Dimension) -> Any:
    """Return Optuna's distribution over the values of a key."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.listed is not None:
        with warnings.catch_warnings():
            # Optuna warns of values that its database cannot store, such as lists.
            warnings.simplefilter("ignore")
            return CategoricalDistribution(dimension.listed)
    low, high = dimension.ends
    if dimension.integer is not None:
        return IntDistribution(int(low), int(high))
    return FloatDistribution(low, high, log=dimension.loguniform is not None)


def drawn(tune: TuneSpec, seed: int, number: int) -> Config:
    """Draw the values of trial `number` in a random search. They depend on (seed, number) alone."""
    source = random.Random(f"{seed}/{number}")
    return {key: draw(dimension, source) for key, dimension in tune.space.items()}


def grid(tune: TuneSpec) -> list[Config]:
    """Return every point of a grid; the last key varies fastest."""
    values = [dimension.listed or [] for dimension in tune.space.values()]
    return [dict(zip(tune.space, point, strict=True)) for point in itertools.product(*values)]


def perturbed(tune: TuneSpec, config: Mapping[str, Any], source: random.Random) -> Config:
    """PBT's explore step: make each value a little lower or higher, or draw a new one, always within its range."""
    values = dict(config)
    for key, dimension in tune.space.items():
        value = values[key]
        if source.random() < RESAMPLE:
            values[key] = draw(dimension, source)
        elif dimension.listed is not None:
            index = dimension.listed.index(value) + source.choice((-1, 1))
            values[key] = dimension.listed[min(max(index, 0), len(dimension.listed) - 1)]
        else:
            low, high = dimension.ends
            factor = source.choice(FACTORS)
            moved = value * factor
            if dimension.integer:
                # 1 and 2 round to themselves, and 0 stays 0: a whole number moves by at least one.
                moved = max(round(moved), value + 1) if factor > 1 else min(round(moved), value - 1)
            values[key] = min(max(moved, low), high)
    return values


def job_of(spec: JobSpec, config: Mapping[str, Any], **more: Any) -> JobSpec:
    """Return the job of a trial.

    Args:
        spec: the job with the search.
        config: the values of the trial, by dotted key.
        more: further values, by key with __ instead of dots.

    Raises:
        InputError: the result is not a valid job.
    """
    document = spec.model_dump(mode="json") | {"tune": None}
    for key, value in config.items():
        set_key(document, key, value, f"tune.space.{key}")
    for key, value in more.items():
        set_key(document, key.replace("__", "."), value, key)
    return parse(document, "trial")


def check(spec: JobSpec) -> TuneSpec:
    """Check the search of a job and return it. Raises InputError without one, or if a value or a step does not fit."""
    tune = spec.tune
    if tune is None:
        raise InputError("there is no search", "tune", "say which keys to search, see `orchestrator schema`")
    if tune.register_as and spec.tracking is None:
        raise InputError(
            "there is no server to register a model on", "tune.register_as", "set tracking, or leave it out"
        )
    check_registered_name(tune.register_as, "tune.register_as")
    for metric in tune.metrics:
        check_metric(spec.workload, metric)
    for key in tune.space:
        _check_key(tune, key)
        _check_values(lambda values, where: dump(_try(spec, values, where)), tune, key)
    for promotion in tune.promote:
        _try(spec, promotion.set, f"tune.promote.{promotion.at}")
        if promotion.at >= spec.train.steps:
            problem = f"step {promotion.at} is not before train.steps {spec.train.steps}"
            raise InputError(problem, "tune.promote", "lower it")
    for name, steps in (("grace", tune.grace), ("interval", tune.interval)):
        if steps is not None and steps >= spec.train.steps:
            problem = f"{steps} is not below train.steps {spec.train.steps}, so nothing would be decided"
            raise InputError(problem, f"tune.{name}", "lower it")
    return tune


def _check_key(tune: TuneSpec, key: str) -> None:
    """Raise InputError if a search cannot vary a key of the job."""
    where = f"tune.space.{key}"
    if key == STEPS and tune.scheduler != "none":
        problem = (
            f"{tune.scheduler} compares trials at the same steps, so all trials must have the same number"
        )
        raise InputError(problem, where, "leave it out, or set scheduler: none")
    if key.split(".")[0] in NOT_SEARCHED:
        raise InputError("is not searched", where, f"search none of {', '.join(NOT_SEARCHED)}")
    inner = [other for other in tune.space if other.startswith(key + ".")]
    if inner:
        raise InputError(f"{inner[0]} lies within it", where, "search one of them")


def _check_values(dumped: Callable[[Config, str], str], tune: TuneSpec, key: str) -> None:
    """Raise InputError if a value of a key makes no valid job, or the job of another trial.

    Args:
        dumped: returns the job of a trial as text, given its values and what to name in errors.
        tune: the search.
        key: the key.
    """
    where = f"tune.space.{key}"
    dimension = tune.space[key]
    made: list[str] = []  # as text, since 1, 1.0 and true are equal in Python
    for value in dimension.listed or dimension.ends:
        made.append(dumped({key: value}, where))
        if tune.sampler == "grid" and made.index(made[-1]) < len(made) - 1:
            raise InputError(f"has {value} twice, and both trials would be the same", where, "name it once")
        if value == "auto" and key == PRECISION:
            problem = "auto would be chosen again for each trial"
            raise InputError(problem, where, "name precisions, or set train.precision: auto for all trials")


def _try(spec: JobSpec, config: Config, where: str) -> JobSpec:
    try:
        return job_of(spec, config)
    except InputError as error:
        key = error.where.removeprefix("trial: ")
        at = "" if where.endswith(key) or key == "trial" else f" ({key})"
        raise InputError(error.what + at, where, error.hint) from None
