"""Ranks that compute wrongly: how many are found and rightly named, false alarms, and the cost of looking.

    python tests/bench/bench_verify.py trials --trials 1000    # or as many as --seconds allow
    python tests/bench/bench_verify.py clean --steps 10000     # every step verified, no fault
    python tests/bench/bench_verify.py cost                    # steps with and without verification, in turns
    python tests/bench/bench_verify.py cost --only zero        # those under ZeRO alone

A trial is a few steps of a tiny model in real processes. From a random step on a random rank flips one random bit of
one number in every product of a layer, in its gradient, or in every update. The flaw is found if all ranks name that
rank at the first verified step. It has no effect if the last weights and optimizer states have the bits of a run
without it. It is seen as NaN if the loss or the norm of the gradients is, which a run notices without verification.
With --tolerant, signatures are compared within the tolerance instead of bits, and upper bits are flipped.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from typing import Any

import paths  # noqa: F401
from harness import MODELS, finished
from lasting_gang import lasting_gang

from orchestrator.parallel.layout import Layout

EVERY = 3
BITWISE = {"train": {"determinism": "bitwise", "virtual_shards": 4}}
PLACES: dict[int, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    2: [
        ("decoder", {"dp": 2}, BITWISE),
        ("decoder", {"dp": 2, "zero": 1}, {}),
        ("decoder", {"dp": 2, "zero": 3}, {}),
        ("moe", {"dp": 2, "zero": 2}, {}),
    ],
    4: [
        ("decoder", {"dp": 4}, BITWISE),
        ("modern", {"dp": 4, "zero": 1}, {}),
        ("decoder", {"dp": 2, "tp": 2}, {}),
        ("decoder", {"dp": 2, "pp": 2, "zero": 1}, {}),
        ("moe", {"dp": 4, "ep": 2, "zero": 2}, {}),
        ("decoder", {"dp": 2, "cp": 2, "zero": 3}, {}),
    ],
}
"""Layouts by their number of ranks, each with its model."""
TOGETHER = 30
"""Trials in one start of the ranks."""


def run(world: int, trials: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What every rank returned of each trial."""
    by_rank = finished(world, {"trials": trials}, "rank_verified:main", lasting_gang(), timeout=3600)
    return [list(each) for each in zip(*by_rank, strict=True)]


def plain(place: tuple[str, dict[str, Any], dict[str, Any]], steps: int, every: int | None) -> dict[str, Any]:
    """A trial without a flaw."""
    model, layout, more = place
    found = {**MODELS[model], **more, "id": f"{model} {layout}", "steps": steps}
    found["layout"] = Layout(**{"micro_batch": 2, **layout}).to_json()
    return found | ({"verify": {"every": every}} if every else {})


