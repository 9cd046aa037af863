"""GRPO here and in TRL on the sums of `make example-sums`: reward by step, seconds per step, time to the same reward.

    python tests/bench/bench_grpo.py PRETRAINED [rounds]

PRETRAINED is the directory of the run sums-pretrain, whose data is in ./sums; both begin with its export. Prompts,
group, steps, maximum tokens, optimizer, loss and threads (one) are the same; each draws its own answers. The runs are
interleaved, each in processes of its own. A step's seconds include generation, rewards and logging, and no start.
"""

from __future__ import annotations

import itertools
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
import yaml
from jobs import orchestrator, rows, write_job

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sums.yaml"
STEPS, GROUP, PROMPTS, TOKENS, LR, WARMUP = 60, 8, 16, 4, 3e-4, 5
SMOOTHED = 10
TARGETS = (0.6, 0.7)

Curve = list[tuple[float, float]]
"""The time at the end of each step, in seconds since the first step began, and the step's mean reward."""


def since_start(times: list[float], rewards: list[float]) -> Curve:
    """Return the curve of steps that ended at `times`; the first takes as long as the median step."""
    steps = [after - before for before, after in itertools.pairwise(times)]
    start = times[0] - statistics.median(steps)
    return [(end - start, reward) for end, reward in zip(times, rewards, strict=True)]


def ours(pretrained: Path, seed: int) -> Curve:
    """Train with this project."""
    document = yaml.safe_load(EXAMPLE.read_text())
    del document["evaluate"]
    document["seed"] = seed
    document["workload"] |= {"init_from": str(pretrained)}
    document["data"]["tokenizer"] = str(Path("sums/tokenizer").resolve())
    document["data"]["sources"][0]["uri"] = str(Path("sums/prompts.jsonl").resolve())
    document["rollout"] = {"group": GROUP, "max_tokens": TOKENS, "together": PROMPTS}
    document["train"] = {
        "steps": STEPS,
        "global_batch": GROUP * PROMPTS,
        "optimizer": {"name": "adamw", "lr": LR, "warmup": WARMUP, "schedule": "constant"},
    }
    document["checkpoint"] = {"every": STEPS, "export": None}
    document["parallel"] = {"micro_batch": GROUP * PROMPTS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        done = orchestrator("run", write_job(folder, document), cwd=folder, timeout=1200)
        if done.returncode:
            raise SystemExit(done.stderr)
        found = rows(folder / "runs" / document["name"])
    return since_start([row["time"] for row in found], [row["reward"] for row in found])


def theirs(pretrained: Path, seed: int) -> Curve:
    """Train with TRL, in a process of its own."""
    words = [sys.executable, str(Path(__file__).resolve()), "--trl", str(pretrained / "export"), str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=1200, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    return [(at, reward) for at, reward in json.loads(done.stdout.splitlines()[-1])]


def train_with_trl(export: str, seed: int) -> None:
    """Print the curve of TRL's trainer as JSON."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    asked = [json.loads(line) for line in Path("sums/prompts.jsonl").read_text().splitlines()]
    times: list[float] = []
    rewards: list[float] = []

    def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        found = [float(said.strip() == want) for said, want in zip(completions, answer, strict=True)]
        rewards.append(statistics.fmean(found))
        return found

    class Times(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.time())

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=GROUP * PROMPTS,
            num_generations=GROUP,
            max_completion_length=TOKENS,
            max_steps=STEPS,
            learning_rate=LR,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=WARMUP,
            adam_beta2=0.95,
            weight_decay=0.1,
            max_grad_norm=1.0,
            loss_type="grpo",
            scale_rewards="group",
            beta=0.0,
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
        )
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32),
            reward_funcs=right,
            args=config,
            train_dataset=Dataset.from_list(
                [{"prompt": row["question"], "answer": row["answer"]} for row in asked]
            ),
            processing_class=AutoTokenizer.from_pretrained(export),
            callbacks=[Times()],
        )
        trainer.train()
    assert len(times) == len(rewards) == STEPS
    print(json.dumps(since_start(times, rewards)))


def reached(curve: Curve, target: float) -> float | None:
    """Return the seconds until the mean reward of the last steps reaches the target."""
    for step in range(SMOOTHED, len(curve) + 1):
        if statistics.fmean(reward for _, reward in curve[step - SMOOTHED : step]) >= target:
            return curve[step - 1][0]
    return None


def seconds_a_step(curve: Curve) -> float:
    """Return the median seconds between the ends of steps."""
    return statistics.median(after - before for (before, _), (after, _) in itertools.pairwise(curve))


def main(pretrained: str, rounds: str = "3") -> None:
    """Print tables of all rounds."""
    import torch
    import transformers
    import trl

    print(f"torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}")
    run = Path(pretrained).resolve()
    curves: dict[str, list[Curve]] = {"ours": [], "TRL": []}
    train = {"ours": ours, "TRL": theirs}
    heads = [f"reward {first + 1} to {first + SMOOTHED}" for first in range(0, STEPS, SMOOTHED)]
    told = [f"s to {target}" for target in TARGETS]
    columns = ["round", "", "s a step", *told, *heads]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for number in range(int(rounds)):
        for name in sorted(train, reverse=bool(number % 2)):
            curve = train[name](run, 17 + number)
            curves[name].append(curve)
            rewards = [
                statistics.fmean(reward for _, reward in curve[first : first + SMOOTHED])
                for first in range(0, STEPS, SMOOTHED)
            ]
            times = [reached(curve, target) for target in TARGETS]
            cells = ["never" if found is None else f"{found:.1f}" for found in times]
            values = [f"{reward:.2f}" for reward in rewards]
            print(
                "| "
                + " | ".join([str(number), name, f"{seconds_a_step(curve):.3f}", *cells, *values])
                + " |",
                flush=True,
            )
    pairs = list(zip(curves["ours"], curves["TRL"], strict=True))
    ratios = [seconds_a_step(a) / seconds_a_step(b) for a, b in pairs]
    print("ours over TRL, seconds per step, by round: " + ", ".join(f"{ratio:.2f}" for ratio in ratios))
    for target in TARGETS:
        found = [(reached(a, target), reached(b, target)) for a, b in pairs]
        texts = [f"{a / b:.2f}" if a and b else "not reached by both" for a, b in found]
        print(f"ours over TRL, seconds to a reward of {target}, by round: " + ", ".join(texts))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl"]:
        train_with_trl(sys.argv[2], int(sys.argv[3]))
    else:
        main(*sys.argv[1:3])
