"""A run under random faults of every kind, round after round, until so many have struck.

    python tests/bench/soak.py FOLDER [--faults 10000] [--rounds N] [--only KIND,...] [--seed N] [--table]

Each round is one run of a tiny job on real Ray nodes of this machine, with a hundred faults at random moments, and is
compared with the quiet twin: the receipt of every step, losses and gradient norms bit by bit, every tensor of the last
commit. What was done stands in FOLDER/rounds.jsonl, so the same command continues where it was. A round that did not
end or is not the same run is a finding, and its folder is kept. Ends with a table by kind, and exit code 1 on
findings.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paths  # noqa: F401
from jobs import command, curve, job, rows, weights, write_job, write_text
from rich.console import Console
from rich.table import Table
from soak_strikes import KINDS, Stage, Striker

from cluster.local.local_cluster import LocalCluster, NodeSpec, down, up
from cluster.local.node_processes import ClusterError

STEPS = 1000
"""Of a round: some milliseconds each."""
PER_ROUND = 120
WORKERS = 3
"""Nodes, of one processor each; the run takes two and keeps the third ready."""
ROUNDS_A_CLUSTER = 8
"""A cluster has some 250 addresses, and lost nodes leave theirs."""
HANG = 150.0
"""Seconds without a new step, or to the end after the last fault, after which a round hangs."""


def main() -> int:
    """Rounds until there are enough; prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=1_000_000, help="at most so many in this call")
    parser.add_argument("--only", default="", help="kinds, with commas between")
    parser.add_argument(
        "--seed", type=int, default=1_000_003, help="of the first round; each next one has the next"
    )
    parser.add_argument("--table", action="store_true", help="print what there is and end")
    words = parser.parse_args()
    folder: Path = words.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    done = _done(folder)
    kinds = {k: w for k, w in KINDS.items() if not words.only or k in words.only.split(",")}
    if not words.table:
        path, twin = _twin(folder)
        ended = len(done) + words.rounds
        while len(done) < ended and _struck(done) < words.faults:
            with _cluster(f"soak{os.getpid() % 10000}") as local:
                for number in range(len(done), min(len(done) + ROUNDS_A_CLUSTER, ended)):
                    if _struck(done) >= words.faults:
                        break
                    told = _round(folder, path, twin, number, words.seed, local, kinds)
                    with open(folder / "rounds.jsonl", "a") as file:
                        file.write(json.dumps(told) + "\n")
                    done.append(told)
                    print(_line(told), flush=True)
                    if told["finding"].startswith("hang"):
                        break  # whatever hangs may hold processors: a fresh cluster
    _table(done)
    return 1 if any(told["finding"] for told in done) else 0


def _done(folder: Path) -> list[dict[str, Any]]:
    path = folder / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _struck(done: list[dict[str, Any]]) -> int:
    return sum(len(told["strikes"]) for told in done)


def _twin(folder: Path) -> tuple[Path, Path]:
    """The job, and the run directory of the undisturbed run; made once."""
    path, twin = folder / "job.yaml", folder / "twin"
    if not path.exists():
        document = job(write_text(folder / "corpus", 40_000), steps=STEPS)
        document["data"]["cache"] = str(folder / "data")
        document["workload"]["changes"] = {"hidden": 16, "layers": 1, "heads": 2, "intermediate": 32}
        document["data"]["sequence_length"] = 16
        document["resources"] = {"workers": {"min": 2, "max": 2}, "spares": 1}
        document["checkpoint"] = {"every": 10, "keep": 4, "export": None}
        document["limits"] = {"restarts": 100_000, "restart_window": 120.0}
        write_job(folder, document)
    if not (twin / "summary.json").exists():
        shutil.rmtree(twin, ignore_errors=True)
        done = subprocess.run(
            command("run", path, "--run-dir", twin), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"the quiet twin ended with {done.returncode}: {done.stderr[-2000:]}")
    return path, twin


@contextlib.contextmanager
def _cluster(name: str) -> Iterator[LocalCluster]:
    down(name)
    for last in (False, True):
        try:
            yield up(name, [NodeSpec("", "")] * WORKERS)
            break
        except ClusterError:
            if last:
                raise
        finally:
            down(name)


