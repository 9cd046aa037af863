"""The parts of Ray that have no public interface; no other module may import `ray._private`.

They may change with any release of Ray, so its version is pinned (constraints.txt). Each function says what breaks when
its part of Ray changes; `tests/ray` runs all of them on real nodes. Importing this module does not import Ray.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""What the raylet waits for, a file each in the session's folder; -1 is for what is not served."""
ENVIRONMENTS_PORT = "runtime_env_agent_port"
"""The same of the other agent."""
ADDRESS, PORT = "--node-ip-address=", "--runtime-env-agent-port="
"""Arguments of Ray's agent: where it listens."""
LOOK = 1.0
"""Seconds between two looks whether the raylet is there."""


def main() -> None:
    """Write the ports, and wait for the end of the raylet, or for its first request."""
    raylet, (session, *command) = os.getppid(), sys.argv[1:]  # the raylet adds arguments of its own to either
    address = next((part.removeprefix(ADDRESS) for part in command if part.startswith(ADDRESS)), "")
    if address:
        _wait_for_request(raylet, session, address, command)
        return
    for name in PORTS:
        _write_port(session, name, -1)
    while os.getppid() == raylet:
        time.sleep(LOOK)


def _wait_for_request(raylet: int, session: str, address: str, command: list[str]) -> None:
    family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(place)
        listener.listen()
        port = listener.getsockname()[1]
        _write_port(session, ENVIRONMENTS_PORT, port)
        while not select.select([listener], [], [], LOOK)[0]:
            if os.getppid() != raylet:
                return
    os.execv(command[0], [f"{PORT}{port}" if part.startswith(PORT) else part for part in command])


def _write_port(session: str, name: str, port: int) -> None:
    path = os.path.join(session, f"{name}_{os.environ['RAY_NODE_ID']}")
    with open(f"{path}.draft", "w") as file:
        file.write(str(port))
    os.replace(f"{path}.draft", path)


if __name__ == "__main__":
    main()


UPLOAD_LOGGERS = ("ray._private.runtime_env.packaging", "ray._private.runtime_env.working_dir")
"""Ray's loggers of package uploads. If their names change, every `submit` logs its uploads."""
MAIN_PROCESSES = ("raylet", "gcs_server")
"""Ray's names of the processes without which a node is no longer part of a cluster."""
REGISTERED = 10.0
"""Seconds that are waited for a raylet with looks that follow soon; then Ray's own."""
SESSION, AGENT = "--session_dir=", "--dashboard_agent_command="
ENVIRONMENTS = "--runtime_env_agent_command="
"""Arguments of a raylet: its session's folder, and the commands of the two agents that it starts."""
LEAST_FREE = 2**20
"""Bytes below which a disk is full."""
NODE_TIMEOUT = 60
"""Seconds for a started node to be registered with its head."""


def free_resources_by_node() -> dict[str, dict[str, float]]:
    """Free resources by node id. Without it only the total of the cluster is known: gangs could not tell whether
    ranks that must share a node fit on one."""
    from ray._private.state import available_resources_per_node

    found: dict[str, dict[str, float]] = available_resources_per_node()
    return found


def draining_nodes(timeout: float) -> frozenset[str]:
    """Ids of the nodes that are being drained; empty if the head does not answer within `timeout` seconds. Without it
    a preempted node keeps its ranks until it dies, and may get new ones."""
    from ray._private.worker import global_worker
    from ray.exceptions import RayError

    with contextlib.suppress(RayError, RuntimeError):
        client = global_worker.gcs_client  # type: ignore[attr-defined]
        return frozenset(client.get_draining_nodes(timeout=timeout))
    return frozenset()


def drain_node(node_id: str, seconds: float, message: str) -> bool:
    """Announce that the node will be taken away in `seconds`; returns whether Ray accepts. Without it a cloud's
    preemption notice reaches nobody, and the run learns of the loss from the dead node."""
    from ray._private.worker import global_worker
    from ray.core.generated import autoscaler_pb2 as messages

    reason = messages.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION  # type: ignore[attr-defined]
    client = global_worker.gcs_client  # type: ignore[attr-defined]
    accepted, _ = client.drain_node(node_id, reason, message, int((time.time() + seconds) * 1000))
    return bool(accepted)


def dead_main_process() -> str:
    """Which of MAIN_PROCESSES has ended of the node that this process started; empty if none has, or if it started
    none. Without it a run whose embedded Ray has died would wait for it."""
    from ray._private import worker

    node: Any = worker._global_node
    return _dead_main_process(node) if node is not None else ""


def uploaded(client: Any, environment: dict[str, Any]) -> dict[str, Any]:
    """A runtime environment whose folders a client of the Jobs API has sent to its cluster, so that to submit a job
    with it is one short request. Without it whoever interrupts a command that sends a large folder waits, or is left
    with a job that it does not know of."""
    found = copy.deepcopy(environment)
    client._upload_working_dir_if_needed(found)
    client._upload_py_modules_if_needed(found)
    return found


