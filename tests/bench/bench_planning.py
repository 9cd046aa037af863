"""Predicted against measured step time of random small jobs on this machine's processors, after a calibration, beside
how far the same job is from itself.

Models of 0.1 to 10 million parameters, one and two processes, data, tensor and pipeline parallelism, ZeRO 0 to 3. Two
jobs at a time are measured in turns, each twice: what lies between the two times of a job is the floor below which no
prediction can be told right from wrong. Run it with `make bench-planner`, or `python tests/bench/bench_planning.py
MINUTES SEED`, where nothing else runs. Each process has one thread.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import paths  # noqa: F401

from orchestrator.planning.layout import Layout
from orchestrator.verify.calibrate import calibrate, measured, predicted, predicted_with

LAYOUTS = (
    Layout(), Layout(recompute="full"), Layout(dp=2), Layout(dp=2, zero=1), Layout(dp=2, zero=3), Layout(tp=2),
    Layout(tp=2, sequence=True), Layout(pp=2), Layout(pp=2, schedule="gpipe"), Layout(pp=2, schedule="interleaved"),
)  # fmt: skip


def main(minutes: int = 12, seed: int = 19) -> None:
    """Calibrate, measure for so many minutes, and print each job with its error, and the errors' percentiles."""
    ends, rng = time.monotonic() + 60 * minutes, random.Random(seed)
    machine = calibrate().machine("fp32")
    apart: dict[str, list[float]] = {"least": [], "median": []}
    wrong: dict[str, list[float]] = {"least": [], "median": []}
    longest = 0.0
    while time.monotonic() + longest < ends:
        began = time.monotonic()
        pair = [next(_legal(rng)) for _ in range(2)]
        rounds = [[_times(asked, layout) for asked, layout in pair] for _ in range(2)]
        longest = max(longest, time.monotonic() - began)
        for (asked, layout), first, second in zip(pair, *rounds, strict=True):
            said, line = predicted(machine, asked, layout), []
            for name, one, other in zip(("least", "median"), first, second, strict=True):
                real = (one + other) / 2
                apart[name].append(abs(one - other) / real)
                wrong[name].append(abs(said / real - 1))
                line.append(f"{name} {one:.4f} and {other:.4f} ({said / real - 1:+.0%})")
            sizes = (
                f"{asked['hidden']:4} x {asked['layers']}, {asked['length']:3} tokens x {asked['batch']:2}"
            )
            print(f"{sizes}, {layout!s:36} predicted {said:.4f}, {', '.join(line)}", flush=True)
    for name in apart:
        print(f"{len(apart[name])} jobs, {name}: apart from itself {_told(apart[name])}")
        print(f"{len(wrong[name])} jobs, {name}: predicted {_told(wrong[name])}")


def _legal(rng: random.Random) -> Iterator[tuple[dict[str, Any], Layout]]:
    while True:
        asked, layout = drawn(rng)
        shape, batch, _ = predicted_with(asked)
        if not layout.problems(shape, batch):
            yield asked, layout


def _times(asked: dict[str, Any], layout: Layout) -> tuple[float, float]:
    """The least and the median of a job's steps."""
    least, median, *_ = measured(layout.world, {"steps": [{"job": asked, "layout": layout.to_json()}]})[
        "steps"
    ][0]
    return least, median


def _told(errors: list[float]) -> str:
    ranked = sorted(errors)
    high = ranked[min(int(0.95 * len(ranked)), len(ranked) - 1)]
    return f"mean {statistics.mean(ranked):.1%}, median {statistics.median(ranked):.1%}, p95 {high:.1%}"


def drawn(rng: random.Random) -> tuple[dict[str, Any], Layout]:
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
