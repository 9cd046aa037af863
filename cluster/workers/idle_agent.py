"""What stands in for Ray's agents on a node that is a process of this program's alone. Ray starts it by its path:

    python -I -S idle_agent.py SESSION_FOLDER               for the agent of a dashboard that is not there
    python -I -S idle_agent.py SESSION_FOLDER COMMAND...    for the agent that makes runtime environments

The first tells the raylet that it serves nothing, as Ray's own agent does where it has nothing to serve. The second
becomes COMMAND, Ray's own agent, when the raylet first asks for an environment; that request fails, and the raylet
repeats it until it is answered. Both end with the raylet. Ray's agents take most of a second of a processor to import,
for which the raylet waits, and all workers with it.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""What the raylet waits for, a file each in the session's folder; -1 is for what is not served."""
ENVIRONMENTS = "runtime_env_agent_port"
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
        _write_port(session, ENVIRONMENTS, port)
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