def raylet_pids() -> frozenset[int]:
    """Process ids of the raylets that this process started. Without it the workers of a raylet that was killed live
    on for a while and keep their memory and ports."""
    from ray._private import worker

    node: Any = worker._global_node
    return frozenset(info.process.pid for info in node.all_processes["raylet"])


def forget_token() -> None:
    """Have Ray look for its token anew: it keeps the first that it finds. Without it a process uses the token of one
    cluster at the next."""
    if "ray" in sys.modules:
        from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

        AuthenticationTokenLoader.instance().reset_cache()


def full_folder() -> str:
    """Ray's folder on this machine if its disk is full, else empty: Ray's processes cannot write their logs there and
    die without a word of it. Without it such deaths have no cause."""
    from ray._private import worker

    node: Any = worker._global_node
    folder = str(node.get_session_dir_path()) if node is not None else ""
    with contextlib.suppress(OSError):
        return folder if folder and shutil.disk_usage(folder).free < LEAST_FREE else ""
    return ""


@contextlib.contextmanager
def lean_start() -> Iterator[None]:
    """Have `ray.init` start a cluster without what nothing here reads: the autoscaler's monitor, the head of a
    dashboard that is not served and the agent that would report to it, and the forwarding of logs; the agent that makes
    runtime environments starts when one is asked for. Without it a start takes four seconds of a processor more and
    140 MiB, and waits for those agents. Its processes are a group of their own: what ends that of this process, as a
    job manager does, leaves them to commit."""
    from ray._private import node, parameter, services, utils

    kept = {"no_monitor": True, "include_log_monitor": False, "dashboard_agent_listen_port": 0}
    begin = functools.partialmethod(parameter.RayParams.__init__, **kept)
    no_server = lambda node, **_: None  # noqa: E731
    start = services.start_ray_process
    idle = lambda command, *others, **named: start(_without_agents(command), *others, **named)  # noqa: E731
    unasked = lambda: None  # noqa: E731  # else this process imports what the dashboard's agent needs
    get = services.get_node

    def soon(gcs_address: str, node_id: str) -> Any:
        _await_node(gcs_address, node_id)
        return get(gcs_address, node_id)

    apart = functools.partial(services.ConsolePopen, process_group=0)

    with (
        _replaced(parameter.RayParams, __init__=begin),
        _replaced(node.Node, start_api_server=no_server),
        _replaced(services, start_ray_process=idle, get_node=soon, ConsolePopen=apart),
        _replaced(utils, get_dashboard_dependency_error=unasked),
    ):
        yield


def _await_node(gcs_address: str, node_id: str) -> None:
    """Wait some seconds at most until a node is registered. Ray itself looks for it once a second."""
    from ray._private import services, state

    found, deadline = state.GlobalState(), time.monotonic() + REGISTERED
    found._initialize_global_state(services._get_gcs_client_options(gcs_address))
    while all(each["NodeID"] != node_id for each in found.node_table()) and time.monotonic() < deadline:
        time.sleep(0.02)


def _without_agents(command: list[str]) -> list[str]:
    """The command of a Ray process; that of a raylet with `idle_agent` in place of its two agents."""
    session = next((part.removeprefix(SESSION) for part in command if part.startswith(SESSION)), "")
    idle = subprocess.list2cmdline([sys.executable, "-I", "-S", __file__, session])

    def replaced(part: str) -> str:
        if part.startswith(ENVIRONMENTS):
            return f"{ENVIRONMENTS}{idle} {part.removeprefix(ENVIRONMENTS)}"
        return AGENT + idle if part.startswith(AGENT) else part

    return [replaced(part) for part in command]


@contextlib.contextmanager
def _replaced(part: Any, **others: Any) -> Iterator[None]:
    """Have attributes of a module or class of Ray be others meanwhile."""
    before = {name: vars(part)[name] for name in others}
    for name, other in others.items():
        setattr(part, name, other)
    try:
        yield
    finally:
        for name, was in before.items():
            setattr(part, name, was)


class RayNode:
    """The processes of one Ray node, children of this process. `options` are those of Ray's `RayParams`.

    (`ray start` would open a port for Ray Client too, and its processes would outlive this one.) Without it there are
    no local clusters of several nodes: `cluster up`, and the tests with real nodes.
    """

    def __init__(self, head: bool, options: dict[str, Any]) -> None:
        from ray._private import services
        from ray._private.node import Node
        from ray._private.parameter import RayParams
        from ray._private.utils import write_ray_address

        self._node: Any = Node(RayParams(**options), head=head, shutdown_at_exit=False, spawn_reaper=True)
        self.address = str(self._node.gcs_address)
        services.wait_for_node(self.address, self._node.plasma_store_socket_name, NODE_TIMEOUT)
        # Where jobs look for their cluster; without it they would take any head that runs on this machine.
        write_ray_address(self.address, os.fspath(options["temp_dir"]))

    def is_broken(self) -> bool:
        """Whether one of MAIN_PROCESSES has ended."""
        return bool(_dead_main_process(self._node))

    def stop(self) -> None:
        """End all processes of the node, and wait for them."""
        self._node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)


def _dead_main_process(node: Any) -> str:
    return next((kind for kind, _ in node.dead_processes() if kind in MAIN_PROCESSES), "")
