"""The layout that is chosen for small jobs on this machine's processors, after a calibration, beside the fastest of all
that are legal on one and two of them, each really run.

    python tests/bench/bench_brute_force.py [the first job] [the last]

All layouts of a job take turns for ROUNDS rounds. The one whose steps had the least median is the fastest, which among
so many is luck too: so it then runs in turns with the chosen one and with the chosen one again, and the ratio is of
that. How far the chosen one is from its twin is what the machine's noise makes of no difference at all. Run it with
`make bench-planner`, where nothing else runs. Each process has one thread.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import paths  # noqa: F401

from cluster.workers.gang import Bundle
from cluster.workers.run_local_gang import run_to_the_end
from orchestrator.config.spec import JobSpec, parse
from orchestrator.parallel.engine_rules import engine_problems
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.parallel.legal_layouts import legal
from orchestrator.planner.candidates import MICRO_BATCHES
from orchestrator.planner.choose_layout import plan, predict
from orchestrator.planner.demand import demand_of
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.verify.calibrate import calibrate
from workloads.describe import describe

VOCABULARY, LENGTH = 1024, 128
ROUNDS, DUELS = 4, 8
"""How often all layouts take turns, and then the fastest and the chosen one."""
JOBS: tuple[tuple[str, dict[str, Any], str, int], ...] = (
    ("gpt-tiny", {"hidden": 128, "layers": 4, "heads": 4, "intermediate": 512}, "fp32", 8),
    ("llama-tiny", {"hidden": 256, "layers": 2, "heads": 8, "kv_heads": 4, "intermediate": 768}, "fp32", 4),
    ("gpt-tiny", {"hidden": 192, "layers": 3, "heads": 4, "intermediate": 768}, "bf16", 4),
    ("mixtral-tiny", {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2}, "fp32", 4),
    ("qwen3-tiny", {"hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 192}, "fp32", 2),
    *(
        (model, {"hidden": hidden, "layers": layers, "heads": 4}, precision, batch)
        for model, hidden, layers, precision, batch in (
            ("gpt-tiny", 64, 2, "fp32", 2),
            ("gpt-tiny", 256, 2, "fp32", 2),
            ("gpt-tiny", 384, 2, "fp32", 4),
            ("gpt-tiny", 256, 2, "bf16", 2),
            ("gpt-tiny", 384, 4, "bf16", 4),
            ("llama-tiny", 64, 4, "fp32", 4),
            ("llama-tiny", 128, 4, "bf16", 2),
            ("llama-tiny", 384, 2, "fp32", 2),
            ("llama-tiny", 384, 2, "bf16", 4),
            ("qwen3-tiny", 128, 2, "fp32", 4),
            ("qwen3-tiny", 256, 2, "bf16", 2),
            ("qwen3-tiny", 192, 4, "fp32", 2),
            ("mixtral-tiny", 64, 2, "fp32", 2),
            ("mixtral-tiny", 256, 2, "fp32", 2),
            ("mixtral-tiny", 128, 2, "bf16", 4),
        )
    ),
)
"""Model, its changes, precision and batch."""


def main(first: int = 1, last: int = len(JOBS)) -> None:
    """Calibrate, measure those jobs, and print a table in Markdown."""
    profile = calibrate()
    print("| job | layouts | chosen | fastest | chosen / fastest | chosen / itself | error, median |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for model, changes, precision, batch in JOBS[first - 1 : last]:
        document: dict[str, Any] = {
            "name": "brute-force",
            "workload": {"model": model, "changes": {"max_positions": LENGTH, **changes}},
            "data": {"sources": [{"uri": "none"}], "tokenizer": "none", "sequence_length": LENGTH},
            "train": {"steps": 1000, "global_batch": batch, "precision": precision},
            "resources": {"workers": {"min": 1, "max": 2}},
        }
        spec = parse(document)
        config = dataclasses.replace(describe(model, spec.workload.changes), vocab_size=VOCABULARY)
        shape, machine = model_shape(config, LENGTH), profile.machine(precision)
        chosen = plan(demand_of(spec), shape, 2, machine).chosen.layout
        layouts = list(dict.fromkeys([chosen, *_every(spec, shape)]))
        medians = [statistics.median(times) for times in seconds_of(document, layouts, ROUNDS)]
        said = [predict(demand_of(spec), shape, layout, machine).seconds for layout in layouts]
        ranked = sorted(zip(medians, said, map(str, layouts), strict=True))
        for median, prediction, text in ranked:
            print(f"  {text:40} {median:.4f} s, predicted {prediction:.4f}", file=sys.stderr, flush=True)
        fastest = layouts[medians.index(min(medians))]
        one, other, best = map(statistics.median, seconds_of(document, [chosen, chosen, fastest], DUELS))
        error = statistics.median(abs(a / b - 1) for a, b in zip(said, medians, strict=True))
        sizes = f"{model} {changes['hidden']} x {changes['layers']}, {precision}, batch {batch}"
        ratio = f"{(one + other) / 2 / best:.2f} | {max(one, other) / min(one, other):.2f}"
        print(f"| {sizes} | {len(layouts)} | {chosen} | {fastest} | {ratio} | {error:.0%} |", flush=True)


def _every(spec: JobSpec, shape: ModelShape) -> list[Layout]:
    """Every layout that is legal on one or two ranks, without recomputation, which only takes longer."""
    batch = spec.train.global_batch
    micros = [micro for micro in MICRO_BATCHES if micro <= batch]
    every = [layout for world in (1, 2) for layout in legal(shape, world, batch, micros)]
    return [
        layout
        for layout in every
        if not engine_problems(spec.train, spec.workload, spec.resources.per_worker.gpu, layout)
    ]


def seconds_of(document: dict[str, Any], layouts: Sequence[Layout], rounds: int) -> list[list[float]]:
    """Seconds of the steps of each of these layouts. Those of one rank and those of two are in gangs of their own,
    which take turns too."""
    found: list[list[float]] = [[] for _ in layouts]
    for _ in range(2):
        for world in sorted({layout.world for layout in layouts}):
            numbers = [n for n, layout in enumerate(layouts) if layout.world == world]
            config = {
                "job": document, "vocabulary": VOCABULARY, "rounds": -(-rounds // 2),
                "layouts": [layouts[n].to_json() for n in numbers],
            }  # fmt: skip
            times = run_to_the_end(world, Bundle(1), "brute_force_rank:main", config, 600.0, "measurement")[1]
            for number, some in zip(numbers, times, strict=True):
                found[number].extend(some)
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
