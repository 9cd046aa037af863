"""A node on a host, which removes its folder, the token in it, when it ends by itself since it misses the head."""

from __future__ import annotations

import json
import shutil
import sys

from cluster.local import node


def main() -> None:
    """Keep the node of the command line until it ends."""
    folder = json.loads(sys.argv[1])["folder"]
    try:
        node.main()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
