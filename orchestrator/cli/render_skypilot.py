"""The command cluster render skypilot: a managed job of SkyPilot that starts Ray on its nodes and runs a job there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import Job, Set, word
from orchestrator.cli.render_options import Accelerator, Memory, PerNode, Spot, To, arguments, job_on_machines
from orchestrator.config.errors import InputError


def skypilot(
    job: Job,
    runs: Annotated[str, typer.Option(callback=word, help="where runs are kept: a URI")],
    overrides: Set = None,
    to: To = None,
    infra: Annotated[
        str | None, typer.Option(callback=word, help="cloud/region/zone or k8s/context [default: any]")
    ] = None,
    image: Annotated[str | None, typer.Option(callback=word, help="container image with the program")] = None,
    setup: Annotated[
        str, typer.Option(help="what installs the program where there is no --image")
    ] = "pip install training-orchestrator",
    python: Annotated[str, typer.Option(callback=word, help="its Python on the nodes")] = "python",
    spot: Spot = True,
    memory: Memory = None,
    per_node: PerNode = None,
    accelerator: Accelerator = None,
    notice: Annotated[
        int, typer.Option(min=10, max=3600, help="seconds before a machine goes in which the run commits")
    ] = 100,
) -> None:
    """A task file for SkyPilot, for `sky jobs launch`: it is started again after a preemption, and the run goes on."""
    from cluster.render.skypilot import TOKEN, SkyPilotOptions, task_file
    from orchestrator.launch import rendering
    from orchestrator.launch.rendering_memory import with_host_memory
    from orchestrator.storage.uri import check_uri, is_local

    spec, needs = job_on_machines(job, overrides, image, spot, per_node, accelerator)
    rendering.no_password(runs, "--runs")
    rendering.no_password(setup, "--setup")
    check_uri(runs, "--runs")
    if is_local(runs) or runs.split("://")[0] in ("memory", "http", "https"):
        raise InputError(
            f"{runs!r} would be lost with the machine", "--runs", "give a URI, such as s3://bucket/runs"
        )
    rendering.refuse_labels(spec, "SkyPilot", "task")
    if needs.gpu and not needs.accelerators:
        raise InputError(
            "the job needs GPUs, and SkyPilot asks which", "--accelerator", "name one, such as H100"
        )
    needs, memory_note = with_host_memory(spec, needs, memory)
    place, path = f"{runs.rstrip('/')}/{spec.name}", Path(job).absolute()
    command = [python, "-P", "-m", "orchestrator", "run", path.name, "--run-dir", place]
    command += arguments(overrides)
    options = SkyPilotOptions(str(path.parent), infra or "", image or "", "" if image else setup, notice)
    text = f"{rendering.MARK}\n{task_file(needs, options, command, python)}"
    rendering.write_text(f"{needs.name}.sky.yaml", text, to)
    rendering.warn_of_local_paths(spec)
    rendering.warn_of_libraries(spec, runs)
    rendering.note(memory_note)
    if to is not None:
        secret = f"--secret {TOKEN}=$(openssl rand -hex 32)"
        rendering.note(f"start it by: sky jobs launch {secret} {needs.name}.sky.yaml")
