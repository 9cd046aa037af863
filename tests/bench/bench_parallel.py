"""The parallel trainer against theory and against plain loops: bubbles, bytes held, bytes moved, seconds.

    python tests/bench/bench_parallel.py [bubble] [memory] [traffic] [peers]

Bubbles: every forward and backward call of a stage is timed in processor seconds on real ranks; the schedule that
they ran is then played with the medians of these times, each rank doing its calls in order and none before what it
needs is there. So the cores that the ranks share here do not distort it, and stages of unequal size do count.
Memory: resident memory at its peak, above what was there before the model. Traffic: bytes of every collective, as
rings move them. Peers: steps in turns within the same processes.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dist" / "train"))

from harness import finished

Call = tuple[int, str, int]
"""Stage, F(orward), B(ackward) or its halves I(nput) and W(eight), and micro-batch."""
SMALL = {"hidden": 64, "heads": 4, "kv_heads": 4, "intermediate": 192, "max_positions": 512}


def main() -> None:
    """Measure what the command line names, or all, and print tables in Markdown."""
    measures = {"bubble": bubble, "memory": memory, "traffic": traffic, "peers": peers}
    for name in sys.argv[1:] or measures:
        measures[name]()


def ranks(world: int, target: str, config: dict[str, Any]) -> list[Any]:
    """What every rank measured."""
    return finished(world, config, f"parallel_ranks:{target}")


def bubble() -> None:
    """Idle share of a pipeline of four."""
    p, m = 4, 8
    config = {
        "changes": {**SMALL, "layers": 16}, "vocabulary": 64, "length": 128, "batch": m, "steps": 4,
        "layouts": {s: {"pp": p, "schedule": s} for s in ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")},
    }  # fmt: skip
    measured = ranks(p, "pipeline", config)
    print(
        f"\n| schedule, {p} ranks, {m} micro-batches | idle, measured | idle, theory | formula |\n|---|---|---|---|"
    )
    for name in config["layouts"]:
        busy: dict[str, float] = {}
        for rank in measured:
            busy |= rank[name]["busy"]
        stages = [{letter: busy.get(f"{s}{letter}", 0.0) for letter in "FBIW"} for s in range(_stages(busy))]
        idle = played([rank[name]["calls"] for rank in measured], stages)
        even = [{"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}] * len(stages)
        equal = played([rank[name]["calls"] for rank in measured], even)
        theory, formula = ideal(name, p, m)
        print(f"| {name} | {idle:.1%} | {equal:.1%} | {theory:.1%} | {formula} |")


def _stages(busy: dict[str, float]) -> int:
    return 1 + max(int(key[:-1]) for key in busy)


def played(rows: list[list[Call]], stages: list[dict[str, float]]) -> float:
    """The mean idle share of the ranks when every call takes its stage's median time."""
    done: dict[Call, float] = {}
    rows = [[(stage, letter, micro) for stage, letter, micro in row] for row in rows]
    every = {call for row in rows for call in row}
    clock, at, work = [0.0] * len(rows), [0] * len(rows), [0.0] * len(rows)
    while any(at[rank] < len(row) for rank, row in enumerate(rows)):
        before = list(at)
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and all(n in done for n in needs(row[at[rank]], len(stages), every)):
                stage, letter, _ = call = row[at[rank]]
                begin = max([clock[rank], *(done[n] for n in needs(call, len(stages), every))])
                clock[rank] = done[call] = begin + stages[stage][letter]
                work[rank] += stages[stage][letter]
                at[rank] += 1
        assert at != before, "the schedule waits for itself"
    return statistics.mean(1 - done / max(clock) for done in work)


def needs(call: Call, stages: int, every: set[Call]) -> list[Call]:
    """The calls whose results a call takes."""
    stage, letter, micro = call
    if letter == "F":
        return [(stage - 1, "F", micro)] if stage else []
    if letter == "W":
        return [(stage, "I", micro)]
    if stage + 1 == stages:
        return [(stage, "F", micro)]
    after = (stage + 1, "I", micro)
    return [(stage, "F", micro), after if after in every else (stage + 1, "B", micro)]


