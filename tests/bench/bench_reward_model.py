"""Answers a second that a reward model scores: in the batches of `RewardModel.score`, prompt by prompt, and one by one.

    python tests/bench/bench_reward_model.py [rounds]

Interleaved in one process. The weights are random, and the answers have 8 to 128 tokens after prompts of 32.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import paths  # noqa: F401
import torch

from orchestrator.train.rollouts import reward_model
from orchestrator.train.rollouts.reward_model import RewardModel
from workloads.hf.check.parity_table import random_state
from workloads.load import load
from workloads.workload import Vocabulary

PROMPTS, GROUP, READ = 8, 8, 32
SIZES: dict[str, dict[str, Any]] = {
    "hidden 64, 2 layers": {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 192},
    "hidden 256, 4 layers": {"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 768},
}


def made(changes: dict[str, Any]) -> RewardModel:
    """Return a reward model with random weights, on one CPU."""
    workload = load(
        "llama-tiny", "reward", Vocabulary(1000, eos=2, pad=0), changes=changes, sequence_length=512
    )
    tokenizer = SimpleNamespace(get_vocab=dict)
    tokens: Any = SimpleNamespace(tokenizer=lambda: tokenizer)
    read = random_state(workload).__getitem__
    found = SimpleNamespace(tokens=tokens, workload=workload, read=read, scheme=None)
    device: Any = SimpleNamespace(device=torch.device("cpu"), autocast=nullcontext, casting_once=nullcontext)
    with patch.object(reward_model, "model_of_run", lambda run, step: found):
        return RewardModel("run@1", "", tokens, device)


def ways(model: RewardModel, rows: list[list[int]]) -> dict[str, Callable[[], list[float]]]:
    """Return functions that score all rows."""
    groups = [rows[first : first + GROUP] for first in range(0, len(rows), GROUP)]
    return {
        "by length": lambda: model.score(rows),
        "by prompt": lambda: [score for group in groups for score in model.score(group)],
        "one by one": lambda: [score for row in rows for score in model.score([row])],
    }


def main(rounds: int = 7) -> None:
    """Print a row for each size."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(8, 129, (PROMPTS * GROUP,), generator=draw)
    rows = [torch.randint(3, 1000, (READ + int(length),), generator=draw).tolist() for length in lengths]
    print(f"torch {torch.__version__}, one thread, {rounds} rounds, {len(rows)} answers")
    print("| model | by length, answers/s | by prompt | one by one | over by prompt | largest difference |")
    print("|---|---|---|---|---|---|")
    for title, changes in SIZES.items():
        made_ways = ways(made(changes), rows)
        seconds: dict[str, list[float]] = {name: [] for name in made_ways}
        scores = {}
        for number in range(rounds + 1):
            for name, score in sorted(made_ways.items(), reverse=bool(number % 2)):
                began = time.process_time()
                scores[name] = score()
                seconds[name] += [time.process_time() - began] if number else []  # the first round warms up
        speeds = [f"{len(rows) / statistics.median(each):,.0f}" for each in seconds.values()]
        ratios = [
            before / now for now, before in zip(seconds["by length"], seconds["by prompt"], strict=True)
        ]
        told = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        apart = max(
            abs(one - other) for one, other in zip(scores["by length"], scores["one by one"], strict=True)
        )
        print("| " + " | ".join([title, *speeds, told, f"{apart:.1e}"]) + " |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
