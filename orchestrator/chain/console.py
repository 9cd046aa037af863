"""Show a chain on standard error while it runs, and its stages as a table."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import IO, Any

from orchestrator.observe.console import LINE_SECONDS
from orchestrator.observe.formatting import head


class ChainDisplay:
    """One line about the running stages: live on a terminal, elsewhere every ten seconds and at every new phase."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._phases: Any = None
        self._printed_at = -LINE_SECONDS

    def __enter__(self) -> ChainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal and self._phases is not None:
            print(file=self._stream)

    def update(self, stages: Mapping[str, Any]) -> None:
        """Show the running stages, by name, each with the status of its run."""
        phases = {name: (stage.get("phase"), stage.get("attempt")) for name, stage in stages.items()}
        recent = time.monotonic() - self._printed_at < LINE_SECONDS
        if not self._terminal and phases == self._phases and recent:
            return
        self._phases = phases
        self._printed_at = time.monotonic()
        text = "  |  ".join(line(name, stage) for name, stage in stages.items())
        with contextlib.suppress(BrokenPipeError):  # the reader has gone; the chain continues
            if self._terminal:
                print(f"\r\x1b[2K{text}", end="", file=self._stream, flush=True)
            elif text:
                print(text, file=self._stream, flush=True)


def line(name: str, status: Mapping[str, Any]) -> str:
    """Return a running stage as text, with phase, step and loss."""
    parts = [f"{name}: {head(status)}"]
    if status.get("step"):
        parts.append(f"step {status['step']}/{status.get('steps') or '?'}")
    if status.get("loss") is not None:
        parts.append(f"loss {status['loss']:.4f}")
    return " ".join(parts)


COLUMNS = ["stage", "state", "begins with", "step", "loss", "keeps", "run directory", "why"]


def rows(progress: Mapping[str, Any]) -> list[list[str]]:
    """Return the table rows for the content of chain.json."""
    return [
        [
            stage["stage"],
            stage["state"],
            _base(stage),
            f"{stage['step']} of {stage['steps']}" if stage["steps"] else "-",
            "-" if stage["loss"] is None else f"{stage['loss']:.4f}",
            "-" if stage.get("share") is None else f"{100 * stage['share']:.1f} %",
            stage["run_dir"],
            stage["reason"] or "",
        ]
        for stage in progress["stages"]
    ]


def _base(stage: Mapping[str, Any]) -> str:
    base = stage["begins_with"]
    if base is None:
        return "-"
    return f"{base['stage']}@{base['tag'] if base['step'] is None else base['step']}"
