"""The best learning rate by width, with muP and without: the same job at two widths over a grid of learning rates.

python tests/bench/bench_mup.py [--model gpt-tiny] [--std 0.02] [--widths 64 256] [--steps 60] [--seeds 3]
    [--powers -12 -5]

Two layers and heads of width 16 on the topics of Python's own reference (0.4 MB, a BPE of 512 entries), batch 8 x 32,
AdamW with its usual decay and clipping, six steps of warm-up, then constant; one process, one thread. A value is the
mean training loss of the last ten steps, over the seeds; each step sees new text, so that nothing is memorised. With
muP the base is the first width, and `std` is the spread of its initial values.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch

from orchestrator.data.encoding.training import train_bytes
from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.groups import Rate, groups_of, set_lr
from workloads.load import load
from workloads.workload import Vocabulary, Workload

ENTRIES, LENGTH, BATCH, WARMUP, LAST = 512, 32, 8, 6, 10


def tokens() -> np.ndarray:
    """The corpus as one row of tokens."""
    from tokenizers import Tokenizer

    text = "\n".join(topics[key] for key in sorted(topics))
    made = Tokenizer.from_str(train_bytes([text], ENTRIES, ()))
    return np.array(made.encode(text).ids, dtype=np.int64)


def widths(hidden: int) -> dict[str, Any]:
    """Every size in proportion; heads stay as wide as they are."""
    return {"hidden": hidden, "heads": hidden // 16, "kv_heads": hidden // 16, "intermediate": 4 * hidden}


def workload_of(model: str, std: float, hidden: int, base: int | None, seed: int) -> Workload:
    """The model of that width; base is None for the usual parametrisation."""
    changes = {"layers": 2, "max_positions": LENGTH, "initial_std": std, **widths(hidden)}
    mup = None if base is None else widths(base)
    vocabulary = Vocabulary(ENTRIES, eos=0)
    return load(model, "causal_lm", vocabulary, changes=changes, mup=mup, sequence_length=LENGTH, seed=seed)


def trained(workload: Workload, corpus: np.ndarray, lr: float, steps: int, seed: int) -> float:
    """The mean loss of the last steps; infinite where it is no number."""
    model = workload.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(workload.initial(name, seed))
    spec = OptimizerSpec(lr=lr)
    assert spec.clip is not None
    named = ((p, p.dim() > 1, Rate(workload.lr_scale(n))) for n, p in model.named_parameters())
    optimizer = torch.optim.AdamW(groups_of(spec, named), betas=spec.betas, eps=spec.eps, fused=True)
    window = workload.objective.window(LENGTH)
    order = np.random.default_rng(seed).permutation(len(corpus) // window)
    losses = []
    for step in range(steps):
        ids = order[step * BATCH : (step + 1) * BATCH]
        batch = workload.objective.collate(lambda i: corpus[i * window : (i + 1) * window], ids, 0)
        made = workload.loss(model, batch)
        loss = made.total / made.count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip)
        set_lr(optimizer.param_groups, lr * min(1.0, (step + 1) / WARMUP))
        optimizer.step()
        losses.append(loss.item())
    found = statistics.fmean(losses[-LAST:])
    return found if math.isfinite(found) else math.inf


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--std", type=float, default=0.02)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--powers", type=int, nargs=2, default=[-12, -5])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    corpus, powers = tokens(), range(asked.powers[0], asked.powers[1] + 1)
    print("| width | | " + " | ".join(f"2^{p}" for p in powers) + " | best |", flush=True)
    print("|" + "---|" * (len(powers) + 3), flush=True)
    for hidden in asked.widths:
        for base in (None, asked.widths[0]):
            if base == hidden:  # it is the plain model
                continue
            losses = [
                statistics.fmean(
                    trained(
                        workload_of(asked.model, asked.std, hidden, base, seed),
                        corpus,
                        2.0**power,
                        asked.steps,
                        seed,
                    )
                    for seed in range(asked.seeds)
                )
                for power in powers
            ]
            best = powers[losses.index(min(losses))]
            kind = "with muP" if base else "without"
            kind = "both" if hidden == asked.widths[0] else kind
            row = " | ".join(f"{loss:.3f}" for loss in losses)
            print(f"| {hidden} | {kind} | {row} | 2^{best} |", flush=True)


if __name__ == "__main__":
    main()
