"""Steps to a target loss: ASHA against random search, over the same trials.

    python tests/bench/bench_tune.py --seeds 5 --trials 9 --steps 54

Both searches of a seed draw the same learning rates (1e-5 to 1, uniform in the logarithm) and weight decays, and
train the same small decoder on real text, so a trial that ASHA stops is the beginning of one that random search
ends. The target is the loss, mean of 5 steps, that the best trial of the random search ends with, plus `--margin`;
steps are those of all trials of a search until one of them first reaches it, in the order in which they were done.
"not reached" counts as all steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from jobs import job, orchestrator, rows, write_job, write_text

WINDOW = 5


def search(folder: Path, text: str, seed: int, scheduler: str, options: argparse.Namespace) -> Path:
    """The directory of a search that has ended."""
    document: dict[str, Any] = job(text, steps=options.steps)
    document |= {"name": f"{scheduler}-{seed}", "seed": seed, "resources": {"workers": 1}}
    document["checkpoint"] = {"every": options.steps, "keep": 1, "export": None}
    document["tune"] = {
        "space": {
            "train.optimizer.lr": {"loguniform": [1e-5, 1.0]},
            "train.optimizer.weight_decay": {"uniform": [0.0, 0.3]},
        },
        "trials": options.trials,
        "window": WINDOW,
        "scheduler": scheduler,
    }
    if scheduler == "asha":
        document["tune"]["grace"] = options.steps // 9
    done = orchestrator("tune", write_job(folder, document), "--json", cwd=folder, timeout=1200)
    if done.returncode:
        raise SystemExit(done.stderr)
    return folder / "runs" / document["name"]


def curve(sweep: Path) -> list[tuple[float, float]]:
    """(time, smoothed loss) of every step of every trial, in the order of time."""
    found = []
    for path in sorted(sweep.glob("0*")):
        losses = rows(path)
        for n, row in enumerate(losses):
            recent = [r["loss"] for r in losses[max(0, n + 1 - WINDOW) : n + 1]]
            found.append((row["time"], statistics.fmean(recent)))
    return sorted(found)


def steps_to(points: list[tuple[float, float]], target: float) -> tuple[int, bool]:
    """Steps until the target is reached, and whether it was."""
    reached = next((n for n, (_, loss) in enumerate(points, start=1) if loss <= target), None)
    return (len(points), False) if reached is None else (reached, True)


def main() -> None:
    """Print a line a seed, and the ratio of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--steps", type=int, default=54)
    parser.add_argument("--margin", type=float, default=0.02)
    options = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = write_text(folder / "corpus")
        for seed in range(options.seeds):
            plain, asha = (search(folder, text, seed, kind, options) for kind in ("none", "asha"))
            target = json.loads((plain / "sweep.json").read_text())["best"]["value"] + options.margin
            (a, a_found), (b, b_found) = steps_to(curve(asha), target), steps_to(curve(plain), target)
            ratios.append(a / b)
            told = "" if a_found and b_found else "  not reached by " + ("asha" if b_found else "random")
            whole = f"{len(curve(asha))} of {len(curve(plain))} steps in all"
            print(
                f"seed {seed}: target {target:.3f}  asha {a}  random {b}  ratio {a / b:.2f}  {whole}{told}",
                flush=True,
            )
    print(f"ratio: median {statistics.median(ratios):.2f}, least {min(ratios):.2f}, most {max(ratios):.2f}")


if __name__ == "__main__":
    main()