def trials(options: argparse.Namespace) -> None:
    """Random flaws under every layout in turn."""
    draw = random.Random(options.seed)
    began = time.monotonic()
    counts: Counter[tuple[str, str, str]] = Counter()
    done = 0
    turn = 0
    while done < options.trials and time.monotonic() - began < options.seconds:
        world = (2, 4)[turn % 2]
        place = PLACES[world][turn // 2 % len(PLACES[world])]
        turn += 1
        steps = 2 * EVERY
        batch = [plain(place, steps, EVERY)]
        for _ in range(TOGETHER):
            flaw = {
                "kind": draw.choice(["product", "gradient", "update"]),
                "rank": draw.randrange(world),
                "step": draw.randrange(1, EVERY + 1),
                "seed": draw.randrange(2**30),
                "bit": draw.randrange(20, 27) if options.tolerant else draw.randrange(31),
            }
            batch.append({**plain(place, steps, EVERY), "flaw": flaw, "tolerant": options.tolerant})
        first, *rest = run(world, batch)
        assert all(each["found"] is None for each in first), "a false alarm"
        for asked, found in zip(batch[1:], rest, strict=True):
            flaw = asked["flaw"]
            due = -(-flaw["step"] // EVERY) * EVERY
            said = {(each["found"], tuple(each["ranks"])) for each in found}
            same = all(a["state"] == b["state"] for a, b in zip(found, first, strict=True))
            if said == {(due, (flaw["rank"],))}:
                result = "found and named"
            elif said == {(None, ())} and found[0]["error"]:
                result = "seen as NaN"
            elif said == {(None, ())}:
                result = "no effect" if same else "missed"
            elif all(flaw["rank"] in ranks for _, ranks in said):
                result = "found at a later step"
            else:
                result = "another named"
            counts[asked["id"], flaw["kind"], result] += 1
            if result not in ("found and named", "no effect", "seen as NaN"):
                print(result, asked["id"], flaw, said, found[0]["error"], flush=True)
            done += 1
        print(f"{done} trials, {time.monotonic() - began:.0f} s: {dict(totals(counts))}", flush=True)
    results = list(dict.fromkeys(key[2] for key in sorted(counts)))
    print("| layout | flaw | " + " | ".join(results) + " |\n|---|---|" + "---|" * len(results))
    for name, kind in dict.fromkeys(key[:2] for key in sorted(counts)):
        print(f"| {name} | {kind} | " + " | ".join(str(counts[name, kind, each]) for each in results) + " |")


def totals(counts: Counter[tuple[str, str, str]]) -> Counter[str]:
    """The counts by result."""
    found: Counter[str] = Counter()
    for (_, _, result), count in counts.items():
        found[result] += count
    return found


def clean(options: argparse.Namespace) -> None:
    """Verify every step of runs without a flaw."""
    began, verified, turn = time.monotonic(), 0, 0
    while verified < options.steps and time.monotonic() - began < options.seconds:
        world = (2, 4)[turn % 2]
        place = PLACES[world][turn // 2 % len(PLACES[world])]
        turn += 1
        (found,) = run(world, [plain(place, options.part, 1) | {"seed": options.seed + turn}])
        assert all(each["found"] is None and each["verified"] == options.part for each in found), found
        verified += options.part
        print(f"{verified} verified steps, no alarm, {time.monotonic() - began:.0f} s", flush=True)
    if verified < options.steps:
        sys.exit(f"{verified} of {options.steps} steps in {options.seconds:.0f} s; allow more by --seconds")


def cost(options: argparse.Namespace) -> None:
    """Time a verified step beside one that is not, in turns in one run."""
    sizes = {"hidden": options.hidden, "layers": 4, "heads": 4, "intermediate": 4 * options.hidden}
    print("| layout | plain step | verified step over a plain one | cost at 1 in 200 |\n|---|---|---|---|")
    for world in (2, 4):
        for model, layout, more in PLACES[world]:
            trial = plain((model, layout, more), options.turns, None)
            if options.only not in trial["id"]:
                continue
            trial["changes"] = {
                **MODELS[model]["changes"],
                **{k: v for k, v in sizes.items() if k != "layers"},
            }
            trial["train"] = {**more.get("train", {}), "global_batch": options.batch}
            trial["layout"]["micro_batch"] = options.batch // 4
            trial |= {"verify": {"every": 2}}
            (found,) = run(world, [trial])
            slowest = [max(times) for times in zip(*(each["seconds"] for each in found), strict=True)][4:]
            pairs = list(zip(slowest[::2], slowest[1::2], strict=False))
            ratio = sorted(verified / plain_ for plain_, verified in pairs)[len(pairs) // 2]
            plain_ms = 1000 * sorted(slowest[::2])[len(pairs) // 2]
            print(
                f"| {trial['id']} | {plain_ms:.0f} ms | {ratio:.2f} | {(ratio - 1) / 200:.2%} |", flush=True
            )


def main() -> None:
    """Run one of the three parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part_of", choices=("trials", "clean", "cost"))
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--part", type=int, default=200, help="steps of one clean run")
    parser.add_argument("--turns", type=int, default=44, help="steps of one timed run")
    parser.add_argument("--only", default="", help="time only layouts with this in their name, such as zero")
    parser.add_argument("--hidden", type=int, default=128, help="width of the timed model")
    parser.add_argument("--batch", type=int, default=64, help="samples of 16 tokens in a timed step")
    parser.add_argument("--seconds", type=float, default=7200.0, help="no further part begins after these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tolerant", action="store_true")
    options = parser.parse_args()
    {"trials": trials, "clean": clean, "cost": cost}[options.part_of](options)


if __name__ == "__main__":
    main()
