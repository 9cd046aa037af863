"""Predicted against measured seconds of a GRPO step: generation, rewards, training, and the transfer of weights.

    python tests/bench/bench_rollout_plan.py [rounds] [steps]

It calibrates this machine first, then plans and runs each shape, in turns in every round, with one thread a process.
Run it where nothing else runs: two rounds take some five minutes. A row shows the median over the steps of all rounds,
without the first two steps of a run. Prompts and answers have the lengths that `plan` takes them to have, the longest.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import paths  # noqa: F401
from jobs import orchestrator, rows, write_job
from tokenizers import Tokenizer, models, pre_tokenizers

PARTS = ("transfer", "generate", "reward", "train")
WARM = 2
"""Steps at the begin of a run that are left out."""
TINY = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 384}
SMALL = {"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 768}
Shape = tuple[dict[str, Any], int, dict[str, Any]]
SHAPES: dict[str, Shape] = {
    "hidden 128, vocabulary 500, one rank": (TINY, 500, {"workers": 1}),
    "the same, bitwise": (TINY, 500, {"workers": 1, "bitwise": True}),
    "hidden 256, vocabulary 2,000, two ranks": (SMALL, 2000, {"workers": 2}),
    "the same, a rank and a rollout worker": (SMALL, 2000, {"workers": 1, "rollout_workers": 1}),
}
"""Changes of the model, size of the vocabulary, and who works."""
LENGTH, ANSWER, GROUP, BATCH = 96, 48, 8, 64


def write_data(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer of so many words, and prompts that leave room for exactly the longest answer."""
    words = ["[PAD]", "<|endoftext|>", *(f"w{number}" for number in range(vocabulary - 2))]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[PAD]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(words[:2])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    count = 2 * LENGTH  # longer than there is room for, so that all prompts are cut to the same length
    lines = (
        {"question": " ".join(f"w{(number + place) % (vocabulary - 2)}" for place in range(count))}
        for number in range(400)
    )
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def job_of(folder: Path, shape: Shape, steps: int) -> dict[str, Any]:
    """Return the job of a shape."""
    changes, _, who = shape
    micro_batch = BATCH // 8
    train: dict[str, Any] = {"steps": steps, "global_batch": BATCH, "optimizer": {"lr": 1e-4}}
    if who.get("bitwise"):
        train |= {"determinism": "bitwise", "virtual_shards": 8}
    return {
        "name": "job",
        "workload": {"model": "llama-tiny", "objective": "grpo", "changes": changes},
        "data": {
            "sources": [{"uri": str(folder / "prompts.jsonl"), "field": {"prompt": "question"}}],
            "tokenizer": str(folder),
            "sequence_length": LENGTH,
        },
        "rollout": {
            "group": GROUP,
            "max_tokens": ANSWER,
            "together": BATCH // GROUP // 2,
            "workers": who.get("rollout_workers"),
        },
        "rewards": [{"kind": "regex", "pattern": "w1"}],
        "train": train,
        "parallel": {"micro_batch": micro_batch},
        "resources": {"workers": who["workers"]},
        "checkpoint": {"every": steps, "export": None},
        "tracking": None,
    }


def done(folder: Path, *words: object) -> str:
    """Run a command, and return what it prints."""
    result = orchestrator(*words, cwd=folder, timeout=600)
    if result.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{result.stdout}\n{result.stderr}")
    return result.stdout


def measured(run: Path) -> list[dict[str, float]]:
    """Return the seconds of each step by part."""
    found = []
    for row in rows(run)[WARM:]:
        parts = {part: row[f"{part}_seconds"] for part in PARTS[:3]}
        found.append(parts | {"train": row["step_seconds"] - row["data_seconds"] - sum(parts.values())})
    return found


def main(rounds: int = 2, steps: int = 8) -> None:
    """Print a row for each shape, and how far the predictions are off."""
    steps_of: dict[str, list[dict[str, float]]] = {title: [] for title in SHAPES}
    predicted: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = folder / "here.yaml"
        done(folder, "calibrate", "--to", profile)
        for round_number in range(rounds):
            for number, (title, shape) in enumerate(SHAPES.items()):
                place = folder / f"{round_number}.{number}"
                place.mkdir()
                write_data(place, shape[1])
                job = write_job(place, job_of(place, shape, steps))
                plan = json.loads(done(place, "plan", job, "--machine", profile, "--json"))
                predicted[title] = plan["rollout"]["seconds"]
                done(place, "run", job)
                steps_of[title] += measured(place / "runs" / "job")
    print("| shape | " + " | ".join(f"{part}: predicted, measured" for part in (*PARTS, "step")) + " |")
    print("|---|" + "---|" * (len(PARTS) + 1))
    for title, found in steps_of.items():
        pairs = [(predicted[title][part], statistics.median(step[part] for step in found)) for part in PARTS]
        whole = statistics.median(sum(step.values()) for step in found)
        pairs.append((sum(predicted[title].values()), whole))
        cells = [f"{said:.4f}, {real:.4f} ({said / real - 1:+.0%})" for said, real in pairs]
        print("| " + " | ".join([title, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
