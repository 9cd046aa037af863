"""`orchestrator` and `python -m orchestrator`."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from orchestrator.cli.app import call

    call()


if __name__ == "__main__":
    main()