def ideal(name: str, p: int, m: int) -> tuple[float, str]:
    """The idle share that the papers give, where forward and both halves of the backward pass take as long."""
    if name == "interleaved":
        return (p - 1) / (2 * m + p - 1), "(p-1)/(2m+p-1), two stages a rank"
    if name == "zero_bubble":
        return (p - 1) / (6 * m + p - 1), "(p-1)(F+B-W) of two stages a rank: a third of interleaved"
    return ((p - 1) / (m + p - 1), "(p-1)/(m+p-1)") if name != "zbv" else (0.0, "none")


def memory() -> None:
    """Bytes of weights, gradients and Adam's states."""
    n = 2
    config = {"changes": {**SMALL, "hidden": 384, "heads": 6, "kv_heads": 6, "intermediate": 1536, "layers": 12},
              "vocabulary": 512, "length": 8, "batch": n, "steps": 3}  # fmt: skip
    print(f"\n| zero, {n} ranks, fp32 | peak, measured | bytes a parameter | theory |\n|---|---|---|---|")
    for zero in range(4):
        (found, *_) = ranks(n, "states", {**config, "layout": {"dp": n, "zero": zero}})
        theory = {0: 16.0, 1: 8 + 8 / n, 2: 4 + 12 / n, 3: 16 / n}[zero]
        size = found["parameters"]
        print(f"| {zero} | {found['peak'] / 2**20:.0f} MiB | {found['peak'] / size:.2f} | {theory:.2f} |")


def traffic() -> None:
    """Bytes sent by a rank in a step of one micro-batch."""
    n = 2
    config = {"changes": {**SMALL, "layers": 4}, "vocabulary": 512, "length": 64}
    zeros = {f"zero {z}": {"dp": n, "zero": z} for z in range(4)}
    data = ranks(n, "traffic", {**config, "batch": n, "layouts": zeros})[0]
    cuts = {"tp": {"tp": n}, "tp, sequence": {"tp": n, "sequence": True}}
    tensor = ranks(n, "traffic", {**config, "batch": 1, "layouts": cuts})[0]
    weights, hidden = 4 * data["parameters"], 4 * 64 * SMALL["hidden"]
    print(f"\n| {n} ranks | bytes sent by a rank in a step | theory | |\n|---|---|---|---|")
    unit = (n - 1) / n * weights
    for name, value in data.items():
        if name.startswith("zero"):
            times = 3 if name == "zero 3" else 2
            print(f"| {name} | {value:,.0f} | {times * unit:,.0f} | {times} (n-1)/n of the weights |")
    for name in ("tp", "tp, sequence"):
        # Four all-reduces a layer, or their halves; one for the embedding and one for the head's input.
        theory = (4 * 4 + 2) * 2 * (n - 1) / n * hidden
        print(
            f"| {name} | {tensor[name]:,.0f} | {theory:,.0f} | an all-reduce for each block and direction, two ends |"
        )


def peers() -> None:
    """Our step beside plain DDP and FSDP2 of the same model."""
    n = 2
    config = {"changes": {**SMALL, "hidden": 128, "intermediate": 384, "layers": 4}, "vocabulary": 1024,
              "length": 128, "batch": 8, "steps": 5, "rounds": 12}  # fmt: skip
    found = ranks(n, "peers", config)[0]
    print(f"\n| step, {n} ranks | median | ratio |\n|---|---|---|")
    for ours, theirs in (("ours, zero 0", "DDP"), ("ours, zero 3", "FSDP2")):
        ratio = statistics.median(a / b for a, b in zip(found[ours], found[theirs], strict=True))
        for name in (ours, theirs):
            shown = f"{ratio:.3f}" if name == ours else ""
            print(f"| {name} | {statistics.median(found[name]) * 1e3:.1f} ms | {shown} |")


if __name__ == "__main__":
    main()
