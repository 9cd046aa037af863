"""A run on a terminal while it trains: phase, progress, the loss curve, and each rank."""

from __future__ import annotations

import os
import select
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import IO, Any

from orchestrator.config.loss_unit import read_unit
from orchestrator.observe.formatting import count, duration, head

BARS = "▁▂▃▄▅▆▇█"
CURVE = 48
"""Width of the curve in characters; each is a mean over the same number of steps."""
NODES = 8
"""Maximum number of nodes that are shown; the rest is counted."""


class LiveScreen:
    """Lines on a terminal that are redrawn in place and removed at the end."""

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(file=stream), transient=True, refresh_per_second=4)
        self._losses: list[tuple[int, float]] = []
        self._held_out: list[tuple[int, float]] = []
        self._keys = Keys()
        self._live.start()

    def update(self, status: Mapping[str, Any]) -> None:
        """Show a status of the run, see `orchestrator.controller.controller`. Missing keys are left out."""
        _note(self._losses, status.get("step"), status.get("loss"))
        if validation := status.get("validation"):
            _note(self._held_out, validation["step"], next(iter(validation["loss"].values())))
        self._live.update(self.render(status))

    def is_left(self) -> bool:
        """Return whether q was pressed."""
        return self._keys.pressed(b"q")

    def stop(self) -> None:
        """Remove the lines."""
        self._keys.close()
        self._live.stop()

    def render(self, status: Mapping[str, Any]) -> Any:
        """Return the lines to draw."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        first = Table.grid(padding=(0, 2, 0, 0))
        cells: list[Any] = [Spinner("dots"), Text(head(status), style="bold")]
        step = status.get("step") or 0
        steps = status.get("steps")
        if steps and status.get("phase") == "train":
            cells += [ProgressBar(total=steps, completed=step, width=24), Text(f"{step}/{steps}")]
            cells += [Text(f"{duration(status['eta_seconds'])} left")] if status.get("eta_seconds") else []
        elif steps and step:
            cells.append(Text(f"step {step}/{steps}"))
        first.add_row(*cells)
        lines: list[Any] = [first]
        texts = [self._speed(status), self._validation(status), standing(status), *notes(status)]
        texts += [*ranks(status), *latest_events(status)]
        lines += [Text(line, no_wrap=True, overflow="ellipsis") for line in texts if line]
        lines += [Text("q leaves this screen; the run continues", style="dim")] if self._keys.open else []
        return Group(*lines)

    def _validation(self, status: Mapping[str, Any]) -> str:
        if not (results := status.get("validation")):
            return ""
        name, loss = next(iter(results["loss"].items()))
        return f"{name} {loss:.4f} at step {results['step']}  {curve(self._held_out)}"

    def _speed(self, status: Mapping[str, Any]) -> str:
        parts = (
            [f"loss {status['loss']:.4f}  {curve(self._losses)}"] if status.get("loss") is not None else []
        )
        if status.get("tokens_per_second") is not None:
            parts.append(f"{count(status['tokens_per_second'])} {read_unit(status.get('objective') or '')}/s")
        if status.get("mfu") is not None:
            parts.append(f"MFU {status['mfu']:.1%}")
        return "  ".join([*parts, *([str(status["layout"])] if status.get("layout") else [])])


class Keys:
    """Read single key presses from the terminal. Yields nothing when there is no terminal."""

    def __init__(self) -> None:
        self.open = False
        try:
            import termios
            import tty

            if not (sys.stdin.isatty() and os.getpgrp() == os.tcgetpgrp(sys.stdin.fileno())):
                return  # in the background, the terminal belongs to another process
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
            self.open = True
        except (ImportError, OSError, ValueError, AttributeError):
            return

    def pressed(self, key: bytes) -> bool:
        """Return whether the key was pressed since the last call. Other keys are discarded."""
        data = b""
        while self.open and select.select([sys.stdin], [], [], 0)[0]:
            more = os.read(sys.stdin.fileno(), 1024)
            if not more:
                break
            data += more
        return key in data.lower()

    def close(self) -> None:
        """Restore the terminal."""
        if self.open:
            import termios

            self.open = False
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)


def _note(points: list[tuple[int, float]], step: int | None, value: float | None) -> None:
    if step is None or value is None:
        return
    while points and points[-1][0] >= step:  # the run went back to a commit
        points.pop()
    points.append((step, value))


def standing(status: Mapping[str, Any]) -> str:
    """Return goodput, memory beside the planned memory, and the cost so far."""
    parts = [f"goodput about {status['goodput']:.0%}"] if status.get("goodput") is not None else []
    if status.get("memory_bytes"):
        planned = status.get("predicted_memory_bytes")
        of = f" of {planned / 2**30:.2f} GiB planned" if planned else " GiB"
        parts.append(f"memory {status['memory_bytes'] / 2**30:.2f}{of}")
    if status.get("usd"):
        parts.append(f"{status['usd']:.2f} USD so far")
    return "  ".join(parts)


def latest_events(status: Mapping[str, Any]) -> list[str]:
    """Return the last events, each with the time of day (UTC)."""
    events = [event for event in status.get("latest_events") or () if event.get("time")]
    return [
        f"{time.strftime('%H:%M:%S', time.gmtime(event['time']))} {event['phase']}: {event['reason']}"
        for event in events
    ]


def curve(losses: Sequence[tuple[int, float]]) -> str:
    """Return the losses (step, loss) as a line of at most CURVE bars. Values that are not numbers are gaps."""
    size = -(-len(losses) // CURVE) or 1
    groups = [[loss for _, loss in losses[at : at + size]] for at in range(0, len(losses), size)]
    means = [sum(group) / len(group) for group in groups]
    finite = [mean for mean in means if abs(mean) < float("inf")]
    if not finite:
        return ""
    low = min(finite)
    span = (max(finite) - min(finite)) or 1.0
    return "".join(
        BARS[round((mean - low) / span * (len(BARS) - 1))] if abs(mean) < float("inf") else " "
        for mean in means
    )


def notes(status: Mapping[str, Any]) -> list[str]:
    """Return what the run waits for, what is being evaluated, and why a step takes as long as it does."""
    return [str(status[key]) for key in ("note", "evaluation", "why_slow") if status.get(key)]


def ranks(status: Mapping[str, Any]) -> list[str]:
    """Return one line for each node: its utilisation and its ranks, with their state if not running, and how far some
    are behind.
    """
    by_node: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for rank in status.get("ranks") or ():
        by_node[str(rank["node"])].append(rank)
    newest = max((rank["step"] for of in by_node.values() for rank in of), default=0)
    read = status.get("nodes") or {}
    lines = [
        f"{node}: {', '.join(_rank(rank, newest) for rank in of)}{_node(read.get(node) or {})}"
        for node, of in by_node.items()
    ]
    more = [f"and {len(lines) - NODES} more nodes"] if len(lines) > NODES else []
    return [*lines[:NODES], *more]


def _rank(rank: Mapping[str, Any], newest: int) -> str:
    state = "" if rank["state"] == "running" else f" {rank['state']}"
    behind = newest - rank["step"]
    return f"rank {rank['rank']}{state}" + (f" {behind} steps behind" if behind > 1 else "")


def _node(values: Mapping[str, float]) -> str:
    shown = {"CPU": "cpu_utilization_percentage", "memory": "system_memory_usage_percentage"}
    parts = [f"{name} {values[key]:.0f}%" for name, key in shown.items() if key in values]
    gpus = [
        value
        for key, value in values.items()
        if key.startswith("gpu_") and key.endswith("_utilization_percentage")
    ]
    parts += [f"GPUs {sum(gpus) / len(gpus):.0f}%"] if gpus else []
    return f"  ({', '.join(parts)})" if parts else ""
