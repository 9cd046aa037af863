"""The commands cluster up, add, remove, show and down: real Ray nodes on this machine, to try things."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import Json, emit, finite, on_this_machine, table, word
from orchestrator.config.errors import InputError

if TYPE_CHECKING:
    from cluster.local.local_cluster import LocalCluster
    from cluster.local.node import NodeSpec

MOST = 200
"""Largest number of nodes on one machine: each is a Ray node of some hundred MB."""

Name = Annotated[str, typer.Option(help="name of the cluster, if you have several")]
Cpus = Annotated[
    float,
    typer.Option(
        min=0, max=10**6, callback=finite, help="CPUs that each node offers, whatever the machine has"
    ),
]
Gpus = Annotated[
    float,
    typer.Option(
        min=0, max=10**6, callback=finite, help="GPUs that each node offers, whatever the machine has"
    ),
]
Resources = Annotated[str, typer.Option(metavar="JSON", help='other resources, such as {"TPU": 4}')]
Labels = Annotated[str, typer.Option(metavar="JSON", help='labels, such as {"ray.io/market-type": "spot"}')]
Types = Annotated[
    list[str] | None,
    typer.Option(
        "--labels",
        metavar="JSON",
        help='labels, such as {"ray.io/market-type": "spot"}; repeat for nodes with others',
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    cluster = typer.Typer(
        help="Where jobs run: nodes on this machine, files for Kubernetes and clouds.", no_args_is_help=True
    )
    for verb in (up, show, add, remove, down):
        cluster.command()(verb)
    app.add_typer(cluster, name="cluster")


def up(
    local: Annotated[
        int | None,
        typer.Option(min=0, max=MOST, help="number of nodes besides the head, all on this machine"),
    ] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=on_this_machine,
            help="file of machines for ssh, one per line: [user@]host [cpus=N] [gpus=N] [address=IP]",
        ),
    ] = None,
    most: Annotated[
        int | None,
        typer.Option(
            "--max", min=1, max=MOST, help="let Ray's autoscaler start and stop nodes, up to this many"
        ),
    ] = None,
    cpus: Cpus = 1,
    gpus: Gpus = 0,
    resources: Resources = "{}",
    labels: Types = None,
    idle: Annotated[
        float, typer.Option(min=0, callback=finite, help="seconds before the autoscaler stops an idle node")
    ] = 30.0,
    address: Annotated[
        str | None,
        typer.Option(
            callback=word, help="address of this machine for --hosts [default: as the hosts see it over ssh]"
        ),
    ] = None,
    ssh: Annotated[str, typer.Option(help="ssh command for --hosts, with its options")] = "ssh",
    python: Annotated[
        str | None,
        typer.Option(
            callback=word, help="Python on the hosts that has this program [default: the same path as here]"
        ),
    ] = None,
    name: Name = "local",
    as_json: Json = False,
) -> None:
    """Start a cluster of real Ray nodes with token authentication. --local starts nodes on loopback with made-up
    resources. --hosts starts the head here and a node on each machine of a file."""
    from cluster.local import local_cluster as loopback

    if hosts is not None:
        if local is not None or most is not None:
            raise InputError(
                "names other machines, and --local and --max are for this one", "--hosts", "leave one out"
            )
        _up_on_hosts(
            name, hosts, address=address or "", ssh=ssh, python=python or sys.executable, as_json=as_json
        )
        return
    if local is None:
        raise InputError(
            "the number of nodes is missing",
            "--local",
            "say for example --local 2, or name machines: --hosts FILE",
        )
    kinds = [_node(cpus, gpus, resources, each) for each in labels or ["{}"]]
    if most is not None and most < local:
        raise InputError(f"--max {most} is below --local {local}", "--max", "raise it")
    scaling = ""
    if most is not None:
        from cluster.local.autoscaling_provider import autoscaling_config

        scaling = autoscaling_config(kinds, local, most, idle)
    with _errors_of(name, quiet=True):
        loopback.folder_of(name)
    with _errors_of(name, quiet=True):
        tell = partial(print, file=sys.stderr)
        cluster = loopback.up(name, [] if scaling else kinds * local, scaling, tell=tell)
        _show_new(cluster, as_json)


def _show_new(cluster: LocalCluster, as_json: bool) -> None:
    _show(cluster, as_json)
    if not as_json:
        print("\nThe other commands find it. For Ray's own:\n")
        for key, value in cluster.environment().items():
            print(f"  export {key}={value}")


def _up_on_hosts(name: str, file: Path, address: str, ssh: str, python: str, as_json: bool) -> None:
    from cluster.remote import ssh_cluster
    from cluster.remote.hosts_file import WrongHosts, read_hosts

    try:
        hosts = read_hosts(file)
    except OSError as error:
        raise InputError(
            error.strerror or str(error), f"--hosts {file}", "name a file, one host a line"
        ) from None
    except WrongHosts as error:
        raise InputError(str(error), "--hosts", "see --help") from None
    with _errors_of(name):
        cluster = ssh_cluster.up(name, hosts, ssh_cluster.Ssh(ssh, python), address)
        _show_new(cluster, as_json)


def add(
    nodes: Annotated[int, typer.Argument(min=1, max=MOST, help="number of nodes to add")] = 1,
    cpus: Cpus = 1,
    gpus: Gpus = 0,
    resources: Resources = "{}",
    labels: Labels = "{}",
    name: Name = "local",
    as_json: Json = False,
) -> None:
    """Add nodes to the local cluster."""
    from cluster.local import local_cluster as loopback

    node, cluster = _node(cpus, gpus, resources, labels), _existing(name)
    with _errors_of(name):
        _show(loopback.add(cluster, [node] * nodes), as_json)


def remove(
    node: Annotated[str, typer.Argument(help="its address, as `cluster show` prints it", show_default=False)],
    abruptly: Annotated[
        bool, typer.Option("--abruptly", help="kill it at once, like a power failure")
    ] = False,
    name: Name = "local",
    as_json: Json = False,
) -> None:
    """Remove a node from the local cluster."""
    from cluster.local import local_cluster as loopback

    cluster = _existing(name)
    with _errors_of(name):
        loopback.remove(cluster, node, abruptly)
        _show(loopback.find(name) or cluster, as_json)


def show(name: Name = "local", as_json: Json = False) -> None:
    """Show the nodes of the local cluster."""
    _show(_existing(name), as_json)


def down(name: Name = "local", as_json: Json = False) -> None:
    """Stop the local cluster, and remove all its processes and files."""
    from cluster.local import local_cluster as loopback
    from cluster.remote import ssh_cluster

    with _errors_of(name, quiet=True):
        has_ended, silent = ssh_cluster.down(name)
        elsewhere = loopback.elsewhere(name)
    for line in silent:
        print(f"not ended from here; it ends by itself because the head is gone: {line}", file=sys.stderr)
    for folder, count in elsewhere.items() if not has_ended else ():
        tmpdir = Path(folder).parents[1]
        hint = f"end it with TMPDIR={tmpdir} orchestrator cluster down --name {name}"
        raise InputError(
            f"is not running here; {count} processes of a cluster with that name run elsewhere",
            f"cluster {name}",
            hint,
        )
    if as_json:
        emit({"ended": has_ended} | ({"silent": silent} if silent else {}))
    else:
        print(
            f"the cluster {name!r} is gone" if has_ended else f"there is no cluster {name!r}: nothing to do"
        )


def _existing(name: str) -> LocalCluster:
    from cluster.local import local_cluster as loopback

    with _errors_of(name, quiet=True):
        cluster = loopback.find(name)
    if cluster is None:
        raise InputError("no local cluster is up", name, "start one with `orchestrator cluster up --local 2`")
    return cluster


def _node(cpus: float, gpus: float, resources: str, labels: str) -> NodeSpec:
    from cluster.local.node import NodeSpec

    return NodeSpec(
        folder="",
        ip="",
        cpus=cpus,
        gpus=gpus,
        resources={
            key: float(value) for key, value in _mapping(resources, "--resources", (int, float)).items()
        },
        labels=_mapping(labels, "--labels", (str,)),
    )


def _mapping(text: str, option: str, kinds: tuple[type, ...]) -> dict[str, Any]:
    try:
        mapping = json.loads(text)
    except ValueError as error:
        raise InputError(f"is not JSON ({error})", option, 'write for example {"a": 1}') from None
    if not isinstance(mapping, dict) or not all(isinstance(value, kinds) for value in mapping.values()):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise InputError(f"must be an object whose values are {names}", option, "see --help")
    return mapping


@contextmanager
def _errors_of(name: str, quiet: bool = False) -> Iterator[None]:
    """Turn errors of the local cluster into InputError; unless `quiet`, say first that it takes a while. An
    interruption that leaves a cluster says so."""
    from cluster.local.local_cluster import find
    from cluster.local.node_processes import ClusterError

    if not quiet:
        print("starting and stopping a node takes some seconds", file=sys.stderr)
    try:
        yield
    except ClusterError as error:
        raise InputError(str(error), f"cluster {name}") from None
    except KeyboardInterrupt:
        if find(name) is not None:
            print(f"\nthe cluster {name!r} is up; `orchestrator cluster down` ends it", file=sys.stderr)
        raise


def _show(cluster: LocalCluster, as_json: bool) -> None:
    if as_json:
        emit(cluster.to_json())
        return
    print(f"{cluster.name}: Ray at {cluster.address}, dashboard and Jobs API at {cluster.dashboard}")
    rows = []
    for host in cluster.hosts:
        offered = f"{host['cpus']:g} CPU, {host['gpus']:g} GPU" if "ip" in host else "has not come up"
        rows.append([host.get("ip", ""), host["host"], offered, "", str(host.get("pid", ""))])
    for node in cluster.nodes:
        has = {"CPU": node["cpus"], "GPU": node["gpus"], **node["resources"]}
        offered = (
            ", ".join(f"{value:g} {key}" for key, value in has.items() if value) or "nothing to compute on"
        )
        labels = ", ".join(f"{key}={value}" for key, value in node["labels"].items())
        rows.append(
            [node["ip"], "node" if node["head_address"] else "head", offered, labels, str(node["pid"])]
        )
    table("", ["address", "", "offers", "labels", "pid"], rows)
