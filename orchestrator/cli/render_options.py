"""Options that several commands of cluster render have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import finite, on_this_machine, word, words

To = Annotated[
    Path | None,
    typer.Option("--to", metavar="DIR", parser=on_this_machine, help="write files there [default: print]"),
]
Image = Annotated[
    str | None,
    typer.Option(
        callback=word, help="the container image; infra/Dockerfile builds training-orchestrator:cpu and :cuda"
    ),
]
Spot = Annotated[
    bool, typer.Option("--spot/--on-demand", help="workers on spot machines, which may be preempted")
]
Memory = Annotated[
    float, typer.Option("--memory-gib", min=0.5, max=65536, callback=finite, help="memory of one worker, GiB")
]
PerNode = Annotated[
    int | None,
    typer.Option(min=1, max=4096, help="workers on one node [default: parallel.tp, which must share one]"),
]
Accelerator = Annotated[
    list[str] | None,
    typer.Option(callback=words, help="device type, such as H100; repeat for alternatives"),
]


def arguments(overrides: Sequence[str] | None) -> list[str]:
    """The overrides of a job as words of a command."""
    return [part for text in overrides or () for part in ("--set", text)]
