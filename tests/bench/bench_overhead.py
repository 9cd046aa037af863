"""What orchestration costs a step: the same rank program under `orchestrator run` and under bare torchrun.

Pairs run in turn, A B, B A, ..., with the same threads per rank, the same data, layout and seed. A step's time is the
distance between the ends of neighbouring steps, so it holds all that happens between them; the first steps of a
run, which warm up, are left out. The commits of both write to the same disk.

    python tests/bench/bench_overhead.py --pairs 5
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import paths  # noqa: F401
import yaml
from jobs import command, rows, write_text

WARM_UP = 10


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = _write_job(folder, options.steps)
        ours, theirs = [], []
        _orchestrated(folder, path)  # prepares the data, and warms the disk's cache
        for pair in range(options.pairs):
            order = [(_orchestrated, ours), (_bare, theirs)]
            for measure, found in order if pair % 2 == 0 else reversed(order):
                found.append(measure(folder, path))
            print(f"pair {pair + 1}: {ours[-1] * 1e3:.1f} ms and {theirs[-1] * 1e3:.1f} ms", file=sys.stderr)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    print("| step | median | least | most |\n|---|---|---|---|")
    for label, values, unit in (
        ("orchestrated", ours, "ms"),
        ("bare torchrun", theirs, "ms"),
        ("ratio", ratios, ""),
    ):
        shown = [statistics.median(values), min(values), max(values)]
        cells = [f"{value * 1e3:.1f} ms" if unit else f"{value:.3f}" for value in shown]
        print(f"| {label} | {' | '.join(cells)} |")


def _write_job(folder: Path, steps: int) -> Path:
    text = write_text(folder / "corpus", 600_000)
    document = {
        "name": "overhead",
        "workload": {"model": "gpt-tiny"},
        "data": {"sources": [{"uri": text}], "tokenizer": {"train_bpe": 4096}, "sequence_length": 128},
        "train": {"steps": steps, "global_batch": 16},
        "resources": {"workers": 2},
        "checkpoint": {"every": 20, "export": None},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def _orchestrated(folder: Path, path: Path) -> float:
    run = folder / "runs" / "overhead"
    shutil.rmtree(run, ignore_errors=True)
    subprocess.run(command("run", path), cwd=folder, check=True, capture_output=True)
    return _step_seconds(run / "metrics.jsonl")


def _bare(folder: Path, path: Path) -> float:
    """The task of the last orchestrated run, in a fresh run directory, under torchrun."""
    from orchestrator.config.paths import resolve_paths
    from orchestrator.config.spec import load
    from orchestrator.launch import preflight_cache
    from orchestrator.train.task import Task

    plan = json.loads((folder / "runs/overhead/plan.json").read_text())["chosen"]
    plan.pop("text")
    spec = resolve_paths(load(path), folder)
    data = next(path for path in (folder / "runs/_data").iterdir() if path.name != preflight_cache.FOLDER)
    bare = folder / "bare"
    shutil.rmtree(bare, ignore_errors=True)
    bare.mkdir()
    job = spec.model_dump(mode="json")
    task = Task(job, plan, str(bare), str(data), 1, None, spec.train.steps, token="bench")
    (folder / "task.json").write_text(json.dumps(task.to_json()))
    script = Path(__file__).with_name("torchrun_rank.py")
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    words += [str(script), str(folder / "task.json"), str(bare / "metrics.jsonl")]
    subprocess.run([sys.executable, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return _step_seconds(bare / "metrics.jsonl")


def _step_seconds(path: Path) -> float:
    """Mean seconds per step after the warm-up, commits included."""
    found = rows(path.parent, path.name)[WARM_UP:]
    return (found[-1]["time"] - found[0]["time"]) / (len(found) - 1)


if __name__ == "__main__":
    main()
