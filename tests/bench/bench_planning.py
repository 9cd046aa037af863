"""Predicted against measured step time of random small jobs on this machine's processors, after a calibration.

Models of 0.1 to 10 million parameters, one and two processes, data, tensor and pipeline parallelism, ZeRO 0 to 3. Run
it with `python tests/bench/bench_planning.py JOBS SEED`. Each process has one thread; what else runs here is in the
figures.
"""

from __future__ import annotations

import random
import statistics
import sys
from typing import Any

import paths  # noqa: F401

from orchestrator.planning.layout import Layout
from orchestrator.verify.calibrate import calibrate, measured, predicted, predicted_with

LAYOUTS = (
    Layout(), Layout(recompute="full"), Layout(dp=2), Layout(dp=2, zero=1), Layout(dp=2, zero=3), Layout(tp=2),
    Layout(tp=2, sequence=True), Layout(pp=2), Layout(pp=2, schedule="gpipe"), Layout(pp=2, schedule="interleaved"),
)  # fmt: skip


def main(count: int = 20, seed: int = 19) -> None:
    """Calibrate, measure, and print each job with its error, and the errors' percentiles."""
    machine = calibrate().machine("fp32")
    rng, errors = random.Random(seed), []
    while len(errors) < count:
        asked, layout = drawn(rng)
        shape, batch, _ = predicted_with(asked)
        if layout.problems(shape, batch):
            continue
        config = {"steps": [{"job": asked, "layout": layout.to_json()}]}
        least, median, _ = measured(layout.world, config)["steps"][0]
        said = predicted(machine, asked, layout)
        errors.append((abs(said / least - 1), abs(said / median - 1)))
        print(
            f"{asked['hidden']:4} x {asked['layers']}, {asked['length']:3} tokens x {asked['batch']:2}, "
            f"{layout!s:36} predicted {said:.4f}, least {least:.4f} ({said / least - 1:+.0%}), "
            f"median {median:.4f} ({said / median - 1:+.0%})",
            flush=True,
        )
    for name, found in zip(("least", "median"), zip(*errors, strict=True), strict=True):
        ranked = sorted(found)
        print(
            f"against the {name}: mean {statistics.mean(ranked):.1%}, median {statistics.median(ranked):.1%}, "
            f"p95 {ranked[min(int(0.95 * len(ranked)), len(ranked) - 1)]:.1%}"
        )


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
