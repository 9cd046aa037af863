"""Freeze one of several ranks at random moments, and read what the run says about it.

    python tests/bench/bench_freeze.py --freezes 12

Real rank processes without Ray, on gloo, train a tiny model under tensor, pipeline and data parallelism, with commits
and evaluations. SIGSTOP stops a random rank at a random moment after the start of an attempt: while it starts,
restores, computes, waits in a collective, evaluates or commits. The script prints which rank was frozen, the fault that
the event names, how long the run took to see it, and the lines about missing ranks.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import paths  # noqa: F401
from jobs import job, rows, write_text
from local_run import LocalGang, controller_here


def freeze(gang: LocalGang, rank: int, moment: float, done: threading.Event, told: list[float]) -> None:
    """Stop a rank of the next attempt, `moment` seconds after its process exists."""
    while not done.is_set():
        ranks = [
            each for each in gang.poll_ranks() if each.rank == rank and each.pid and each.state != "done"
        ]
        if ranks:
            if not done.wait(moment):
                os.kill(ranks[0].pid, signal.SIGSTOP)
                told.append(time.time())
            return
        time.sleep(0.02)


class SeenGang(LocalGang):
    """A gang whose ranks other threads may look at."""

    def __init__(self, rooms: list[int]) -> None:
        super().__init__(rooms)
        self._last: tuple[Any, ...] = ()

    def poll(self, saved: int, wait: float = 0.0) -> Any:
        """See `Gang.poll`."""
        status = super().poll(saved, wait)
        self._last = status.ranks
        return status

    def poll_ranks(self) -> tuple[Any, ...]:
        """The ranks as they were last seen."""
        return self._last


def main() -> None:
    """Freeze, and print what was said."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--freezes", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--longest", type=float, default=20.0, help="seconds a freeze comes at most after the start"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    named = 0
    print("| frozen | after | seen after | named | about missing ranks |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = write_text(folder / "corpus", 40_000)
        for number in range(options.freezes):
            document = job(text, steps=100_000, global_batch=16)
            document["resources"] = {"workers": options.ranks}
            document["parallel"] = {"pp": 2, "tp": 2, "micro_batch": 2} if options.ranks % 8 == 0 else {}
            document["checkpoint"] = {"every": 5, "keep": 2, "export": None}
            document["data"]["validation"] = {"share": 0.1}
            document["evaluate"] = {"every": 7, "batches": 2}
            document["limits"] = {"restarts": 0}
            rank = draw.randrange(options.ranks)
            moment = options.longest * number / options.freezes + draw.random()
            gang = SeenGang([options.ranks])
            done, told = threading.Event(), list[float]()
            helper = threading.Thread(target=freeze, args=(gang, rank, moment, done, told))
            helper.start()
            run = folder / f"run-{number}"
            controller_here(document, str(run), folder / "cache", gang=lambda gang=gang: gang).drive()
            done.set()
            helper.join()
            (fault,) = [event for event in rows(run, "events.jsonl") if event["first_fault"]]
            missing = [line for line in fault["output"] if "is missing" in line]
            named += fault["rank"] == rank
            seen = fault["time"] - told[0]
            what = fault["first_fault"]
            print(
                f"| {rank} | {moment:.1f} s | {seen:.0f} s | {what} | {' · '.join(missing)[:300]} |",
                flush=True,
            )
    print(f"{named} of {options.freezes} named")


if __name__ == "__main__":
    main()
