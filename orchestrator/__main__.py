"""`orchestrator` and `python -m orchestrator`."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line. SIGTERM is a KeyboardInterrupt from the first moment on."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from orchestrator.cli.app import call

        call()
    except KeyboardInterrupt:
        sys.exit("orchestrator: interrupted before it began")


if __name__ == "__main__":
    main()
