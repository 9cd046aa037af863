"""A run of a chaos, with the faults that are injected into it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.local import external_faults
from cluster.local.external_faults import ExternalFault, wait_for
from cluster.local.local_cluster import LocalCluster
from orchestrator.config.outcome import Outcome
from orchestrator.storage.file_names import COMMITS
from orchestrator.storage.row_line import EVENTS, METRICS, Row
from orchestrator.storage.run_directory import RunDir
from orchestrator.verify.comparison import RunEnd, leftovers_of

TRIAL_TIMEOUT = 2700.0
"""The maximum seconds of one run, with all its faults."""


class ChaosRun:
    """A run in its own folder, with the faults that are injected into it.

    Rank faults are passed to the command; this process applies external ones.
    """

    def __init__(self, job: Path, folder: Path, cluster: LocalCluster, faults: Sequence[str]) -> None:
        self.folder = folder
        self.run_dir = RunDir(str(folder))
        self._cluster = cluster
        parsed = [(text, ExternalFault.parse(text)) for text in faults]
        self._faults = sorted((f for _, f in parsed if f is not None), key=lambda f: f.step)
        inner = [word for text, f in parsed if f is None for word in ("--fault", text)]
        self._command = [sys.executable, "-m", "orchestrator", "run", str(job), "--run-dir", str(folder)]
        self._command += ["--address", cluster.address, *inner]
        self.fault_times: list[float] = []
        self.ended, self.seconds = "not started", 0.0

    def run(self) -> str:
        """Run the command until the run has ended, restarting it after each fault that ends it. Return the outcome."""
        began = time.monotonic()
        with open(self.folder.with_suffix(".log"), "w") as log:
            while True:
                process = subprocess.Popen(self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
                try:
                    self._inject_faults(process)
                    code = process.wait(TRIAL_TIMEOUT)
                except (TimeoutError, subprocess.TimeoutExpired) as error:
                    self.ended = f"no end: {error}"
                    break
                finally:
                    external_faults.kill_tree(process.pid)
                    process.wait()
                outcome = Outcome.of_exit(code)
                self.ended = outcome or f"ended with exit code {code}"
                if outcome in (Outcome.DONE, Outcome.FAILED, Outcome.WRONG_INPUT):
                    break
        self.seconds = time.monotonic() - began
        return self.ended

    def rows(self) -> list[Row]:
        """Return the metrics rows, one per step."""
        return self.run_dir.rows(METRICS)

    def end(self) -> RunEnd:
        """Return the compared values: rows, events, duration, and leftover processes and files."""
        leftovers = leftovers_of(self._cluster.folder)
        events = self.run_dir.rows(EVENTS)
        return RunEnd(
            self.ended,
            self.seconds,
            fault_times=tuple(self.fault_times),
            rows=self.rows(),
            events=events,
            left=leftovers,
        )

    def _inject_faults(self, process: subprocess.Popen[bytes]) -> None:
        """Apply each external fault when the run reaches its step."""
        while self._faults and process.poll() is None:
            fault = self._faults[0]
            if self._step() < fault.step:
                time.sleep(0.01)
                continue
            self._faults.pop(0)
            self.fault_times.append(time.time())
            self._apply(fault, process)

    def _apply(self, fault: ExternalFault, process: subprocess.Popen[bytes]) -> None:
        match fault.kind:
            case "driver":
                process.kill()
            case "controller":
                external_faults.kill(int(self._status()["pid"]))
            case "node":
                external_faults.lose_node(self._cluster, self._node_of(fault.rank))
            case "drain":
                external_faults.drain_node(self._cluster, self._node_of(fault.rank))
            case "flip" | "torn":
                command = [sys.executable, "-m", "orchestrator", "stop", str(self.folder)]
                subprocess.run(command, check=False, capture_output=True, timeout=TRIAL_TIMEOUT)
                process.wait(TRIAL_TIMEOUT)
                shard = external_faults.newest_shard(self.folder / COMMITS)
                (external_faults.flip_bit if fault.kind == "flip" else external_faults.truncate)(shard)
            case "outage" | "full":
                folder = self.folder / COMMITS if fault.kind == "outage" else self.folder
                with (
                    external_faults.outage(folder) if fault.kind == "outage" else external_faults.full(folder)
                ):
                    time.sleep(fault.seconds)

    def _step(self) -> int:
        rows = self.rows()
        return int(rows[-1]["step"]) if rows else 0

    def _status(self) -> dict[str, Any]:
        return dict(self.run_dir.read_json("status.json"))

    def _node_of(self, rank: int) -> str:
        def node() -> str:
            return next((str(r["node"]) for r in self._status()["ranks"] if r["rank"] == rank), "")

        return str(wait_for(node, f"rank {rank} to have a node", 30.0))
