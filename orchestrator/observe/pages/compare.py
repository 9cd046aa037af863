"""Several runs side by side: their figures, their curves in one chart, and the differences of their job files.

Runs that differ by seed alone are one column, with means and a band of one standard deviation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import BASE, CLEANED_BY, CODE, SHARDS, TEACHER, read_job, teacher_of
from orchestrator.config.chain import seed_name
from orchestrator.config.errors import InputError
from orchestrator.config.loss_unit import loss_unit, read_unit
from orchestrator.config.outcome import Outcome
from orchestrator.config.redact import redact
from orchestrator.observe.formatting import count, duration
from orchestrator.observe.last_status import if_lost
from orchestrator.observe.live import BARS
from orchestrator.observe.mlflow_run import flatten
from orchestrator.observe.pages import charts
from orchestrator.observe.pages.page import render
from orchestrator.observe.summary import summary
from orchestrator.observe.totals import CHARTED, totals_of
from orchestrator.storage.row_line import EVENTS
from orchestrator.storage.run_directory import RunDir

MOST = 8
"""Maximum number of columns in a comparison, as many as there are distinguishable colours."""
WIDE = (1040.0, 320.0)
LOW = (508.0, 200.0)
WIDTH = 60
"""Width of a curve on a terminal, in characters."""
UNNAMED = "-"
"""Shown for a key that a run lacks."""
Curve = list[charts.Point]
Fact = tuple[str, list[str]]
"""The name of a figure, and its text in each column."""
NAME = "name"
SEED = "seed"
NO_NUMBERS = ("data.cache", "limits.", "resources.", "tracking.", "sinks", "notify")
"""How keys begin that do not decide what a run computes. A chain names the cache that its runs have by default."""
ORIGINS = {
    "own code": CODE,
    "own code that cleaned": CLEANED_BY,
    "digest of the data": SHARDS,
    "pretrained weights": BASE,
    "weights of the teacher": TEACHER,
}
"""What a commit says of its run beside the job, and where in its meta."""


@dataclass(frozen=True)
class ComparedRun:
    """A run: its label, summary, flat job, the points of each of its curves, and what its commits say of ORIGINS."""

    label: str
    found: dict[str, Any]
    job: dict[str, str]
    curves: dict[str, Curve]
    origin: dict[str, str]


@dataclass(frozen=True)
class Spread:
    """The mean of a value over seeds, the standard deviation of a sample (n - 1), the extremes, and the number of runs
    that have the value.
    """

    mean: float
    deviation: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Column:
    """A column of a comparison: one run, or the runs of one job that differ by seed alone."""

    label: str
    runs: tuple[ComparedRun, ...]

    @property
    def counted(self) -> tuple[ComparedRun, ...]:
        """Return the runs that means are of: those that are done, or a single run."""
        if len(self.runs) == 1:
            return self.runs
        return tuple(run for run in self.runs if run.found["state"] == Outcome.DONE)

    @property
    def drawn(self) -> tuple[ComparedRun, ...]:
        """Return the runs that curves are of: those of means, or without any those that have not failed."""
        return self.counted or tuple(run for run in self.runs if run.found["state"] != Outcome.FAILED)

    @property
    def title(self) -> str:
        """Return the label with the number of seeds, if there are several."""
        every, counted = len(self.runs), len(self.counted)
        if every == 1:
            return self.label
        if not counted:
            return f"{self.label} ({every} seeds, none done)"
        seeds = f"{every} seeds" if every == counted else f"{counted} of {every} seeds"
        return f"{self.label} (mean of {seeds})"

    def spread(self, value: Callable[[ComparedRun], float | None]) -> Spread | None:
        """Return the spread of a value over the runs that have it; None if none has."""
        result = [each for run in self.counted if (each := value(run)) is not None]
        if not result:
            return None
        return Spread(*_mean_and_deviation(result), min(result), max(result), len(result))

    def of_fewer(self, spread: Spread) -> str:
        """Return of how many runs a mean is, if they are fewer than the title says."""
        return f" ({spread.count} of {len(self.counted)})" if spread.count < len(self.counted) else ""

    def texts(self, text: Callable[[ComparedRun], str]) -> str:
        """Return the different texts of the runs, comma-separated."""
        return ", ".join(dict.fromkeys(filter(None, map(text, self.runs))))

    def curve(self, key: str) -> Curve:
        """Return the mean curve of the runs: at the steps that all of them have."""
        return [(step, _mean_and_deviation(values)[0]) for step, values in self._by_step(key)]

    def band(self, key: str) -> tuple[Curve, Curve] | None:
        """Return the curves of the mean less and plus one standard deviation; None for fewer than two runs."""
        if len(self.drawn) < 2:
            return None
        result = [(step, *_mean_and_deviation(values)) for step, values in self._by_step(key)]
        return [(x, mean - far) for x, mean, far in result], [(x, mean + far) for x, mean, far in result]

    def _by_step(self, key: str) -> list[tuple[float, list[float]]]:
        curves = [dict(run.curves.get(key, [])) for run in self.drawn]
        shared = set[float]().union(*curves).intersection(*curves)
        return [(step, [curve[step] for curve in curves]) for step in sorted(shared)]


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation of a sample, 0 for one value; neither is finite if a value is not."""
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))


