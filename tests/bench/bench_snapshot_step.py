"""What a snapshot costs a step: runs in which every fifth step is followed by one, so that the others are the measure.

    python tests/bench/bench_snapshot_step.py                  # 11 MB of state in 205 tensors, some 120 ms a step
    python tests/bench/bench_snapshot_step.py --hidden 256     # 40 MB, longer steps
    python tests/bench/bench_snapshot_step.py --threads 2      # a rank that takes all of two processors

One rank trains on one node, and another node holds the copies. With one thread on two processors the process that
writes and the other node's server have one for themselves, as the processors of a node with GPUs. The cost is what the
step with the snapshot and the two after it, while the copy travels, take longer than the two after those. Steps that
take turns within a run see the same machine; runs of their own differ by more than a snapshot costs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import paths  # noqa: F401
from jobs import rows, slow_job, write_text
from simulated_nodes import run_on_nodes

WARM_UP = 10
EVERY = 5
"""Steps from one snapshot to the next."""
UNDISTURBED = (3, 4)
"""Steps after a snapshot at which its copy has arrived."""


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--threads", type=int, default=1, help="of the rank")
    parser.add_argument("--batch", type=int, default=12, help="samples of 128 tokens in a step")
    options = parser.parse_args()
    print("| run | step | blocked by a snapshot | longer step and following ones | share of a step |")
    print("|---|---|---|---|---|")
    shares = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = write_text(folder / "corpus")
        for run in range(options.runs):
            step, blocked, longer = _run(folder, f"run-{run}", text, options)
            shares.append(longer / step)
            print(
                f"| {run + 1} | {1e3 * step:.1f} ms | {1e3 * blocked:.2f} ms | {1e3 * longer:.2f} ms "
                f"| {100 * shares[-1]:.1f} % |",
                flush=True,
            )
    print(f"| median | | | | {100 * statistics.median(shares):.1f} % |")


def _run(folder: Path, name: str, text: str, options: argparse.Namespace) -> tuple[float, float, float]:
    """Train, and return the seconds of an undisturbed step, of the wait for a snapshot, and of all that it costs."""
    document: dict[str, Any] = slow_job(text, steps=options.steps)
    width = options.hidden
    document["workload"]["changes"] |= {"hidden": width, "intermediate": 4 * width}
    document["train"]["global_batch"] = options.batch
    document["resources"] = {"workers": {"min": 1, "max": 1}, "per_worker": {"cpu": options.threads}}
    document["checkpoint"] = {"every": 100_000, "keep": 1, "export": None, "snapshot_every": EVERY}
    summary, _, _ = run_on_nodes(document, str(folder / name), folder / "cache")
    assert summary["state"] == "done", summary
    metrics = rows(folder / name, "metrics.jsonl")
    seconds: dict[int, list[float]] = {after: [] for after in range(EVERY)}
    waits = []
    for before, row in zip(metrics[WARM_UP:-2], metrics[WARM_UP + 1 : -1], strict=True):
        after = row["step"] % EVERY
        assert bool(row["commit_seconds"]) == (after == 0), "other snapshots than meant"
        seconds[after].append(row["time"] - before["time"])
        waits += [row["commit_seconds"]] if after == 0 else []
    step = statistics.median(value for after in UNDISTURBED for value in seconds[after])
    longer = sum(
        statistics.median(values) - step for after, values in seconds.items() if after not in UNDISTURBED
    )
    return step, statistics.median(waits), longer


if __name__ == "__main__":
    main()
