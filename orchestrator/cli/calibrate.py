"""The command calibrate: measure this machine for the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import Json, emit, existing_run, on_this_machine, table
from orchestrator.config.errors import InputError


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(calibrate)


def calibrate(
    to: Annotated[
        Path | None,
        typer.Option(
            parser=on_this_machine,
            help="file for the profile [default: ~/.orchestrator/machine.yaml, which plans and runs here use]",
        ),
    ] = None,
    from_run: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="refine the profile with a run that ended here, instead of measuring",
        ),
    ] = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="undo the last refinement, and remove its record")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure this machine in about a minute, so that plans for its CPUs are right."""
    from orchestrator.planner.device import TIME_SLICE
    from orchestrator.planner.device_profile import calibrated_path, check_stores, store
    from orchestrator.verify.calibrate import calibrate as measure

    path = to or calibrated_path()
    if path is None:
        raise InputError("this user has no home folder to store it in", "HOME", "name a file with --to")
    if from_run is not None or undo:
        _refine(from_run, undo, path, as_json)
        return
    check_stores(path)
    profile = measure()
    store(profile, path)
    if as_json:
        emit({"path": str(path), "profile": profile.model_dump(mode="json")})
        return
    message = profile.message or profile.collective
    rows = [
        ["matrix multiplication, fp32", f"{profile.peak.fp32 * profile.matrix.share / 1e9:.0f} GFLOP/s"],
        ["matrix multiplication, bf16", f"{profile.peak.bf16 * profile.matrix.share / 1e9:.0f} GFLOP/s"],
        ["memory", f"{profile.memory_bandwidth.value / 1e9:.1f} GB/s"],
        ["an operation's launch", f"{profile.launch.value * 1e6:.0f} us"],
        ["a collective's beginning and end", f"{profile.collective.value * 1e6:.0f} us"],
        ["more behind computation", f"{profile.waking.value:.0%} of it, up to {TIME_SLICE * 1e3:.0f} ms"],
        ["a message's, between stages", f"{message.value * 1e6:.0f} us"],
        ["latency between processes", f"{profile.inside.latency * 1e6:.0f} us"],
        ["bytes between processes", f"{profile.inside.bandwidth / 1e9:.2f} GB/s"],
        ["computation beside another process", f"{profile.crowding.value:.1f} times as long"],
        ["a step beyond its least, in the mean", f"{profile.delay.value:.1%}"],
    ]
    table("A core of this machine", ["what", "measured"], rows)
    print(f"{path} is written")


def _refine(run_dir: str | None, undo: bool, path: Path, as_json: bool) -> None:
    """Refine the profile in a file with a run, or undo the last refinement."""
    from orchestrator.planner.demand import demand_of
    from orchestrator.planner.device_profile import read, store
    from orchestrator.resolve.resolved_job import resolve
    from orchestrator.verify import refine

    if run_dir is not None and undo:
        raise InputError("give one of them", "--from, --undo", "undo first, then refine")
    if run_dir is None:
        profile = refine.undo(path)
        last = read(path).refined[-1]
    else:
        run, spec = existing_run(run_dir)
        profile = refine.refine(demand_of(spec), lambda: resolve(spec).shape, run, path)
        last = profile.refined[-1]
    store(profile, path)
    if as_json:
        emit({"path": str(path), "undone": undo, "refinement": last.model_dump(mode="json")})
        return
    rows = [
        [change.figure, *(f"{value:.4g}" for value in (change.before, change.after)[:: -1 if undo else 1])]
        for change in last.changes
    ]
    ratios = ", ".join(f"{part} {ratio:.2f}" for part, ratio in last.ratios.items())
    table(f"{path}, by {last.run}", ["figure", "before", "after"], rows)
    print("taken back" if undo else f"measured over predicted: {ratios}; calibrate --undo takes it back")
