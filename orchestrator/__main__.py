"""`orchestrator` and `python -m orchestrator`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

INTERRUPTED = 130
"""What a shell calls the end of a command by Ctrl-C; a run that has begun commits and ends with 3."""


def main() -> None:
    """Run the command line. SIGTERM is a KeyboardInterrupt from the first moment on."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from orchestrator.cli.app import call

        call()
        return
    except KeyboardInterrupt:
        print("orchestrator: interrupted before it began", file=sys.stderr)
    except SystemExit as end:
        if end.code != INTERRUPTED:
            raise
    # Not in order: threads of libraries would end badly in that, with another code.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
