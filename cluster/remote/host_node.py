"""What a machine of a cluster does for it: `python -P -m cluster.remote.host_node up|down`, started over ssh.

It reads JSON from standard input, so that no token is seen among the processes, and answers with a line of JSON.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from cluster.local.node import NodeSpec
from cluster.local.node_processes import (
    ClusterError,
    end_nodes,
    end_unrecorded,
    node_records,
    start_nodes,
)
from cluster.workers.nvml import Nvml


def versions() -> dict[str, str]:
    """What must be the same on all machines of a cluster: Ray demands it of itself and Python, and ranks of this
    program."""
    python = ".".join(platform.python_version_tuple()[:2])
    names = ("training-orchestrator", "ray", "torch")
    return {"python": python} | {name: importlib.metadata.version(name).partition("+")[0] for name in names}


def main() -> None:
    """Do what is asked, and answer. Exits with 1 where that is an error."""
    asked = json.load(sys.stdin)
    folder = Path(tempfile.gettempdir()) / f"orchestrator-{os.getuid()}" / f"h-{asked['key']}"
    try:
        answer = _up(asked, folder) if sys.argv[1] == "up" else _down(folder)
    except (ClusterError, OSError) as error:
        answer = {"error": " ".join(str(error).split())}
    print(json.dumps(answer))
    sys.exit(1 if "error" in answer else 0)


def _up(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Start a node, and keep it in the background. Raises ClusterError, with nothing left behind."""
    mine = versions()
    for name, theirs in asked["versions"].items():
        if mine[name] != theirs:
            raise ClusterError(f"it has {name} {mine[name]}, and the head {theirs}; install the same")
    address = asked["address"] or os.environ.get("SSH_CONNECTION", "").split(" ")[2]
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    if folder.parent.stat().st_uid != os.getuid():
        raise ClusterError(f"{folder.parent} belongs to someone else")
    folder.mkdir(mode=0o700)  # what is there already is another's, and stays
    try:
        (folder / "nodes").mkdir()
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(asked["token"])
        cpus = len(os.sched_getaffinity(0)) if asked["cpus"] is None else asked["cpus"]
        gpus = len(Nvml().read()) if asked["gpus"] is None else asked["gpus"]
        node = NodeSpec(str(folder), address, asked["head"], cpus=cpus, gpus=gpus, owns_machine=True)
        start_nodes([node], "cluster.remote.node_watchdog")
        (record,) = node_records(folder)
    except BaseException:
        _down(folder)
        raise
    return {key: record[key] for key in ("ip", "cpus", "gpus", "pid")}


def _down(folder: Path) -> dict[str, Any]:
    """End the node, and remove what it wrote."""
    records = node_records(folder)
    end_nodes(records)
    end_unrecorded(str(folder))
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
    return {"ended": len(records)}


if __name__ == "__main__":
    main()
