"""Predicted against measured step time of random small jobs on this machine's processors, after a calibration, beside
how far the same job is from itself.

Models of 0.1 to 10 million parameters, one and two processes, data, tensor and pipeline parallelism, ZeRO 0 to 3. A few
jobs at a time are measured in turns, GANGS times by processes of their own: a prediction is held against the median of
their median steps. What lies between the first two of these is the floor below which no prediction can be told right
from wrong. Run it with `make bench-planner`, or `python tests/bench/bench_planning.py MINUTES SEED`, where nothing else
runs. Each process has one thread.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import paths  # noqa: F401

from orchestrator.parallel.layout import Layout
from orchestrator.verify.calibrate import calibrate, measured, predicted, predicted_with

LAYOUTS = (
    Layout(), Layout(recompute="full"), Layout(dp=2), Layout(dp=2, zero=1), Layout(dp=2, zero=3), Layout(tp=2),
    Layout(tp=2, sequence=True), Layout(pp=2), Layout(pp=2, schedule="gpipe"), Layout(pp=2, schedule="interleaved"),
)  # fmt: skip
GANGS, TOGETHER = 3, 6
"""How often each job is measured, and how many take turns."""
Asked = tuple[dict[str, Any], Layout]


def main(minutes: int = 12, seed: int = 19) -> None:
    """Calibrate, measure for so many minutes, and print each job with its error, and the errors' percentiles."""
    ends, rng = time.monotonic() + 60 * minutes, random.Random(seed)
    machine = calibrate().machine("fp32")
    apart, wrong = list[float](), list[float]()
    longest = 0.0
    while time.monotonic() + longest < ends:
        began = time.monotonic()
        jobs = [next(_legal(rng)) for _ in range(TOGETHER)]
        turns = [_seconds(jobs) for _ in range(GANGS)]
        longest = max(longest, time.monotonic() - began)
        for (asked, layout), times in zip(jobs, zip(*turns, strict=True), strict=True):
            said, real = predicted(machine, asked, layout), statistics.median(times)
            apart.append(abs(times[0] - times[1]) / real)
            wrong.append(abs(said / real - 1))
            sizes = f"{asked['hidden']:4} x {asked['layers']}, vocabulary {asked['vocab_size']:4}"
            what = f"{sizes}, {asked['length']:3} tokens x {asked['batch']}, {layout!s:36}"
            seen = ", ".join(f"{each:.4f}" for each in times)
            print(f"{what} predicted {said:.4f}, measured {seen} ({said / real - 1:+.0%})", flush=True)
    print(f"{len(apart)} jobs: apart from itself {_told(apart)}")
    print(f"{len(wrong)} jobs: predicted {_told(wrong)}")


def _legal(rng: random.Random) -> Iterator[Asked]:
    while True:
        asked, layout = drawn(rng)
        shape, batch, _ = predicted_with(asked)
        if not layout.problems(shape, batch):
            yield asked, layout


def _seconds(jobs: Sequence[Asked]) -> list[float]:
    """The median step of each job: those of one process, and those of two, by the same processes."""
    found = dict[int, float]()
    for world in sorted({layout.world for _, layout in jobs}):
        here = [n for n, (_, layout) in enumerate(jobs) if layout.world == world]
        asked = [{"job": jobs[n][0], "layout": jobs[n][1].to_json()} for n in here]
        for n, (_, median, *_) in zip(here, measured(world, {"steps": asked})["steps"], strict=True):
            found[n] = median
    return [found[n] for n in range(len(jobs))]


def _told(errors: list[float]) -> str:
    ranked = sorted(errors)
    high = ranked[min(int(0.95 * len(ranked)), len(ranked) - 1)]
    return f"mean {statistics.mean(ranked):.1%}, median {statistics.median(ranked):.1%}, p95 {high:.1%}"


def drawn(rng: random.Random) -> Asked:
    """A random job and a layout for it, which may be illegal."""
    hidden = rng.choice((64, 128, 192, 256, 384))
    asked = {
        "hidden": hidden, "layers": rng.randint(2, 6), "heads": 4, "intermediate": 4 * hidden,
        "vocab_size": rng.choice((512, 1024, 4096)), "length": rng.choice((64, 128, 256)),
        "batch": rng.choice((2, 4, 8)),
    }  # fmt: skip
    chosen = rng.choice(LAYOUTS)
    micro = max(rng.choice((1, 2, 4)) // chosen.pp, 1)
    return asked, Layout(**{**chosen.to_json(), "micro_batch": micro})


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