def compared(runs: Sequence[RunDir]) -> list[Column]:
    """Return a column for each run in the order given; runs that differ by seed alone share one.

    Raises InputError for fewer than two runs, more than MOST columns, or a directory without a run.
    """
    if not 2 <= len({run.uri for run in runs}) == len(runs):
        raise _wrong_number()
    names = [run.name for run in runs]
    labels = [run.name if names.count(run.name) == 1 else redact(run.uri) for run in runs]
    jobs: dict[tuple[tuple[str, str], ...], list[ComparedRun]] = {}
    for run, label in zip(runs, labels, strict=True):
        read = _read(run, label)
        but_seed = tuple(
            item
            for item in read.job.items()
            if item[0] not in (NAME, SEED) and not item[0].startswith(NO_NUMBERS)
        )
        jobs.setdefault(but_seed, []).append(read)
        if len(jobs) > MOST:
            raise _wrong_number()
    columns = [column for same in jobs.values() for alike in _by_origin(same) for column in _columns(alike)]
    if len(columns) > MOST:
        raise _wrong_number()
    taken = [column.label for column in columns]
    return [
        column
        if taken.count(column.label) == 1
        else dataclasses.replace(column, label=f"{column.runs[0].label} and {len(column.runs) - 1} more")
        for column in columns
    ]


def _by_origin(runs: list[ComparedRun]) -> list[list[ComparedRun]]:
    """Return the runs of one job in groups of the same origins. What a run does not know is like any other."""
    different = [
        name for name in ORIGINS if len({run.origin[name] for run in runs if name in run.origin}) > 1
    ]
    result: dict[tuple[str, ...], list[ComparedRun]] = {}
    for run in runs:
        result.setdefault(tuple(run.origin.get(name, UNNAMED) for name in different), []).append(run)
    return list(result.values())


def _columns(runs: list[ComparedRun]) -> list[Column]:
    """Return the columns of runs of one job: one for the first run of each seed, and one for each further run."""
    first = {run.job[SEED]: run for run in reversed(runs)}
    again = [Column(run.label, (run,)) for run in runs if first[run.job[SEED]] is not run]
    if len(first) == 1:
        return [Column(runs[0].label, (runs[0],)), *again]
    runs = [run for run in runs if first[run.job[SEED]] is run]
    chains = {run.job[NAME].removesuffix(f"-{seed_name(int(run.job[SEED]))}") for run in runs}
    is_chain = len(chains) == 1 and not chains.intersection(run.job[NAME] for run in runs)
    label = chains.pop() if is_chain else f"{runs[0].label} and {len(runs) - 1} more"
    return [Column(label, tuple(runs)), *again]


def _wrong_number() -> InputError:
    problem = f"takes 2 to {MOST} different runs, and those that differ by seed alone count as one"
    return InputError(problem, "RUN", "name them, as in `compare runs/a runs/b`")


def _read(run: RunDir, label: str) -> ComparedRun:
    spec = read_job(run)
    if spec is None:
        raise InputError("there is no run here", run.uri, "give a run directory, such as runs/<name>")
    rows = totals_of(run)
    saved = run.read_json_or_empty("summary.json")
    extra = {"unigram_entropy": saved.get("unigram_entropy")}
    fields = summary(
        spec.summarised, run.read_json_or_empty("plan.json"), redact(run.rows(EVENTS)), rows, **extra
    )
    fields |= if_lost(run)
    curves: dict[str, Curve] = {key: list(rows.points[key]) for key in CHARTED}
    for evaluation in reversed(rows.evaluations):
        for name, metrics in evaluation["sets"].items():
            if "loss" in metrics:
                curves.setdefault(f"loss of {name}", []).append((float(evaluation["step"]), metrics["loss"]))
    document = spec.model_dump(
        mode="json", exclude={"tune"}
    )  # a run does not read how a search varies its job
    flat = {key: str(value) for key, value in flatten(redact(document))}
    drawn = {key: points for key, points in curves.items() if points}
    return ComparedRun(label, fields, flat, drawn, _origin(run, spec.data.samples is not None))


