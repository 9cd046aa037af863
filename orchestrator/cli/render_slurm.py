"""The command cluster render slurm: a batch file that starts Ray on an allocation and runs a job there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import Job, Set, word, words
from orchestrator.cli.render_options import PerNode, To, arguments, job_on_machines
from orchestrator.config.errors import InputError

TIME = re.compile(r"\d+(-\d+(:\d+){0,2}|(:\d+){0,2})")


def slurm(
    job: Job,
    runs: Annotated[str, typer.Option(callback=word, help="folder of runs that all nodes see, or a URI")],
    overrides: Set = None,
    to: To = None,
    partition: Annotated[str | None, typer.Option(callback=word, help="the site's partition")] = None,
    account: Annotated[str | None, typer.Option(callback=word, help="who pays")] = None,
    time: Annotated[
        str | None, typer.Option(metavar="D-HH:MM:SS", callback=word, help="time of one allocation")
    ] = None,
    notice: Annotated[
        int, typer.Option(min=30, max=3600, help="seconds before the end in which the run commits")
    ] = 180,
    per_node: PerNode = None,
    more: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", callback=words, help="one more option of sbatch; repeat"),
    ] = None,
) -> None:
    """A batch file for Slurm, for `sbatch`: it is requeued before its time ends, and the run goes on."""
    from cluster.render.slurm import SlurmOptions, batch_file
    from orchestrator.config.paths import absolute
    from orchestrator.launch import rendering

    spec, needs = job_on_machines(job, overrides, None, False, per_node, None)
    rendering.no_password(runs, "--runs")
    for option in more or ():
        rendering.no_password(option, "--sbatch")
    if time is not None and not TIME.fullmatch(time):
        raise InputError("is no time of Slurm", f"--time {time}", "write it as in 1-12:00:00 or 30")
    rendering.refuse_labels(spec, "Slurm", "allocation")
    place = absolute(f"{runs.rstrip('/')}/{spec.name}", Path.cwd())
    command = [
        sys.executable,
        "-P",
        "-m",
        "orchestrator",
        "run",
        str(Path(job).absolute()),
        "--run-dir",
        place,
    ]
    command += arguments(overrides)
    options = SlurmOptions(partition or "", account or "", time or "", notice, tuple(more or ()))
    text = batch_file(needs, options, command, rendering.MARK, sys.executable)
    rendering.write_text(f"{needs.name}.sbatch", text, to)
