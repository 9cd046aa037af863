"""An entry point whose module makes a device ready, which here is a line in a file."""

from __future__ import annotations

import os
import time
from pathlib import Path

from targets import wait as wait

LOG, FAILS, SECONDS = "READY_LOG", "READY_FAILS", "READY_SECONDS"


def make_ready() -> None:
    """Tell which process this is; with FAILS in the environment raise, with SECONDS take so long."""
    with Path(os.environ.get(LOG, os.devnull)).open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(float(os.environ.get(SECONDS, 0)))
    if FAILS in os.environ:
        raise RuntimeError("no device")
