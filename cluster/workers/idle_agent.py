"""What stands in for the agent of Ray's dashboard on a node that has no dashboard. Ray starts it by its path:

    python -I -S idle_agent.py SESSION_FOLDER

It tells the raylet that it serves nothing, as Ray's own agent does where it has nothing to serve, and ends with it.
"""

from __future__ import annotations

import os
import sys
import time

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""What the raylet waits for, a file each in the session's folder; -1 is for what is not served."""
LOOK = 1.0
"""Seconds between two looks whether the raylet is there."""


def main() -> None:
    """Write the ports, and wait for the end of the raylet."""
    raylet = os.getppid()
    for name in PORTS:
        path = os.path.join(sys.argv[1], f"{name}_{os.environ['RAY_NODE_ID']}")
        with open(f"{path}.draft", "w") as file:
            file.write("-1")
        os.replace(f"{path}.draft", path)
    while os.getppid() == raylet:
        time.sleep(LOOK)


if __name__ == "__main__":
    main()
