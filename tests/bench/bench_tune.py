"""Searches: ASHA against random search, PBT against fixed settings, and the seconds of a search beside plain Ray Tune.

    python tests/bench/bench_tune.py [asha] [pbt] [wall] --seeds 5

asha: both searches of a seed draw the same trials, over the keys of AdamW and as widely as someone would who knows
nothing, and train the same small decoder on real text, so a trial that ASHA leaves at a rung is the beginning of one
that random search ends. The target is the loss, mean of 10 steps, that the best trial of the random search ends with;
steps are those of all trials until one of them first reaches it, in the order in which they were done. "not reached"
counts as all steps of the random search. How early a good trial is drawn is luck, so steps are added up over the seeds.

pbt: a population at constant learning rates that PBT may change, and the same population left alone. The model is so
small, and a step of so few tokens, that the noise of the gradient soon sets how low a constant rate can come, so that a
schedule is needed. What is compared is the mean loss of the last 100 steps of the best trial of each, on the same
samples.

wall: seconds of whole commands in turns, ours and plain Ray Tune's with a function that trains the same model
(`plain_tune.py`): the same trials, two at a time, one core each, all to their end, Ray's start and end included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import paths  # noqa: F401
from jobs import job, orchestrator, rows, slow_job, write_job, write_text

WINDOW = 10
OPTIMIZER = "train.optimizer"
LR = f"{OPTIMIZER}.lr"


def main() -> None:
    """Measure what the command line names, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measures", nargs="*", default=["asha", "pbt", "wall"])
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        text = write_text(Path(name) / "corpus", 1_000_000)
        for measure in options.measures:
            {"asha": asha, "pbt": pbt, "wall": wall}[measure](Path(name), text, options.seeds)


def search(folder: Path, document: dict[str, Any], name: str) -> Path:
    """The directory of a search that has ended."""
    document = {**document, "name": name, "resources": {"workers": 1}}
    done = orchestrator("tune", write_job(folder, document), "--json", cwd=folder, timeout=1200)
    if done.returncode:
        raise SystemExit(done.stderr)
    return folder / "runs" / name


def best_of(sweep: Path) -> float:
    """The best trial's value."""
    return float(json.loads((sweep / "sweep.json").read_text())["best"]["value"])


def asha(folder: Path, text: str, seeds: int, trials: int = 40, steps: int = 640) -> None:
    """A line a seed, and the ratio of all."""
    sums = []
    for seed in range(seeds):
        document = {**job(text, steps=steps), "seed": seed}
        document["train"]["optimizer"] = {"warmup": 10}
        document["checkpoint"] = {"every": steps, "keep": 1, "export": None}
        space = {
            LR: {"loguniform": [1e-5, 1e-1]},
            f"{OPTIMIZER}.weight_decay": {"uniform": [0.0, 0.3]},
            f"{OPTIMIZER}.betas": {
                "choice": [[0.8, 0.9], [0.9, 0.95], [0.9, 0.99], [0.95, 0.98], [0.98, 0.999]]
            },
        }
        document["tune"] = {"space": space, "trials": trials, "window": WINDOW}
        plain = search(folder, document, f"random-{seed}")
        document["tune"] |= {"scheduler": "asha"}
        stopping = search(folder, document, f"asha-{seed}")
        target = best_of(plain) + 1e-9
        b, _ = steps_to(curve(plain), target)
        a, a_found = steps_to(curve(stopping), target)
        a = a if a_found else len(curve(plain))
        sums.append((a, b))
        told = "" if a_found else "  not reached by asha"
        whole = f"{len(curve(stopping))} of {len(curve(plain))} steps in all"
        print(
            f"seed {seed}: target {target:.3f}  asha {a}  random {b}  ratio {a / b:.2f}  {whole}{told}",
            flush=True,
        )
    ours, theirs = (sum(steps) for steps in zip(*sums, strict=True))
    print(f"all seeds together: asha {ours}, random {theirs}, ratio {ours / theirs:.2f}")


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


def pbt(folder: Path, text: str, seeds: int, trials: int = 6, steps: int = 3000) -> None:
    """A line a seed."""
    print("| seed | best of the fixed | its learning rate | best of PBT | exploits |\n|---|---|---|---|---|")
    for seed in range(seeds):
        document = {**job(text, steps=steps, global_batch=1), "seed": seed}
        document["workload"]["changes"] = {"hidden": 16, "layers": 1, "heads": 4, "intermediate": 32}
        document["train"]["optimizer"] = {"warmup": 100, "schedule": "constant"}
        document["checkpoint"] = {"every": steps // 10, "keep": 1, "export": None}
        document["tune"] = {"space": {LR: {"loguniform": [1e-4, 3e-2]}}, "trials": trials, "window": 100}
        fixed = search(folder, document, f"fixed-{seed}")
        document["tune"] |= {"scheduler": "pbt"}
        changing = search(folder, document, f"pbt-{seed}")
        lr = json.loads((fixed / "sweep.json").read_text())["best"]["config"][LR]
        exploits = json.loads((changing / "sweep.json").read_text())["exploits"]
        print(
            f"| {seed} | {best_of(fixed):.3f} | {lr:.1e} | {best_of(changing):.3f} | {exploits} |", flush=True
        )


def wall(folder: Path, text: str, seeds: int, trials: int = 8, steps: int = 60) -> None:
    """A line a round, and the ratio of all."""
    document = slow_job(text, steps=steps)
    document["checkpoint"] = {"every": steps, "keep": 1, "export": None}
    document["data"]["cache"] = str(folder / "tokens")
    space = {LR: {"loguniform": [1e-5, 1e-2]}, "train.optimizer.weight_decay": {"uniform": [0.0, 0.3]}}
    document["tune"] = {"space": space, "trials": trials, "concurrency": 2}
    path = write_job(folder, {**document, "tune": None}, "plain.yaml")
    ratios = []
    for number in range(seeds + 1):
        began = time.monotonic()
        ours = search(folder, document, f"wall-{number}")
        middle = time.monotonic()
        drawn = [row["config"] for row in rows(ours, "trials.jsonl") if row["event"] == "drawn"]
        points = folder / "points.json"
        points.write_text(json.dumps([list(config.values()) for config in drawn]))
        words = [path, folder / f"plain-{number}", 512, 2, points]
        peer = [sys.executable, str(Path(__file__).with_name("plain_tune.py")), *map(str, words)]
        started = time.monotonic()
        done = subprocess.run(peer, env={**os.environ, **PATHS}, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            raise SystemExit(done.stderr)
        mine, theirs = middle - began, time.monotonic() - started
        if number:  # the first round made the token shards
            ratios.append(mine / theirs)
            print(f"round {number}: ours {mine:.1f} s  plain Ray Tune {theirs:.1f} s", flush=True)
    print(f"ratio: median {statistics.median(ratios):.2f}, least {min(ratios):.2f}, most {max(ratios):.2f}")


PATHS = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}

if __name__ == "__main__":
    main()
