"""Measure exports in alternating rounds: each in its own process, all on the same rows, a few passes at a time."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from cluster.workers.json_lines import Lines, line_of
from cluster.workers.program import command_of, environment_of_ranks
from orchestrator.bench.export_folder import ExportFolder
from orchestrator.bench.inputs import CLASSES, Inputs
from orchestrator.config.metric_names import larger_is_better
from orchestrator.observe.formatting import duration

PROGRAM = "orchestrator.bench.worker"
LOAD_TIMEOUT = 600.0
"""Seconds for a process to import its runtime and load a model from slow storage."""
PASS_TIMEOUT = 600.0
"""Seconds for the passes of one request."""
GRACE = 5.0
"""Seconds for a process to end after its input has ended."""
TOKENS_AT_ONCE = 4
"""Samples of a language model that are scored at once: their logits are [samples, length, vocabulary]."""
SAMPLES_AT_ONCE = 32
"""Samples of a classifier that are scored at once."""
PASSES = 5
"""Passes of a single sample in each round of an export. A larger batch takes as long as these together, so it makes
one pass."""
Tell = Callable[[Mapping[str, Any]], None]
"""Shows how far the measurement is, with the keys of `ProgressDisplay.update`."""


@dataclass(frozen=True)
class Speed:
    """How fast an export computes a batch: seconds of a pass, and tokens per second, without padding."""

    batch: int
    p50: float
    p95: float
    tokens_per_second: float


@dataclass(frozen=True)
class Measured:
    """The measurements of an export.

    Attributes:
        export: the export.
        metrics: its metrics on the held-out samples, by name, computed from its own runtime's outputs.
        memory: resident memory of its process after it has loaded the model and read one sample, in bytes; 0 if the
            system does not report it.
        load_seconds: seconds to load it.
        speeds: how fast it computes, for each size of a batch.
    """

    export: ExportFolder
    metrics: Mapping[str, float]
    memory: int
    load_seconds: float
    speeds: Sequence[Speed]

    def share(self, metric: str, first: Measured) -> float:
        """Return which share of the first export's metric this one keeps; above 1 if it is better.

        For a metric whose smallest value is the best, it is the first's value divided by this one's.
        """
        ours, theirs = self.metrics[metric], first.metrics[metric]
        if not larger_is_better(metric):
            ours, theirs = theirs, ours
        return ours / theirs if theirs else math.nan


class ExportFailed(RuntimeError):
    """An export cannot be loaded or run; one line that names it and says why."""


class ExportProcess:
    """The process of an export, see `orchestrator.bench.worker`."""

    def __init__(self, export: ExportFolder, inputs: Path, threads: int) -> None:
        self._name = export.name
        environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        command = command_of(PROGRAM, export.path, str(export.runtime), str(inputs), str(threads))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment_of_ranks() | environment
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._lines = Lines(self._process.stdout.fileno())

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the reply. Raises ExportFailed."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing reply says it
            self._process.stdin.write(line_of(question))
            self._process.stdin.flush()
        return self.reply(PASS_TIMEOUT)

    def reply(self, seconds: float) -> dict[str, Any]:
        """Return the next reply, which has to come within that time. Raises ExportFailed."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._lines, selectors.EVENT_READ)
            while (reply := self._lines.take()) is None:
                if not selector.select(deadline - time.monotonic()):
                    raise ExportFailed(f"{self._name} has not answered for {duration(seconds)}")
                if not self._lines.fill():
                    code = self._process.wait(GRACE)
                    raise ExportFailed(f"{self._name}: its process ended with code {code}")
        if "error" in reply:
            raise ExportFailed(f"{self._name}: {' '.join(reply['error'].split())}")
        return reply

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def measure_exports(
    exports: Sequence[ExportFolder],
    inputs: Sequence[Inputs],
    batches: Sequence[int],
    rounds: int,
    threads: int,
    tell: Tell,
    known: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> list[Measured]:
    """Return what was measured of each export.

    Speeds are measured in alternating rounds: in each round every export makes a few passes over the same rows. So
    whatever else the machine does slows all of them. Only one export computes at a time.

    Args:
        exports: the exports.
        inputs: their held-out samples, in the same order.
        batches: numbers of samples in a batch.
        rounds: number of rounds of each export; 0 to measure no speed.
        threads: number of threads of each process.
        tell: shows the progress.
        known: metrics on these samples that were measured before, by the export's folder; they are not measured again.

    Raises:
        ExportFailed: an export cannot be loaded or run.
    """
    with _started(exports, inputs, threads, tell) as processes:
        loaded = [process.reply(LOAD_TIMEOUT) for process in processes]
        metrics = [
            known.get(export.path) or _metrics(process, export, each, tell)
            for process, export, each in zip(processes, exports, inputs, strict=True)
        ]
        timed = _timed(processes, batches, rounds, tell)
    return [
        Measured(
            export,
            measured,
            memory=begin["memory"],
            load_seconds=begin["seconds"],
            speeds=[_speed(batch, times[batch]) for batch in batches] if rounds else [],
        )
        for export, measured, begin, times in zip(exports, metrics, loaded, timed, strict=True)
    ]


@contextlib.contextmanager
def _started(
    exports: Sequence[ExportFolder], inputs: Sequence[Inputs], threads: int, tell: Tell
) -> Iterator[list[ExportProcess]]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, contextlib.ExitStack() as stack:
        processes = []
        for number, (export, each) in enumerate(zip(exports, inputs, strict=True)):
            tell({"phase": "load", "note": export.name})
            path = Path(folder) / f"{number}.safetensors"
            each.write(path)
            process = ExportProcess(export, path, threads)
            stack.callback(process.close)
            processes.append(process)
        yield processes


def _metrics(process: ExportProcess, export: ExportFolder, inputs: Inputs, tell: Tell) -> dict[str, float]:
    """Return the metrics of an export on all of its samples."""
    size = SAMPLES_AT_ONCE if inputs.predicts_classes else TOKENS_AT_ONCE
    loss = 0.0
    count = 0
    correct = 0
    predictions: list[int] = []
    for first in range(0, inputs.samples, size):
        tell({"phase": "score", "note": export.name, "step": first, "steps": inputs.samples})
        reply = process.ask({"first": first, "count": min(size, inputs.samples - first)})
        loss += reply["loss"]
        count += reply["count"]
        correct += reply["correct"]
        predictions += reply.get("predictions", [])
    if not count:
        raise ExportFailed(f"{export.name} predicts nothing in these rows")
    result = {"accuracy": correct / count, "loss": loss / count}
    if inputs.predicts_classes:
        from workloads.objectives.metrics import measure

        wanted = inputs.arrays[CLASSES].tolist()
        result["f1"] = measure("f1", predictions, wanted, classes=len(inputs.labels))
    else:
        result["perplexity"] = math.exp(min(result["loss"], 700.0))
        if inputs.tokens_per_byte:
            result["bits_per_byte"] = result["loss"] / math.log(2) * inputs.tokens_per_byte
    return result


def _timed(
    processes: Sequence[ExportProcess], batches: Sequence[int], rounds: int, tell: Tell
) -> list[dict[int, list[tuple[float, int]]]]:
    """Return, for each process and size of a batch, the seconds and the tokens of each pass."""
    result: list[dict[int, list[tuple[float, int]]]] = [{batch: [] for batch in batches} for _ in processes]
    started = time.monotonic()
    for number in range(-1, rounds if rounds else -1):  # the first round warms up and does not count
        status: dict[str, Any] = {"phase": "time", "step": max(number, 0), "steps": rounds}
        if number > 0:
            status["eta_seconds"] = (time.monotonic() - started) / (number + 1) * (rounds - number)
        tell(status)
        for process, times in zip(processes, result, strict=True):
            for batch in batches:
                passes = PASSES if batch == 1 else 1
                request = {"first": max(number, 0) * batch, "count": batch, "passes": passes}
                reply = process.ask(request)
                if number >= 0:
                    times[batch] += [(seconds, reply["tokens"]) for seconds in reply["pass_seconds"]]
    return result


def _speed(batch: int, passes: Sequence[tuple[float, int]]) -> Speed:
    seconds = np.array([each for each, _ in passes])
    p50, p95 = np.percentile(seconds, [50, 95])
    return Speed(batch, float(p50), float(p95), sum(tokens for _, tokens in passes) / float(seconds.sum()))


def to_json(rows: Sequence[Measured], metric: str) -> list[dict[str, Any]]:
    """Return what was measured as plain values, with the share of the first export's metric and bytes."""
    first = rows[0]
    return [
        {
            "export": row.export.name,
            "folder": row.export.path,
            "runtime": str(row.export.runtime),
            "metrics": dict(row.metrics),
            "metric": metric,
            "share": row.share(metric, first),
            "parameters": row.export.parameters,
            "weights_bytes": row.export.weights_bytes,
            "smaller": first.export.weights_bytes / row.export.weights_bytes,
            "memory_bytes": row.memory,
            "load_seconds": row.load_seconds,
            "speeds": [
                {
                    "batch": speed.batch,
                    "p50_seconds": speed.p50,
                    "p95_seconds": speed.p95,
                    "tokens_per_second": speed.tokens_per_second,
                    "faster": before.p50 / speed.p50,
                }
                for speed, before in zip(row.speeds, first.speeds, strict=True)
            ],
        }
        for row in rows
    ]
