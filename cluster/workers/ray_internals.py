"""All uses of Ray's private interfaces. No other module may import `ray._private`.

These interfaces may change with any release of Ray, so its version is pinned (constraints.txt). Each function says what
breaks without it. `tests/ray` runs all of them on real nodes. Importing this module does not import Ray.
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
from collections.abc import Callable, Iterator
from typing import Any

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""The ports that the raylet waits for, one file each in the session's folder; -1 for a service that does not run."""
ENVIRONMENTS_PORT = "runtime_env_agent_port"
"""The same for the other agent."""
ADDRESS, PORT = "--node-ip-address=", "--runtime-env-agent-port="
"""Arguments of Ray's agent: where it listens."""
LOOK = 1.0
"""Seconds between two checks whether the raylet is alive."""


def main() -> None:
    """Stand in for an agent of the raylet: write its ports, and wait for the raylet's end or for the first request."""
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
    family, kind, protocol, _, socket_address = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(socket_address)
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
"""Ray's names for the processes that a node cannot live without."""
REGISTERED = 110.0
"""Seconds to wait until a living raylet is registered. Ray itself gives up after 30 s, but a busy machine may take
longer."""
OFTEN = 10.0
"""For this many seconds a wait checks frequently. Then it checks once a second."""
SESSION, AGENT = "--session_dir=", "--dashboard_agent_command="
ENVIRONMENTS = "--runtime_env_agent_command="
"""Arguments of a raylet: the session's folder, and the commands of the two agents that it starts."""
HEAD = "node:__internal_head__"
"""The resource that Ray gives to the node of its head."""
NO_DEADLINE = 2**63 - 1
"""The deadline of a node that is drained because it is idle, as Ray's autoscaler sets it."""
LEAST_FREE = 2**20
"""A disk with fewer free bytes counts as full."""
NODE_TIMEOUT = 60
"""Seconds to wait until a started node is registered with its head."""


def free_resources_by_node() -> dict[str, dict[str, float]]:
    """Return the free resources by node id.

    Ray's public API gives only the cluster's total, from which a gang cannot know whether ranks that share a node fit
    on one.
    """
    from ray._private.state import available_resources_per_node

    result: dict[str, dict[str, float]] = available_resources_per_node()
    return result


def draining_nodes(timeout: float) -> frozenset[str]:
    """Return the ids of the nodes that are being drained; empty if the head does not answer within `timeout` seconds.

    Without it a preempted node keeps its ranks until it dies, and may get new ones.
    """
    from ray._private.worker import global_worker
    from ray.exceptions import RayError

    with contextlib.suppress(RayError, RuntimeError):
        client = global_worker.gcs_client  # type: ignore[attr-defined]
        return frozenset(client.get_draining_nodes(timeout=timeout))
    return frozenset()


def drain_node(node_id: str, seconds: float, message: str) -> bool:
    """Announce that a node will be taken away in `seconds`. Return whether Ray accepts.

    Without it a cloud's preemption notice has no effect, and the run notices the loss only when the node is dead.

    Args:
        node_id: Ray's id of the node.
        seconds: until it is taken away.
        message: why, for Ray's log.
    """
    return _drain(node_id, "DRAIN_NODE_REASON_PREEMPTION", message, int((time.time() + seconds) * 1000))


def drain_idle_node(node_id: str, message: str) -> bool:
    """Take a node away if nothing runs there. Return whether Ray accepts; its raylet then ends.

    The other reason, preemption, would announce to all other work there that the node ends. Without it a machine that
    computes wrongly stays in the cluster.

    Args:
        node_id: Ray's id of the node.
        message: why, for Ray's log.
    """
    return _drain(node_id, "DRAIN_NODE_REASON_IDLE_TERMINATION", message, NO_DEADLINE)


def _drain(node_id: str, reason: str, message: str, deadline: int) -> bool:
    """Ask Ray to drain a node until `deadline`, in milliseconds since 1970."""
    from ray._private.worker import global_worker
    from ray.core.generated import autoscaler_pb2

    reasons: Any = autoscaler_pb2
    client = global_worker.gcs_client  # type: ignore[attr-defined]
    accepted, _ = client.drain_node(node_id, reasons.DrainNodeReason.Value(reason), message, deadline)
    return bool(accepted)


def dead_main_process() -> str:
    """Return which of MAIN_PROCESSES of this process's own node has ended; empty if none has, or without a node.

    Without it a run would wait for its embedded Ray after that has died.
    """
    from ray._private import worker

    node: Any = worker._global_node
    return _dead_main_process(node) if node is not None else ""


