"""What the clock of a step costs: blocks of steps with it and without it, in turns within one run.

    .venv/bin/python tests/bench/bench_step_clock.py [--steps 400] [--model gpt-tiny]

Ranks have a thread each, whose CPU time is measured. A ratio is of the medians; its spread is over ten parts of the
run. Counted is how often the clock is asked in a step, times what that takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import paths  # noqa: F401
from jobs import write_text
from prepared import prepare_here

from cluster.workers.gang import FINISHED, Bundle
from cluster.workers.process_gang import ProcessGang
from orchestrator.config.spec import parse
from orchestrator.parallel.layout import Layout
from orchestrator.train.task import Task

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"micro_batch": 4},
    "dp2 zero1": {"dp": 2, "zero": 1, "micro_batch": 4},
    "tp2": {"tp": 2, "micro_batch": 4},
    "pp2": {"pp": 2, "micro_batch": 4},
}
PARTS = 10


def main() -> None:
    """A row a layout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--model", default="gpt-tiny")
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    print(
        "| layout | CPU time of a step with it | without it | ratio | least and most of ten parts | counted |"
    )
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        text = write_text(Path(folder), 60_000)
        gang = ProcessGang()
        try:
            for name, fields in LAYOUTS.items():
                _row(name, _measured(gang, Path(folder), text, given, Layout(**fields)))
        finally:
            gang.close()


def _measured(gang: ProcessGang, folder: Path, text: str, given: Any, layout: Layout) -> dict[str, Any]:
    spec = parse(
        {
            "name": "clock",
            "workload": {"model": given.model},
            "data": {"sources": [{"uri": text}], "tokenizer": {"train_bpe": 512}, "sequence_length": 128},
            "train": {"steps": given.steps, "global_batch": 8},
            "checkpoint": {"export": None},
        }
    )
    data = prepare_here(spec, str(folder / "cache"))
    document, run = spec.model_dump(mode="json"), str(folder / "run")
    task = Task(document, layout.to_json(), run, data, 1, None, given.steps, False)
    gang.start(layout.world, Bundle(), "clock_rank:main", task.to_json())
    ranks = gang.poll(0).ranks
    while not all(rank.state in FINISHED for rank in ranks):
        time.sleep(0.1)
        ranks = gang.poll(0).ranks
    if ranks[0].state != "done":
        raise RuntimeError(ranks[0].error)
    return dict(ranks[0].result)


def _row(name: str, found: dict[str, Any]) -> None:
    seconds: list[list[float]] = found["steps"]

    def ratio(some: list[list[float]]) -> tuple[float, float, float]:
        on, off = (statistics.median(s for is_on, s in some if is_on == wanted) for wanted in (1.0, 0.0))
        return on / off, on, off

    size = len(seconds) // PARTS
    parts = [ratio(seconds[n * size : (n + 1) * size])[0] for n in range(PARTS)]
    whole, on, off = ratio(seconds)
    print(
        f"| {name} | {on * 1e3:.2f} ms | {off * 1e3:.2f} ms | {whole:.4f} | {min(parts):.3f} to {max(parts):.3f}"
        f" | {found['counted'] * 1e6:.0f} us, {found['counted'] / on:.3%} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
