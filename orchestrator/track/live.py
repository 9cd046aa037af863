"""A run on a terminal while it trains: phase, progress, the curve of the loss, and each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import IO, Any

from orchestrator.track.words import count, duration, head

BARS = "▁▂▃▄▅▆▇█"
CURVE = 48
"""Characters of the curve, each a mean over as many steps."""
NODES = 8
"""Nodes that are shown; of more, how many there are."""


class LiveScreen:
    """Some lines on a terminal that are drawn again and again, and are gone at the end."""

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(file=stream), transient=True, refresh_per_second=4)
        self._losses: list[tuple[int, float]] = []
        self._live.start()

    def update(self, status: Mapping[str, Any]) -> None:
        """Show a status of the run, see `orchestrator.control.status`; missing keys are left out."""
        self._note_loss(status.get("step"), status.get("loss"))
        self._live.update(self.render(status))

    def stop(self) -> None:
        """Take the lines away."""
        self._live.stop()

    def render(self, status: Mapping[str, Any]) -> Any:
        """The lines as they are drawn."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        first = Table.grid(padding=(0, 2, 0, 0))
        cells: list[Any] = [Spinner("dots"), Text(head(status), style="bold")]
        step, steps = status.get("step") or 0, status.get("steps")
        if steps and status.get("phase") == "train":
            cells += [ProgressBar(total=steps, completed=step, width=24), Text(f"{step}/{steps}")]
            cells += [Text(f"{duration(status['eta_seconds'])} left")] if status.get("eta_seconds") else []
        elif steps and step:
            cells.append(Text(f"step {step}/{steps}"))
        first.add_row(*cells)
        lines: list[Any] = [first]
        lines += [Text(line) for line in [self._speed(status), *notes(status), *ranks(status)] if line]
        return Group(*lines)

    def _speed(self, status: Mapping[str, Any]) -> str:
        parts = (
            [f"loss {status['loss']:.4f}  {curve(self._losses)}"] if status.get("loss") is not None else []
        )
        if status.get("tokens_per_second") is not None:
            parts.append(f"{count(status['tokens_per_second'])} tokens/s")
        if status.get("mfu") is not None:
            parts.append(f"MFU {status['mfu']:.1%}")
        return "  ".join([*parts, *([str(status["layout"])] if status.get("layout") else [])])

    def _note_loss(self, step: int | None, loss: float | None) -> None:
        if step is None or loss is None:
            return
        while self._losses and self._losses[-1][0] >= step:  # the run went back to a commit
            self._losses.pop()
        self._losses.append((step, loss))


def curve(losses: Sequence[tuple[int, float]]) -> str:
    """The losses (step, loss) as a line of bars, at most CURVE of them; what is no number is a gap."""
    size = -(-len(losses) // CURVE) or 1
    groups = [[loss for _, loss in losses[at : at + size]] for at in range(0, len(losses), size)]
    means = [sum(group) / len(group) for group in groups]
    finite = [mean for mean in means if abs(mean) < float("inf")]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        BARS[round((mean - low) / span * (len(BARS) - 1))] if abs(mean) < float("inf") else " "
        for mean in means
    )


def notes(status: Mapping[str, Any]) -> list[str]:
    """What is waited for, what is evaluated, and why a step takes as long as it does."""
    return [str(status[key]) for key in ("note", "evaluation", "why_slow") if status.get(key)]


def ranks(status: Mapping[str, Any]) -> list[str]:
    """A line for each node: its ranks, with the state of those that do not run, and how far some are behind."""
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for rank in status.get("ranks") or ():
        found[str(rank["node"])].append(rank)
    newest = max((rank["step"] for of in found.values() for rank in of), default=0)
    lines = [f"{node}: {', '.join(_rank(rank, newest) for rank in of)}" for node, of in found.items()]
    more = [f"and {len(lines) - NODES} more nodes"] if len(lines) > NODES else []
    return [*lines[:NODES], *more]


def _rank(rank: Mapping[str, Any], newest: int) -> str:
    state = "" if rank["state"] == "running" else f" {rank['state']}"
    behind = newest - rank["step"]
    return f"rank {rank['rank']}{state}" + (f" {behind} steps behind" if behind > 1 else "")