def _origin(run: RunDir, own_samples: bool) -> dict[str, str]:
    """Return a digest of each of ORIGINS that the newest commit knows; empty without a commit that can be read."""
    try:
        commit = Store(run.commits).latest(deep=False)
    except InputError:  # of a newer version
        return {}
    if commit is None:
        return {}
    origin = {name: commit.meta.get(key) for name, key in ORIGINS.items()}
    origin["weights of the teacher"] = teacher_of(commit.meta).get("digest")
    if own_samples:
        origin["digest of the data"] = None  # they may be drawn by the seed
    return {
        name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
        for name, value in origin.items()
        if value
    }


def losses(columns: Sequence[Column]) -> dict[str, Callable[[ComparedRun], float | None]]:
    """Return how to read each final loss of a run, by its name: of training, and of each held-out set."""
    runs = [run for column in columns for run in column.runs]
    sets = dict.fromkeys(name for run in runs for name in (run.found["evaluation"] or {}).get("sets", {}))

    def of_set(name: str) -> Callable[[ComparedRun], float | None]:
        return lambda run: (run.found["evaluation"] or {}).get("sets", {}).get(name, {}).get("loss")

    return {"loss": lambda run: run.found["final_loss"]} | {f"loss of {name}": of_set(name) for name in sets}


def facts(columns: Sequence[Column]) -> list[tuple[str, list[str]]]:
    """Return the figures of each column, one row a figure, without figures that no run has.

    The figures of several seeds are means. Losses have their standard deviation too.
    """
    units = (read_unit(run.found["objective"]) for column in columns for run in column.runs)
    read = " or ".join(dict.fromkeys(units))

    def mean(name: str, value: Callable[[ComparedRun], float | None], shown: Callable[[float], str]) -> Fact:
        spreads = [column.spread(value) for column in columns]
        return name, [
            "" if spread is None else shown(spread.mean) + column.of_fewer(spread)
            for column, spread in zip(columns, spreads, strict=True)
        ]

    def text(name: str, value: Callable[[ComparedRun], str]) -> Fact:
        return name, [column.texts(value) for column in columns]

    table = [
        text("state", lambda run: str(run.found["state"])),
        text("steps", lambda run: f"{run.found['step']} of {run.found['steps']}"),
        mean(read, lambda run: run.found["tokens"], count),
        *(
            (name, [_with_deviation(column, column.spread(value)) for column in columns])
            for name, value in losses(columns).items()
        ),
        mean(f"{read} per second", lambda run: run.found["measured"]["tokens_per_second"], count),
        mean("a step", lambda run: run.found["measured"]["step_seconds"], duration),
        mean("MFU", lambda run: run.found["mfu"], _share),
        mean("wall time", lambda run: run.found["ledger"]["wall_seconds"], duration),
        mean("goodput", lambda run: run.found["ledger"]["goodput"], _share),
        text("attempts", lambda run: str(run.found["attempts"])),
        text("layouts", lambda run: ", ".join(run.found["layouts"])),
        mean("cost", lambda run: run.found["cost_usd"], lambda usd: f"{usd:.2f} USD"),
        text("receipt", lambda run: str(run.found["receipt"] or "")[:16]),
    ]
    return [(name, values) for name, values in table if any(values)]


def as_json(columns: Sequence[Column]) -> dict[str, Any]:
    """Return the comparison as data: the summary of each run, the spread over seeds, and the keys that differ."""
    runs = [run for column in columns for run in column.runs]
    labels = [column.label for column in columns]
    result = {
        column.label: {
            "runs": {run.job[SEED]: run.label for run in column.runs},
            "final": {
                name: dataclasses.asdict(spread)
                for name, value in losses(columns).items()
                if (spread := column.spread(value)) is not None
            },
            "loss": [
                {"step": step, "mean": mean, "deviation": high - mean}
                for (step, mean), (_, high) in zip(column.curve("loss"), band[1], strict=True)
            ]
            if (band := column.band("loss"))
            else [],
        }
        for column in columns
        if len(column.runs) > 1
    }
    return {
        "runs": {run.label: run.found for run in runs},
        "differences": {key: dict(zip(labels, values, strict=True)) for key, values in differences(columns)},
        **({"seeds": result} if result else {}),
    }


def differences(columns: Sequence[Column]) -> list[Fact]:
    """Return the keys in which the job files or the origins differ, with the values of each column."""
    runs = [run for column in columns for run in column.runs]
    keys = dict.fromkeys(key for run in runs for key in run.job if key != NAME)
    origins = [name for name in ORIGINS if len({run.origin[name] for run in runs if name in run.origin}) > 1]
    values = (
        (key, [column.texts(lambda run, key=key: _value_of(run, key)) for column in columns])  # type: ignore[misc]
        for key in (*keys, *origins)
    )
    return [(key, texts) for key, texts in values if len(set(texts)) > 1]


def _value_of(run: ComparedRun, key: str) -> str:
    return (run.origin if key in ORIGINS else run.job).get(key, UNNAMED)


