"""Options that several `cluster render` commands share."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

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
PerNode = Annotated[
    int | None,
    typer.Option(min=1, max=4096, help="workers on one node [default: parallel.tp, which must share one]"),
]
Overlay = Annotated[
    Path | None,
    typer.Option(
        "--overlay",
        metavar="FILE",
        parser=on_this_machine,
        help="YAML file whose fields are merged into what is written; a null removes a field",
    ),
]


@dataclass(frozen=True)
class Machines:
    """Options of the machines that the workers get, spot machines by default."""

    spot: Annotated[
        bool,
        typer.Option("--spot/--on-demand", help="place workers on spot machines, which may be preempted"),
    ] = True
    memory: Annotated[
        float | None,
        typer.Option(
            "--memory-gib",
            min=0.5,
            max=65536,
            callback=finite,
            help="memory of one worker in GiB [default: what it needs; on a cloud's machines all of it]",
        ),
    ] = None
    per_node: PerNode = None
    accelerator: Annotated[
        list[str] | None,
        typer.Option(callback=words, help="device type, such as H100; repeat for alternatives"),
    ] = None


@dataclass(frozen=True)
class OnDemandMachines(Machines):
    """The same options, with on-demand machines by default."""

    spot: Annotated[
        bool,
        typer.Option("--spot/--on-demand", help="place workers on spot machines, which may be preempted"),
    ] = False


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a typer command take groups of options: a parameter whose type is a dataclass, each field an option."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Any]] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if isinstance(parameter.annotation, type) and dataclasses.is_dataclass(parameter.annotation)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name in groups:
            parameters += _options(groups[name])
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def flat(**arguments: Any) -> None:
        values = {
            name: group(**{field.name: arguments.pop(field.name) for field in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        command(**arguments, **values)

    flat.__name__ = command.__name__
    flat.__doc__ = command.__doc__
    # typer reads options from the signature and the annotations.
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {each.name: each.annotation for each in parameters}
    return flat


def _options(group: type[Any]) -> list[inspect.Parameter]:
    """The fields of a dataclass as parameters of a command."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]


def arguments(overrides: Sequence[str] | None) -> list[str]:
    """The overrides of a job as arguments of a command."""
    return [part for text in overrides or () for part in ("--set", text)]


def job_on_machines(
    path: Path, overrides: Sequence[str] | None, image: str | None, machines: Machines
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
        every=spec.all_workers,
        image=image,
        spot=machines.spot,
        per_node=machines.per_node,
        accelerators=tuple(machines.accelerator or ()),
    )
    check_could_run(spec)
    return spec, needs
