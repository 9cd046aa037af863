"""The command line: which commands there are, and how one ends."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from importlib import import_module

import typer

from orchestrator.errors import InputError

app = typer.Typer(
    name="orchestrator",
    help="Train Transformer and Mixture-of-Experts models on Ray: a run that survives anything and stays the same run.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _module in ("job", "run", "look", "checkpoint", "data"):
    import_module(f"orchestrator.cli.{_module}").register(app)


def call(arguments: list[str] | None = None) -> None:
    """Run a command and exit: 0 done, 1 the run failed, 2 the input is wrong, 3 stopped with a commit in place.

    An error is one line on standard error; --debug, given anywhere, adds the trace.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    sys.exit(_guarded(lambda: app(args=words, prog_name="orchestrator"), debug))


def _guarded(command: Callable[[], object], debug: bool) -> int:
    try:
        command()
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except InputError as error:
        code, line = 2, str(error)
    except KeyboardInterrupt:
        code, line = 1, "interrupted before a commit"
    except BrokenPipeError:
        return 0
    except Exception as error:
        code, line = 1, f"{type(error).__name__}: {' '.join(str(error).split())}"
    if debug:
        traceback.print_exc()
    print(f"orchestrator: {line}", file=sys.stderr)
    return code