def alike(columns: Sequence[Column]) -> str:
    """Return what to say of job files without differences."""
    seeds = any(len(column.runs) > 1 for column in columns)
    return f"the job files are the same but for {'name and seed' if seeds else 'the name'}"


def on_terminal(columns: Sequence[Column], key: str = "loss") -> list[str]:
    """Return a curve of each column as a line of bars with common axes: the lowest bar is the minimum over all."""
    points = {column.label: column.curve(key) for column in columns}
    every = [point for curve in points.values() for point in curve if math.isfinite(point[1])]
    if not every:
        return []
    first = min(x for x, _ in every)
    last = max(x for x, _ in every)
    low = min(y for _, y in every)
    high = max(y for _, y in every)
    width = max(map(len, points))
    return [f"{label:<{width}}  {_bars(curve, first, last, low, high)}" for label, curve in points.items()]


def _bars(curve: Curve, first: float, last: float, low: float, high: float) -> str:
    cells: list[list[float]] = [[] for _ in range(WIDTH)]
    for x, y in curve:
        if math.isfinite(y):
            cells[min(int((x - first) / ((last - first) or 1.0) * WIDTH), WIDTH - 1)].append(y)
    shares = [((sum(of) / len(of)) - low) / ((high - low) or 1.0) if of else None for of in cells]
    if WIDTH // 4 <= len(curve) < WIDTH:  # without this, a short run's curve is a row of gaps
        shares = _filled(shares)
    return "".join(" " if s is None else BARS[round(s * (len(BARS) - 1))] for s in shares).rstrip()


def _filled(shares: Sequence[float | None]) -> list[float | None]:
    """Return the shares, with the one before in place of each missing one between two others."""
    end = max((index for index, share in enumerate(shares) if share is not None), default=0)
    result = list(shares)
    for index in range(1, end):
        if result[index] is None:
            result[index] = result[index - 1]
    return result


def page(columns: Sequence[Column]) -> str:
    """Return the comparison as a page."""
    content = {
        "labels": [column.title for column in columns],
        "states": [column.texts(lambda run: str(run.found["state"])) for column in columns],
        "runs": sum(len(column.runs) for column in columns),
        "alike": alike(columns),
        "facts": facts(columns),
        "differences": differences(columns),
        "plots": list(_plots(columns)),
    }
    return render("compare", content)


def _plots(columns: Sequence[Column]) -> list[dict[str, Any]]:
    drawn = []
    keys = dict.fromkeys(
        key for column in columns for run in column.runs for key in ("loss", *sorted(run.curves))
    )
    for key in keys:
        lines = {number: line for number, column in enumerate(columns) if (line := column.curve(key))}
        bands = {number: band for number in lines if (band := columns[number].band(key))}
        every = [*lines.values(), *(edge for band in bands.values() for edge in band)]
        size = WIDE if key == "loss" else LOW
        axes = charts.axes(
            (p for line in every for p in line), *size, from_zero=key in ("tokens_per_second", "grad_norm")
        )
        if axes is not None:
            objectives = [run.found["objective"] for number in lines for run in columns[number].runs]
            title, unit = _title(key, objectives)
            paths = [
                (number, charts.path(charts.thin(line), axes.x, axes.y)) for number, line in lines.items()
            ]
            areas = [(number, _area(*band, axes)) for number, band in bands.items()]
            drawn.append(
                {"key": key, "title": title, "unit": unit, "axes": axes, "lines": paths, "bands": areas}
            )
    return drawn


def _area(low: Curve, high: Curve, axes: charts.Axes) -> str:
    """Return the d of an SVG path around the area between two curves, of points where both are finite."""
    edges = [
        (below, above) for below, above in zip(low, high, strict=True) if math.isfinite(above[1] - below[1])
    ]
    around = [*charts.thin([above for _, above in edges]), *charts.thin([below for below, _ in edges])[::-1]]
    return f"{charts.path(around, axes.x, axes.y)}Z" if around else ""


def _title(key: str, objectives: Iterable[str]) -> tuple[str, str]:
    """Return the title of a plot, and the unit of its curves, or all units if runs differ."""
    if key == "grad_norm":
        return "Gradient norm", "before clipping"
    if key == "open_heads":
        return "Open heads", "attention heads whose gate is not 0"
    if key == "tokens_per_second":
        return "Speed", " or ".join(dict.fromkeys(f"{read_unit(each)} per second" for each in objectives))
    return key.capitalize(), " or ".join(dict.fromkeys(map(loss_unit, objectives)))


def _with_deviation(column: Column, spread: Spread | None) -> str:
    if spread is None:
        return ""
    deviation = f" ± {spread.deviation:.4f}" if spread.count > 1 else ""
    return f"{spread.mean:.4f}{deviation}{column.of_fewer(spread)}"


def _share(value: float) -> str:
    return f"{value:.1%}"
