"""The command calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import Json, emit, on_this_machine, table


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(calibrate)


def calibrate(
    to: Annotated[
        Path | None,
        typer.Option(
            parser=on_this_machine,
            help="write the profile there [default: ~/.orchestrator/machine.yaml, which plans and runs here use]",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine in under a minute, so that plans for its processors are right."""
    from orchestrator.planning.profile import store, stored_at
    from orchestrator.verify.calibrate import calibrate as measure

    found = measure()
    path = to or stored_at()
    store(found, path)
    if as_json:
        emit({"path": str(path), "profile": found.model_dump(mode="json")})
        return
    rows = [
        ["matrix products, fp32", f"{found.peak.fp32 * found.matrix.share / 1e9:.0f} GFLOP/s"],
        ["matrix products, bf16", f"{found.peak.bf16 * found.matrix.share / 1e9:.0f} GFLOP/s"],
        ["memory", f"{found.memory_bandwidth.value / 1e9:.1f} GB/s"],
        ["an operation's launch", f"{found.launch.value * 1e6:.0f} us"],
        ["a message between processes", f"{found.inside.latency * 1e6:.0f} us"],
        ["bytes between processes", f"{found.inside.bandwidth / 1e9:.2f} GB/s"],
    ]
    table("A core of this machine", ["what", "measured"], rows)
    print(f"{path} is written")
