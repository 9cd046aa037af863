"""The process of a node on a remote host. It removes its folder with the token even if it ends by itself."""

from __future__ import annotations

import json
import shutil
import sys

from cluster.local import node


def main() -> None:
    """Run the node of the command line until it ends, for example because its head is gone."""
    folder = json.loads(sys.argv[1])["folder"]
    try:
        node.main()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
