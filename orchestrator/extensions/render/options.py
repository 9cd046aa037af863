"""Options that several `cluster render` commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import finite, on_this_machine, word, words

if TYPE_CHECKING:
    from orchestrator.config.spec import JobSpec
    from orchestrator.extensions.render.cluster_needs import ClusterNeeds

To = Annotated[
    Path | None,
    typer.Option("--to", metavar="DIR", parser=on_this_machine, help="write files there [default: print]"),
]
Image = Annotated[
    str,
    typer.Option(
        callback=word,
        help="the container image, by the name at which nodes get it, such as REGISTRY/training-orchestrator:cpu; "
        "infra/Dockerfile builds it, :cpu and :cuda",
    ),
]
Spot = Annotated[
    bool, typer.Option("--spot/--on-demand", help="place workers on spot machines, which may be preempted")
]
Memory = Annotated[
    float | None,
    typer.Option(
        "--memory-gib",
        min=0.5,
        max=65536,
        callback=finite,
        help="memory of one worker in GiB [default: what it needs; on a cloud's machines all of it]",
    ),
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
    """The overrides of a job as arguments of a command."""
    return [part for text in overrides or () for part in ("--set", text)]


def job_on_machines(
    path: Path,
    overrides: Sequence[str] | None,
    image: str | None,
    spot: bool,
    per_node: int | None,
    accelerators: Sequence[str] | None,
) -> tuple[JobSpec, ClusterNeeds]:
    """The job, its paths as written since they are those of the machines, and the machines that it needs.

    Raises InputError if the job is wrong, carries a secret or could run nowhere.
    """
    from orchestrator.config.spec import load
    from orchestrator.extensions.render.manifests import refuse_secrets
    from orchestrator.extensions.render.model import check_could_run
    from orchestrator.extensions.render.needs import needed_machines

    spec = load(path, overrides or ())
    refuse_secrets(spec.model_dump(mode="json"), path)
    needs = needed_machines(
        name=spec.name,
        resources=spec.resources,
        parallel=spec.parallel,
        beside=spec.workers_beside,
        image=image,
        spot=spot,
        per_node=per_node,
        accelerators=tuple(accelerators or ()),
    )
    check_could_run(spec)
    return spec, needs
