"""What cutting a stream does to documents, what best-fit packing pads, and what isolated documents cost a step.

The text is the docstring corpus that every installation has. A document is counted as truncated if it would fit a
sample and is cut all the same. Steps are interleaved, one thread each:

    python tests/bench/bench_packing.py WORK_FOLDER
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from prepared import prepare_here

from orchestrator.config.spec import parse
from orchestrator.data.corpus import collect
from orchestrator.data.samples.batches import batches_of
from orchestrator.data.samples.packing.best_fit import cut, pack
from orchestrator.data.store.tokens import Tokens
from workloads.load import load
from workloads.workload import Batch

LENGTHS = (128, 512, 2048)
ROUNDS, STEPS = 7, 3


def main(folder: Path) -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    collect(str(folder / "corpus"))
    document: dict[str, Any] = {
        "name": "packing",
        "workload": {"model": "gpt-tiny"},
        "data": {
            "sources": [{"uri": str(folder / "corpus" / "*.txt")}],
            "tokenizer": {"train_bpe": 4096},
            "sequence_length": 128,
        },
        "train": {"steps": 1, "global_batch": 8},
    }
    tokens = Tokens.open(prepare_here(parse(document), str(folder / "cache")))
    ends = tokens.document_ends(0)
    starts = np.concatenate(([0], ends[:-1]))
    print(f"{len(ends)} documents, {tokens.length(0)} tokens, median {np.median(ends - starts):.0f}\n")
    print(
        "| length | truncated by cut | truncated by best fit | padding | samples, cut | samples, best fit |"
    )
    print("|---|---|---|---|---|---|")
    for length in LENGTHS:
        print(row(starts, ends, length))
    speed()
    print("\n| length | isolate over pack, a step | least | most | best fit and isolate over cut and pack |")
    print("|---|---|---|---|---|")
    for length in LENGTHS:
        print(cost(tokens, length))


def row(starts: np.ndarray, ends: np.ndarray, length: int) -> str:
    """One length's row of the first table."""
    window, fits = length + 1, ends - starts <= length + 1
    last = ends - 1  # the samples in which the first and the last token of a document are predicted
    split = np.maximum(starts, 0) // length != np.maximum(last - 1, starts) // length
    begins, stops = cut(starts, ends, window, length)
    sample = pack(stops - begins, window)
    samples = int(sample.max()) + 1
    padding = 1 - float((stops - begins).sum() - samples) / (samples * length)
    whole = (split & fits).sum() / fits.sum()
    return f"| {length} | {whole:.1%} | 0 | {padding:.2%} | {(ends[-1] - 1) // length} | {samples} |"


def speed() -> None:
    """How long a million documents take."""
    random = np.random.default_rng(0)
    sizes = np.minimum(random.lognormal(6, 1.2, 2**20).astype(np.int64) + 1, 2049)
    began = time.perf_counter()
    sample = pack(sizes, 2049)
    seconds = time.perf_counter() - began
    room = 1 - sizes.sum() / (2049 * (int(sample.max()) + 1))
    print(
        f"\n{len(sizes)} pieces of log-normal lengths into samples of 2048: {seconds:.1f} s, {room:.2%} padding"
    )


def cost(tokens: Tokens, length: int) -> str:
    """One length's row of the second table."""
    ways = {"pack": ("pack", False), "isolate": ("isolate", False), "both": ("isolate", True)}
    made = {name: step(tokens, length, *way) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in made.items():
            began = time.perf_counter()
            for _ in range(STEPS):
                run()
            times[name].append(time.perf_counter() - began)
    ratios = [b / a for a, b in zip(times["pack"], times["isolate"], strict=True)]
    both = [b / a for a, b in zip(times["pack"], times["both"], strict=True)]
    return (
        f"| {length} | {statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} | "
        f"{statistics.median(both):.3f} |"
    )


def step(tokens: Tokens, length: int, documents: str, packed: bool) -> Any:
    """A function that computes forward and backward of 4 samples, the batch included."""
    workload = load(
        "gpt-tiny",
        "causal_lm",
        tokens.vocabulary(),
        changes={"hidden": 256, "layers": 4, "heads": 4, "intermediate": 1024, "max_positions": 2048},
        options={"documents": documents},
        sequence_length=length,
        seed=0,
    )
    network = workload.build()
    batches, position = batches_of(tokens, workload.objective, 0, [1.0], packed=packed), 0

    def run() -> None:
        nonlocal position
        batch: Batch = batches.batch(position, 4)[0]
        position += 4
        network.zero_grad()
        workload.loss(network, batch).total.backward()

    run()
    return run


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
