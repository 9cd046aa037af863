"""The command line: which commands there are, and how one ends."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from importlib import import_module

import typer

from orchestrator.job.errors import InputError
from orchestrator.job.outcome import Outcome

INTERRUPTED = 130
"""What typer makes of a KeyboardInterrupt."""

app = typer.Typer(
    name="orchestrator",
    help="Train Transformer and Mixture-of-Experts models on Ray: a run that survives anything and stays the same run.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _module in ("job", "run", "jobs", "look", "checkpoint", "data", "cluster", "chaos", "tune"):
    import_module(f"orchestrator.cli.{_module}").register(app)


def call(arguments: list[str] | None = None) -> None:
    """Run a command and exit: 0 done, 1 the run failed, 2 the input is wrong, 3 stopped with a commit in place.

    An error is one line on standard error; --debug, given anywhere, adds the trace.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    sys.exit(
        _guarded(
            lambda: app(args=words, prog_name="orchestrator", standalone_mode=False), debug, "--json" in words
        )
    )


def _guarded(command: Callable[[], object], debug: bool, as_json: bool = False) -> int:
    failure: BaseException | None = None
    try:
        code = command()
        if code != INTERRUPTED:
            return code if isinstance(code, int) else 0
        code = Outcome.FAILED.exit_code
        line = "interrupted; the same command goes on from the last commit, if there is one"
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except typer.TyperException as error:
        if error.format_message().startswith("Usage:"):  # no words at all: typer gives the help for an error
            print(error.format_message(), file=sys.stderr)
            return Outcome.WRONG_INPUT.exit_code
        failure, code, line = error, Outcome.WRONG_INPUT.exit_code, _usage(error)
    except InputError as error:
        failure, code, line = error, Outcome.WRONG_INPUT.exit_code, str(error)
    except Exception as error:
        failure, code = error, Outcome.FAILED.exit_code
        line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if debug and failure:
        traceback.print_exception(failure)
    if as_json:
        print(json.dumps({"exit_code": code, "line": line}))
    print(f"orchestrator: {line}", file=sys.stderr)
    return code


def _usage(error: typer.TyperException) -> str:
    """What is wrong with the words of a command, and where its help is."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "orchestrator"
    return f"{' '.join(error.format_message().split()).rstrip('.')}; see `{command} --help`"
