"""Random kills of ranks and nodes: steps that are done twice, and bits against a run that nothing disturbs.

    python tests/bench/bench_kills.py --kills 1000             # or as many as --seconds allow

Two nodes of one rank each, as real processes without Ray: a node is its rank, the process that writes its snapshots and
its snapshot server. The kill of a rank leaves the others of its node alive; the kill of a node stops all of them first.
Each comes at a random moment after the attempt has finished a new step, so that no second node is lost before the
copies of the first are on two nodes again. The script prints a line every fifty kills, and a table at the end.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

import paths  # noqa: F401
from jobs import curve, job, weights, write_text
from simulated_nodes import run_on_nodes


def main() -> None:
    """Kill, compare and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=12, help="steps of the run for each kill")
    parser.add_argument("--seconds", type=float, default=7200.0, help="no further part begins after these")
    parser.add_argument(
        "--longest", type=float, default=0.15, help="seconds a kill comes at most after a new step"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", default="1", help="checkpoint.snapshot_every: a number, or auto")
    options = parser.parse_args()
    began, part = time.monotonic(), min(options.kills, 50)
    struck: Counter[str] = Counter()
    rows = twice = computed_again = restarts = 0
    same = True
    with tempfile.TemporaryDirectory() as name:
        folder, number = Path(name), 0
        text = write_text(folder / "corpus")
        while struck.total() < options.kills and time.monotonic() - began < options.seconds:
            number += 1
            document = job(text, steps=options.steps * part)
            document["seed"] = options.seed + number
            document["resources"] = {"workers": {"min": 2, "max": 2}}
            every = options.every if options.every == "auto" else int(options.every)
            document["checkpoint"] = {"every": 100_000, "keep": 2, "snapshot_every": every, "export": None}
            document["limits"] = {"restarts": 100 * part}
            run, quiet = str(folder / f"run-{number}"), str(folder / f"quiet-{number}")
            more = {"kills": part, "seed": options.seed + number, "longest": options.longest}
            summary, gang, killer = run_on_nodes(document, run, folder / "cache", **more)
            assert summary["state"] == "done", summary
            run_on_nodes(document, quiet, folder / "cache")
            last = document["train"]["steps"]
            same &= curve(Path(run)) == curve(Path(quiet)) and weights(Path(run), last) == weights(
                Path(quiet), last
            )
            struck.update(kind for kind, _ in killer.struck)
            rows += last
            twice += sum(count - 1 for count in gang.rows.values())
            restarts += len(gang.restored) - 1
            pairs = zip(gang.reached, gang.restored[1:], strict=False)
            computed_again += sum(max(before - after, 0) for before, after in pairs)
            print(
                f"{struck.total()} kills ({dict(struck)}), {restarts} restarts, {rows} steps, {twice} finished steps "
                f"done twice, {computed_again} unfinished steps computed again, same bits: {same}, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
