"""`orchestrator` and `python -m orchestrator`."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys

from cluster.workers.stop_signals import interrupt_on_sigterm

INTERRUPTED = 130
"""What a shell calls the end of a command by Ctrl-C; a run that has begun commits and ends with 3."""


def main() -> None:
    """Run the command line. From the start, SIGTERM and SIGHUP raise KeyboardInterrupt, except SIGHUP under nohup."""
    interrupt_on_sigterm()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: what is opened next would take its place
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    code = 1
    # Registered first, it is called last. To take torch and Ray apart would take most of a second for nothing.
    atexit.register(lambda: _leave(code))
    try:
        from orchestrator.cli.app import call

        call()
    except KeyboardInterrupt:
        print("orchestrator: interrupted before it began", file=sys.stderr)
        code = INTERRUPTED
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    if code == INTERRUPTED:  # not in order: threads of libraries would end badly in that, with another code
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> None:
    """End this process as it is."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