def uploaded(client: Any, environment: dict[str, Any]) -> dict[str, Any]:
    """Upload the folders of a runtime environment by a client of the Jobs API, and return the environment.

    A submission with it is then one short request. Without it an interruption during the upload of a large folder has
    to wait, or leaves behind a job that the command does not know.

    Args:
        client: of the Jobs API.
        environment: the runtime environment.
    """
    result = copy.deepcopy(environment)
    client._upload_working_dir_if_needed(result)
    client._upload_py_modules_if_needed(result)
    return result


def raylet_pids() -> frozenset[int]:
    """Return the process ids of the raylets that this process started.

    Without it the workers of a killed raylet live on for a while and keep their memory and ports.
    """
    from ray._private import worker

    node: Any = worker._global_node
    return frozenset(info.process.pid for info in node.all_processes["raylet"])


def forget_token() -> None:
    """Make Ray read its token again, since it keeps the first one.

    Without it a process uses the token of one cluster for the next.
    """
    if "ray" in sys.modules:
        from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

        AuthenticationTokenLoader.instance().reset_cache()


def full_folder() -> str:
    """Return Ray's folder on this machine if its disk is full, else an empty string.

    Ray's processes die silently when they cannot write their logs. Without it such deaths have no known cause.
    """
    from ray._private import worker

    node: Any = worker._global_node
    folder = str(node.get_session_dir_path()) if node is not None else ""
    with contextlib.suppress(OSError):
        return folder if folder and shutil.disk_usage(folder).free < LEAST_FREE else ""
    return ""


@contextlib.contextmanager
def lean_start() -> Iterator[None]:
    """Make `ray.init` start a cluster without parts that nothing here uses.

    These are the autoscaler's monitor, the dashboard with its agent, and the forwarding of logs. The agent for runtime
    environments starts at its first request. Without this a start takes four more seconds of CPU time and 140 MiB, and
    waits for those agents. Ray's processes get their own process group, so that a job manager that ends the group of
    this process leaves them time to commit.
    """
    from ray._private import node, parameter, services, utils

    settings = {"no_monitor": True, "include_log_monitor": False, "dashboard_agent_listen_port": 0}
    begin = functools.partialmethod(parameter.RayParams.__init__, **settings)
    no_server = lambda node, **_: None  # noqa: E731
    start = services.start_ray_process
    idle = lambda command, *others, **named: start(_without_agents(command), *others, **named)  # noqa: E731
    unasked = lambda: None  # noqa: E731  # avoids imports for the dashboard's agent
    apart = functools.partial(services.ConsolePopen, process_group=0)

    with (
        _replaced(parameter.RayParams, __init__=begin),
        _replaced(node.Node, start_api_server=no_server),
        _replaced(services, start_ray_process=idle, get_node=_awaited(services.get_node), ConsolePopen=apart),
        _replaced(utils, get_dashboard_dependency_error=unasked),
    ):
        yield


def _awaited(get_node: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """Return Ray's `get_node` for a node that this process is starting: it waits for the node first.

    Without it a start fails on a machine that is so busy that a raylet takes 30 s.
    """

    def get(gcs_address: str, node_id: str) -> Any:
        _await_node(gcs_address, node_id)
        return get_node(gcs_address, node_id)

    return get


def _await_node(gcs_address: str, node_id: str) -> None:
    """Wait until a node is registered, up to REGISTERED seconds and as long as its raylet lives.

    Ray's own checks follow. They come once a second only.
    """
    from ray._private import services, state

    global_state = state.GlobalState()
    begin = time.monotonic()
    global_state._initialize_global_state(services._get_gcs_client_options(gcs_address))
    while all(each["NodeID"] != node_id for each in global_state.node_table()):
        waited = time.monotonic() - begin
        if waited > REGISTERED or (waited > OFTEN and not _has_raylet()):
            return
        time.sleep(0.02 if waited < OFTEN else LOOK)


def _has_raylet() -> bool:
    """Return whether a raylet that this process started lives."""
    import psutil

    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _without_agents(command: list[str]) -> list[str]:
    """Return the command of a Ray process, for a raylet with this module in place of its two agents."""
    session = next((part.removeprefix(SESSION) for part in command if part.startswith(SESSION)), "")
    idle = subprocess.list2cmdline([sys.executable, "-I", "-S", __file__, session])

    def replaced(part: str) -> str:
        if part.startswith(ENVIRONMENTS):
            return f"{ENVIRONMENTS}{idle} {part.removeprefix(ENVIRONMENTS)}"
        return AGENT + idle if part.startswith(AGENT) else part

    return [replaced(part) for part in command]


@contextlib.contextmanager
def _replaced(part: Any, **others: Any) -> Iterator[None]:
    """Replace attributes of a module or class of Ray for the length of the block."""
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

        with _replaced(services, get_node=_awaited(services.get_node)):
            parameters = RayParams(**options)
            self._node: Any = Node(parameters, head=head, shutdown_at_exit=False, spawn_reaper=True)
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