def _round(
    folder: Path, path: Path, twin: Path, number: int, seed: int, local: LocalCluster, kinds: dict[str, int]
) -> dict[str, Any]:
    """One run with its faults, compared; its folder is removed unless it is a finding."""
    dice = random.Random(seed + number)
    run = folder / f"round-{number:05d}"
    shutil.rmtree(run, ignore_errors=True)
    began = time.monotonic()
    raised = sorted(dice.sample(range(10, STEPS, 10), 10)) if "raise" in kinds else []
    faults = [word for step in raised for word in ("--fault", f"raise@{dice.randrange(2)}:{step}/*")]
    stage = Stage(
        run, command("run", path, "--run-dir", run, "--address", local.address, *faults), local, HANG
    )
    striker, finding = Striker(stage, dice, kinds), ""
    try:
        striker.strike_all(PER_ROUND - len(raised))
        stage.wait_for_end()
    except (TimeoutError, ClusterError) as error:
        finding = f"hang: {error}" if isinstance(error, TimeoutError) else f"cluster: {error}"
    finally:
        stage.close()
    events = rows(run, "events.jsonl") if (run / "events.jsonl").exists() else []
    injected = [e for e in events if "InjectedFault" in (e.get("first_fault") or "")]
    strikes = [*striker.told, *(_raised(event, events) for event in injected)]
    finding = finding or _differs(run, twin)
    if not finding:
        # At once, for a controller that lingers may be struck by the next round, and Ray starts it again.
        shutil.rmtree(run.replace(folder / "removed"))
    seconds = time.monotonic() - began
    lost = sum(event.get("lost_steps") or 0 for event in events)
    again = sorted([*stage.ended_badly, *["a node that Ray ended was replaced"] * stage.nodes_added])
    return {"round": number, "seconds": seconds, "strikes": strikes, "lost_steps": lost, "ended_badly": again,
            "finding": finding, "time": time.time()}  # fmt: skip


def _raised(event: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    back = next((e["time"] for e in events if e["time"] > event["time"] and e["phase"] == "train"), None)
    seconds = None if back is None else back - event["time"] + event["still_seconds"]
    return {"kind": "raise", "seconds": seconds, "again": event["lost_steps"]}


def _differs(run: Path, twin: Path) -> str:
    """What is not as in the quiet twin; empty if nothing is."""
    ours, theirs = curve(run), curve(twin)
    steps = Counter(row[0] for row in ours)
    if lost := [step for step, *_ in theirs if step not in steps]:
        return f"samples: {len(lost)} steps are missing, the first {lost[0]}"
    if doubled := [step for step, count in steps.items() if count > 1]:
        return f"samples: {len(doubled)} steps are there twice, the first {doubled[0]}"
    for mine, its in zip(ours, theirs, strict=True):
        if mine[3] != its[3]:
            return f"samples: step {mine[0]} used others"
        if mine != its:
            return f"bits: step {mine[0]} has loss {mine[1]!r} and norm {mine[2]!r}, not {its[1]!r} and {its[2]!r}"
    return "" if weights(run, STEPS) == weights(twin, STEPS) else "bits: the last commit has other weights"


def _line(told: dict[str, Any]) -> str:
    rate = 60 * len(told["strikes"]) / told["seconds"]
    counts = ", ".join(
        f"{n} {kind}" for kind, n in sorted(Counter(s["kind"] for s in told["strikes"]).items())
    )
    return f"round {told['round']}: {told['finding'] or 'same'}; {told['seconds']:.0f} s, {rate:.0f} a minute; {counts}"


def _table(done: list[dict[str, Any]]) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for told in done:
        for strike in told["strikes"]:
            found.setdefault(strike["kind"], []).append(strike)
    table = Table(*("fault", "struck", "recovered", "median s", "most s", "steps again"))
    for kind, strikes in sorted(found.items()):
        seconds = [s["seconds"] for s in strikes if s["seconds"] is not None]
        middle = f"{statistics.median(seconds):.2f}" if seconds else "-"
        most = f"{max(seconds):.1f}" if seconds else "-"
        again = str(sum(s["again"] for s in strikes))
        table.add_row(kind, str(len(strikes)), str(len(seconds)), middle, most, again)
    console = Console(width=100)
    console.print(table)
    hours = sum(told["seconds"] for told in done) / 3600
    findings = [told for told in done if told["finding"]]
    of = Counter(told["finding"].partition(":")[0] for told in findings)
    counts = (
        f"{of['samples']} with lost or doubled samples, {of['bits']} with other bits, {of['hang']} that hung"
    )
    again = sum(len(told["ended_badly"]) for told in done)
    console.print(
        f"{_struck(done)} faults in {len(done)} rounds and {hours:.2f} h: {counts}; "
        f"{again} commands ended in an error and were given again"
    )
    for told in findings:
        console.print(f"round {told['round']}: {told['finding']}", markup=False)
    for line, count in Counter(line for told in done for line in told["ended_badly"]).most_common(10):
        console.print(f"{count} x {line}", markup=False)


if __name__ == "__main__":
    raise SystemExit(main())
