"""The range test: its job, the rate that it suggests for curves whose steepest point is known, and what it refuses."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import job

from orchestrator.cli.lr_range import has_diverged, show
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.optim.learning_rate import learning_rate
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune.lr_range import RateRange, found_in, job_of_range, range_of

RANGE = RateRange(1e-6, 1.0, 120)


def rows_of(losses: list[float]) -> list[dict[str, Any]]:
    """Rows of a test over RANGE whose losses may end early."""
    rates = np.geomspace(RANGE.low, RANGE.high, RANGE.steps)
    return [
        {"step": n, "attempt": 1, "time": float(n), "step_seconds": 1.0, "lr": float(rate), "loss": loss}
        for n, (rate, loss) in enumerate(zip(rates, losses, strict=False), start=1)
    ]


def falling(centre: float, noise: float = 0.0) -> list[float]:
    """5 to 2 by a logistic curve over the logarithm of the rate: its slope is steepest at `centre`, whose logarithm is
    that of base 10."""
    places = np.linspace(math.log10(RANGE.low), math.log10(RANGE.high), RANGE.steps)
    drawn = np.random.default_rng(0).normal(0.0, noise, RANGE.steps)
    return list(5.0 - 3.0 / (1.0 + np.exp(-(places - centre) * 4)) + drawn)


@pytest.mark.parametrize("centre", [-4.0, -3.0, -1.5])
def test_the_suggestion_is_where_the_loss_falls_fastest(centre: float) -> None:
    """Also without smoothing: numpy's gradient of the losses over the logarithm is least there."""
    losses = falling(centre)
    found = found_in(rows_of(losses))
    assert found.suggested is not None
    assert math.log10(found.suggested) == pytest.approx(centre, abs=0.1)
    steepest = int(np.gradient(np.array(losses), np.log(found.rates)).argmin())
    assert math.log10(found.rates[steepest]) == pytest.approx(math.log10(found.suggested), abs=0.1)
    noisy = found_in(rows_of(falling(centre, noise=0.02)))
    assert noisy.suggested is not None
    assert math.log10(noisy.suggested) == pytest.approx(centre, abs=0.5)
    assert found.diverged is None


def test_what_diverges_ends_the_curve() -> None:
    losses = falling(-3.0)
    for n in range(100, RANGE.steps):
        losses[n] = 2.0 * 3.0 ** (n - 99)
    found = found_in(rows_of(losses))
    assert found.diverged is not None
    assert found.rates[94] <= found.diverged <= found.rates[103]
    assert len(found.smoothed) < RANGE.steps
    assert found.suggested is not None
    assert math.log10(found.suggested) == pytest.approx(-3.0, abs=0.1)
    assert found.line.startswith("suggested lr: 0.00")


def test_a_fall_from_a_peak_at_larger_rates_is_no_suggestion() -> None:
    """As seen in a run: the loss rose threefold past its least value, and then fell faster than ever."""
    losses = falling(-3.0)
    losses[100:110] = [2.0 + 0.5 * n for n in range(10)]
    losses[110:] = [6.5 - 0.45 * n for n in range(10)]
    found = found_in(rows_of(losses))
    assert found.suggested is not None
    assert math.log10(found.suggested) == pytest.approx(-3.0, abs=0.1)
    assert found.lowest < found.rates[105]


def test_a_step_without_a_number_ends_it_too() -> None:
    """Such a step has no row."""
    rows = rows_of(falling(-3.0)[:91])
    assert found_in(rows[:90], unstable=True).diverged == pytest.approx(rows[90]["lr"])
    assert found_in(rows[:90]).diverged is None


def test_missing_steps_are_refused() -> None:
    with pytest.raises(InputError, match="rows of 5 steps are missing, the first of step 1"):
        found_in(rows_of(falling(-3.0))[5:])


def test_a_loss_that_never_falls_suggests_nothing() -> None:
    found = found_in(rows_of(list(np.linspace(2.0, 3.0, RANGE.steps))))
    assert found.suggested is None
    assert "does not fall in this range" in found.line


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(InputError, match="a number in 3 steps only"):
        found_in(rows_of([3.0, 2.0, 1.0]), unstable=True)


def test_its_job_is_the_job_at_rising_rates() -> None:
    document = job("a.txt", thaw={}, stability={"spike": 9.0}) | {
        "evaluate": {"every": 5},
        "stop_when": {"metric": "validation.loss", "patience": 3},
        "tracking": {"uri": "sqlite:///m.db"},
    }
    document["data"]["validation"] = {"share": 0.1}
    document["checkpoint"] |= {"export": "hf", "keep_best": "validation.loss"}
    spec = parse(document)
    made = job_of_range(spec.document(), RANGE)
    assert made.name == "small-lr-range"
    assert made.data == spec.data, "so that what is prepared is used again"
    assert (made.workload, made.seed, made.parallel) == (spec.workload, spec.seed, spec.parallel)
    assert made.train.global_batch == spec.train.global_batch
    assert (made.evaluate, made.tracking, made.checkpoint.export) == (None, None, None)
    rates = [learning_rate(made.train.optimizer, n, RANGE.steps) for n in range(RANGE.steps)]
    assert (rates[0], rates[-1]) == (pytest.approx(RANGE.low), pytest.approx(RANGE.high))
    factors = [after / before for before, after in itertools.pairwise(rates)]
    assert factors == pytest.approx([factors[0]] * len(factors))


def test_a_job_that_continues_another_is_refused() -> None:
    with pytest.raises(InputError, match=r"workload\.init_from"):
        job_of_range(parse(job("a.txt", continue_from="runs/a")).document(), RANGE)


def test_a_job_that_learns_from_rewards_is_refused() -> None:
    document = parse(job("a.txt")).document()
    document["workload"]["objective"] = "grpo"
    with pytest.raises(InputError, match="tune` and the metric reward"):
        job_of_range(document, RANGE)


@pytest.mark.parametrize(
    "text", ["1", "1e-3:", "a:b", "1:1e-3", "0:1", "1e-3:inf", "1e-3:1:0", "1e-3:1:9", "nan:1"]
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        range_of(text)


def test_a_range_may_say_its_steps() -> None:
    assert range_of("1e-6:1") == RateRange(1e-6, 1.0, 100)
    assert range_of("1e-6:1:300").steps == 300


@pytest.mark.parametrize("kind", ["unstable", ""])
def test_the_newest_row_of_each_step_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    run = RunDir(str(tmp_path / "run"))
    run.create()
    run.append("events.jsonl", [{"time": 1.0, "attempt": 1, "phase": "stop", "cause": {"kind": kind}}])
    assert has_diverged(run) == bool(kind)
    every = rows_of(falling(-3.0))
    lost = [row | {"loss": 99.0} for row in every[20:40]]
    again = [row | {"attempt": 2} for row in every[20:]]
    run.append("metrics.jsonl", [*every[:20], *lost, *again])
    show("small-lr-range", "causal_lm", run, as_json=False)
    out = capsys.readouterr().out
    assert out.startswith("loss, by lr from 1e-06 to 1\n  █")
    assert "suggested lr: 0.00" in out
    assert ("it diverges at 1.1" in out) == bool(kind)
    numbers = json.loads((tmp_path / "run" / "lr-range.json").read_text())
    assert numbers["losses"] == [row["loss"] for row in every]
    page = (tmp_path / "run" / "lr-range.html").read_text()
    assert page.count("1e-3<") == 1
    assert '<line class="mark"' in page
    assert "http" not in page.replace("http-equiv", "")
