"""What a snapshot at every step costs a step: runs with and without, in turns, on simulated nodes.

    python tests/bench/bench_snapshot_step.py                  # one rank, 12 MB of state, some 100 ms a step
    python tests/bench/bench_snapshot_step.py --hidden 256     # 40 MB, longer steps

One rank of one thread trains on one node, and another node holds the copies. So on two processors the process that
writes and the other node's server have one for themselves, as the processors of a node with GPUs. A step is the time
between the ends of neighbouring steps, so it holds all that happens between them; the first steps, which warm up, are
left out. Pairs of runs take turns, A B, B A and so on. Give it a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import paths  # noqa: F401
from jobs import rows, slow_job, write_text
from simulated_nodes import run_on_nodes

WARM_UP = 10


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--batch", type=int, default=8, help="samples of 128 tokens in a step")
    options = parser.parse_args()
    found: dict[int, list[float]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = write_text(folder / "corpus")
        for pair in range(options.pairs):
            for every in sorted(found, reverse=pair % 2 == 1):
                found[every].append(_step(folder, f"run-{pair}-{every}", text, every, options))
            print(
                f"pair {pair + 1}: {1e3 * found[0][-1]:.1f} and {1e3 * found[1][-1]:.1f} ms", file=sys.stderr
            )
    ratios = [kept / plain for plain, kept in zip(found[0], found[1], strict=True)]
    print("| | median | least | most |\n|---|---|---|---|")
    for label, values, unit in (
        ("step without snapshots, ms", found[0], 1e3),
        ("step with a snapshot at every step, ms", found[1], 1e3),
        ("ratio", ratios, 1.0),
    ):
        numbers = [unit * statistics.median(values), unit * min(values), unit * max(values)]
        print(f"| {label} | " + " | ".join(f"{number:.3f}" for number in numbers) + " |")


def _step(folder: Path, name: str, text: str, every: int, options: argparse.Namespace) -> float:
    """Return the median seconds of a step of a run, in which each step was kept if `every` is 1."""
    document: dict[str, Any] = slow_job(text, steps=options.steps)
    width = options.hidden
    document["workload"]["changes"] |= {"hidden": width, "intermediate": 4 * width}
    document["train"]["global_batch"] = options.batch
    document["resources"] = {"workers": {"min": 1, "max": 1}}
    document["checkpoint"] = {
        "every": 100_000, "keep": 1, "export": None, "snapshot_every": every if every else None,
    }  # fmt: skip
    summary, _, _ = run_on_nodes(document, str(folder / name), folder / "cache")
    assert summary["state"] == "done", summary
    there = rows(folder / name, "metrics.jsonl")
    ends = [row["time"] for row in there]
    assert len(ends) == options.steps
    assert all(bool(row["commit_seconds"]) == bool(every) for row in there[:-1]), "other snapshots than meant"
    return statistics.median(b - a for a, b in zip(ends[WARM_UP:-1], ends[WARM_UP + 1 :], strict=True))


if __name__ == "__main__":
    main()
