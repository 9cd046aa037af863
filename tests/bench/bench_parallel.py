"""The parallel trainer against theory and against plain loops: bubbles, bytes held, bytes moved, seconds.

    python tests/bench/bench_parallel.py [bubble] [memory] [traffic] [peers]

Bubbles: every forward and backward call of a stage is timed in processor seconds on real ranks; the schedule that
they ran is then played with the medians of these times, each rank doing its calls in order and none before what it
needs is there. So the cores that the ranks share here do not distort it, and stages of unequal size do count.
Memory: bytes of all tensors that live between steps, and at the most after any operator of a step.
Traffic: bytes of every collective, as rings move them. Peers: steps in turns within the same processes.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from typing import Any

import paths  # noqa: F401
from harness import finished

from cluster.workers.process_gang import ProcessGang

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
    with contextlib.closing(ProcessGang()) as gang:
        return finished(world, config, f"parallel_ranks:{target}", gang)


def bubble() -> None:
    """Idle share of a pipeline of four. Stages are large, so that embedding and head make the ends little heavier."""
    p, m = 4, 8
    config = {
        "changes": {**SMALL, "hidden": 384, "intermediate": 1152, "layers": 24}, "vocabulary": 64, "length": 96,
        "batch": m, "steps": 4,
        "layouts": {s: {"pp": p, "schedule": s} for s in ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")},
    }  # fmt: skip
    measured = ranks(p, "pipeline", config)
    print(f"\n| schedule, {p} ranks, {m} micro-batches | idle, measured | theory | | formula |")
    print("|---|---|---|---|---|")
    for name in config["layouts"]:
        busy: dict[str, float] = {}
        for rank in measured:
            busy |= rank[name]["busy"]
        rows = [rank[name]["calls"] for rank in measured]
        stages = [{letter: busy.get(f"{s}{letter}", 0.0) for letter in "FBIW"} for s in range(_stages(busy))]
        mean = {letter: statistics.mean(stage[letter] for stage in stages) for letter in "FBIW"}
        idle, (theory, formula) = played(rows, stages), ideal(name, p, m, mean)
        print(f"| {name} | {idle:.1%} | {theory:.1%} | {idle / theory - 1:+.0%} | {formula} |")
        ends = [sum(stage.values()) / sum(mean.values()) for stage in (stages[0], stages[-1])]
        spread = " ".join(f"{letter} {mean[letter] * 1e3:.1f}" for letter in "FBIW")
        print(f"{name}: mean ms {spread}; ends over the mean {ends[0]:.2f} {ends[1]:.2f}", file=sys.stderr)


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


def ideal(name: str, p: int, m: int, mean: dict[str, float]) -> tuple[float, str]:
    """The idle share that the papers give, from the mean times of the calls where it depends on them.

    From the first call of the step to the last one, since the optimiser waits for all ranks. ZB-V's own count,
    which is none, leaves out what each rank waits before its first call and after its last.
    """
    if name == "interleaved":
        return (p - 1) / (2 * m + p - 1), "(p-1)/(2m+p-1), two stages per rank"
    if name in ("zero_bubble", "zbv"):
        work = 2 * m * (mean["F"] + mean["I"] + mean["W"])
        wait = (p - 1) * (mean["F"] + (mean["I"] - mean["W"] if name == "zero_bubble" else 0.0))
        told = "(p-1)(F+B-W)" if name == "zero_bubble" else "(p-1)F at the ends, none between"
        return wait / (work + wait), f"{told}, over that and 2m(F+B+W)"
    return (p - 1) / (m + p - 1), "(p-1)/(m+p-1)"


def memory() -> None:
    """Bytes of weights, gradients and Adam's states, of a model whose activations are next to nothing.

    In the step, ZeRO 2 holds the gathered weights beside their shards when the backward pass begins, before there are
    gradients; ZeRO 3 a few blocks of many.
    """
    n = 2
    config = {"changes": {**SMALL, "hidden": 512, "intermediate": 1536, "layers": 24}, "vocabulary": 256,
              "length": 8, "batch": n, "steps": 2}  # fmt: skip
    print(
        f"\n| zero, {n} ranks, fp32, bytes per parameter | between steps | theory | at the peak | theory | |"
    )
    print("|---|---|---|---|---|---|")
    for zero in range(4):
        (found, *_) = ranks(n, "states", {**config, "layout": {"dp": n, "zero": zero}})
        theory = {0: 16.0, 1: 8 + 8 / n, 2: 16 / n, 3: 16 / n}[zero]
        highest = 4 + 12 / n if zero == 2 else theory
        held, peak = (found[key] / found["parameters"] for key in ("held", "peak"))
        print(
            f"| {zero} | {held:.2f} | {theory:.2f} | {peak:.2f} | {highest:.2f} | {peak / highest - 1:+.1%} |"
        )


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
