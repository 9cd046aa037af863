"""What befalls a run in the soak, and the command that is given again where the fault ended it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from cluster.local import external_faults as strikes
from cluster.local.local_cluster import LocalCluster, NodeSpec, add, find, remove
from cluster.local.node_processes import ClusterError, cluster_of

KINDS = {
    "kill": 200, "all": 20, "pair": 8, "freeze": 12, "fork": 5, "host": 5, "controller": 4, "driver": 4, "node": 2,
    "raylet": 2, "outage": 6, "torn": 8, "flip": 8, "raise": 0,
}  # fmt: skip
"""How often each comes: what is above fork servers imports torch anew, for tens of seconds on a busy machine.

kill, freeze: a rank by SIGKILL or SIGSTOP; all: every rank at once; pair: two processes at once, ranks, fork servers or
hosts; node: all processes of a machine; raylet: Ray's own on one; outage: storage refuses for a while; torn, flip: the
newest commit is cut, or a bit of it turned, and all ranks die; raise is in the ranks."""
SOON = 0.25
"""Share of the strikes that come before the run has recovered from the one before."""


class Stage:
    """A command on a cluster, and where its run is."""

    def __init__(self, run: Path, words: list[str], local: LocalCluster, hang: float) -> None:
        self.run, self.local, self.hang = run, local, hang
        self.ended_badly: list[str] = []
        self.nodes_added, self._workers, self._looked = 0, _workers_of(local), 0.0
        self._words, self._process = words, self._start(words)

    def _start(self, words: list[str]) -> subprocess.Popen[bytes]:
        with open(self.run.with_suffix(".log"), "ab") as log:
            return subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def is_done(self) -> bool:
        """Whether the run has reached its end; the command is given again if it ended otherwise."""
        code = self._process.poll()
        if code is None:
            return False
        if code == 0:
            return True
        if code > 0:
            tail = self.run.with_suffix(".log").read_text(errors="replace").strip().splitlines()[-1:]
            self.ended_badly.append(f"exit code {code}: {(tail or [''])[0][:160]}")
            if len(self.ended_badly) > 6:
                raise TimeoutError(f"no end: {self.ended_badly[-1]}")
        self._process = self._start(self._words)
        return False

    def kill_command(self) -> None:
        """SIGKILL; the next look gives it again."""
        self._process.kill()
        self._process.wait()

    def step(self) -> int:
        """The last step on record."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            with open(self.run / "metrics.jsonl", "rb") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - 4096, 0))
                lines = [
                    line for line in file.read().split(b"\n") if line.startswith(b"{") and line.endswith(b"}")
                ]
            return int(json.loads(lines[-1])["step"]) if lines else 0
        return 0

    def wait_beyond(self, step: int) -> bool:
        """Until a later step is done; whether the run is at its end instead. Raises TimeoutError if neither comes."""
        end = time.monotonic() + self.hang
        while self.step() <= step:
            if self.is_done():
                return True
            if time.monotonic() > end:
                raise TimeoutError(f"no step beyond {step} within {self.hang:.0f} s")
            self._replace_lost_nodes()
            time.sleep(0.01)
        return False

    def _replace_lost_nodes(self) -> None:
        """Ray ends a node that does not answer, as one of a busy machine may not: another comes in its place."""
        if time.monotonic() < self._looked + 5.0:
            return
        self._looked = time.monotonic()
        local = find(self.local.name)
        if local is not None and (missing := self._workers - _workers_of(local)) > 0:
            with contextlib.suppress(ClusterError):
                add(local, [NodeSpec("", "")] * missing)
                self.nodes_added += missing

    def wait_for_end(self) -> None:
        """Raises TimeoutError if no step comes for too long."""
        while not self.wait_beyond(self.step()):
            time.sleep(0.05)

    def pids(self) -> dict[str, list[int]]:
        """Processes of this run by kind, ranks in an order that says nothing."""
        found: dict[str, list[int]] = {"rank": [], "fork": [], "host": []}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if "cluster.workers.fork_server" not in process.cmdline():
                    continue
                if cluster_of(process) != self.local.folder:
                    continue
                parent = process.parent()
                if parent is not None and "cluster.workers.fork_server" in parent.cmdline():
                    found["rank"].append(process.pid)
                else:
                    found["fork"].append(process.pid)
                    found["host"] += [parent.pid] if parent is not None else []
        return found

    def controller(self) -> int:
        """The process of the run's controller, 0 if there is none."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_controller = process.cmdline()[:1] == ["ray::ControllerActor"]
                if is_controller and cluster_of(process) == self.local.folder:
                    return process.pid
        return 0

    def close(self) -> None:
        """End the command and what is left of its run."""
        strikes.kill_tree(self._process.pid)
        self._process.wait()
        kill(self.controller())


class Striker:
    """Strikes at random moments, and notes what each cost."""

    def __init__(self, stage: Stage, dice: random.Random, kinds: dict[str, int]) -> None:
        self._stage, self._dice = stage, dice
        self._kinds = {kind: weight for kind, weight in kinds.items() if weight}
        self.told: list[dict[str, Any]] = []

    def strike_all(self, count: int) -> None:
        """So many, or until the run is at its end. Raises TimeoutError if it hangs."""
        while len(self.told) < count and self._kinds:
            kinds = [self._draw() for _ in range(2 if self._dice.random() < SOON else 1)]
            if self._stage.wait_beyond(self._stage.step() + self._dice.randrange(8)):
                return
            time.sleep(self._dice.random() * 0.1)
            before, at = self._stage.step(), time.monotonic()
            struck = []
            for kind in kinds:
                if struck:
                    time.sleep(self._dice.expovariate(2.0))
                began = time.monotonic()
                if self._strike(kind):
                    struck.append((kind, began))
            ended = self._stage.wait_beyond(before + 1)  # one step may have been under way to the books
            events = self._stage.run / "events.jsonl"
            again = _again(events, at)
            for kind, began in struck:
                seconds = None if ended and not self._stage.is_done() else time.monotonic() - began
                self.told.append({"kind": kind, "seconds": seconds, "again": again})
                again = 0
            if ended:
                return

    def _draw(self) -> str:
        return self._dice.choices(list(self._kinds), list(self._kinds.values()))[0]

    def _strike(self, kind: str) -> bool:
        """Whether there was something to strike."""
        stage, dice = self._stage, self._dice
        match kind:
            case "kill" | "all" | "freeze" | "fork" | "host" | "pair":
                return self._signal(kind)
            case "controller":
                return kill(stage.controller())
            case "driver":
                stage.kill_command()
                return True
            case "node" | "raylet":
                return self._lose(kind)
            case "outage":
                if not (stage.run / "checkpoints").is_dir():
                    return False
                with strikes.outage(stage.run / "checkpoints"):
                    time.sleep(0.3 + dice.random())
                return True
            case _:
                return self._damage(kind)

    def _signal(self, kind: str) -> bool:
        pids = self._stage.pids()
        chosen = pids.get({"kill": "rank", "all": "rank", "freeze": "rank"}.get(kind, kind), [])
        if kind == "pair":
            chosen = [*pids["rank"], *pids["fork"], *pids["host"]]
        count = len(chosen) if kind == "all" else 2 if kind == "pair" else 1
        targets = self._dice.sample(sorted(chosen), min(count, len(chosen)))
        number = signal.SIGSTOP if kind == "freeze" else signal.SIGKILL
        struck = [kill(pid, number) for pid in targets]
        return any(struck)

    def _lose(self, kind: str) -> bool:
        """A node by the power, or by its raylet; another comes in its place."""
        local = find(self._stage.local.name) or self._stage.local
        workers = [node for node in local.nodes if node["head_address"]]
        if len(workers) < 2:
            return False
        node = self._dice.choice(workers)
        if kind == "node":
            remove(local, node["ip"], abruptly=True)
        else:
            keeper = psutil.Process(node["pid"])
            for process in keeper.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if process.name() == "raylet":
                        process.kill()
            with contextlib.suppress(psutil.Error):
                keeper.wait(30)
        with contextlib.suppress(ClusterError):
            add(local, [NodeSpec("", "")])
        return True

    def _damage(self, kind: str) -> bool:
        """The newest commit while its ranks die."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            shard = strikes.newest_shard(self._stage.run / "checkpoints")
            strikes.flip_bit(shard, self._dice.randrange(1 << 30)) if kind == "flip" else strikes.truncate(
                shard
            )
            for pid in self._stage.pids()["rank"]:
                kill(pid)
            return True
        return False


def _workers_of(local: LocalCluster) -> int:
    return sum(bool(node["head_address"]) for node in local.nodes)


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    """Whether there was such a process."""
    if not pid:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def _again(events: Path, began: float) -> int:
    """Steps that are done again because of faults since that monotonic time."""
    since, found = time.time() - (time.monotonic() - began) - 0.2, 0
    with contextlib.suppress(OSError):
        for line in events.read_text().splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event["time"] >= since and "InjectedFault" not in (event.get("first_fault") or ""):
                    found += event.get("lost_steps") or 0
    return found
