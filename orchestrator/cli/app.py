"""The command line: register the commands, and end with the exit code of the outcome."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import select
import sys
import traceback
from collections.abc import Callable
from importlib import import_module, metadata
from typing import IO, Annotated, NamedTuple

import typer

from orchestrator.cli.extension_commands import add_commands
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import INTERRUPTED, Outcome
from orchestrator.config.redact import redact_message

app = typer.Typer(
    name="orchestrator",
    help="Train Transformer and Mixture-of-Experts models on Ray: a run that survives anything and stays the same run.",
    no_args_is_help=True,
    epilog="Exit codes: 0 done, 1 failed, 2 wrong input, 3 stopped with a commit, "
    "130 interrupted before there was one to make, or while it followed what goes on. --debug, given "
    "anywhere, adds the trace of an error.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _module in (
    "job",
    "calibrate",
    "run",
    "jobs",
    "logs",
    "profile",
    "pages",
    "top",
    "runs",
    "report",
    "checkpoint",
    "evaluate",
    "chat",
    "bench",
    "data",
    "cluster_nodes",
    "chaos",
    "rehearse",
    "tune",
):
    import_module(f"orchestrator.cli.{_module}").register(app)
add_commands(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"orchestrator {metadata.version('training-orchestrator')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", help="print the version and exit", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass


def call(arguments: list[str] | None = None) -> None:
    """Run a command and exit with the code of its `Outcome`: 0 done, 1 failed, 2 wrong input, 3 stopped with a commit;
    or with INTERRUPTED.

    An error is one line on standard error; --debug, given anywhere, adds the trace.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a curve in an encoding that has no bars for it
    debug = "--debug" in words
    words = [argument for argument in words if argument != "--debug"]
    interrupted = "interrupted"
    if words[:1] in (["run"], ["tune"]):
        interrupted += "; the same command continues from the last checkpoint, if there is one"
    sys.exit(
        _guarded(
            lambda: app(args=words, prog_name="orchestrator", standalone_mode=False),
            debug,
            "--json" in words,
            interrupted,
        )
    )


def _guarded(command: Callable[[], object], debug: bool, as_json: bool = False, interrupted: str = "") -> int:
    """Run a command, print how it failed, and return its exit code."""
    try:
        code = command()
        with contextlib.suppress(BrokenPipeError):  # the reader has enough
            sys.stdout.flush()
        if code != INTERRUPTED:  # typer returns it for a KeyboardInterrupt
            return code if isinstance(code, int) else 0
        failed = _Failed(INTERRUPTED, interrupted)
    except SystemExit as end:
        error = end.__context__
        if not isinstance(error, BrokenPipeError):  # typer exits with 1 for every broken pipe
            return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if _is_unread(sys.stdout) or _is_unread(sys.stderr):
            return 0
        failed = _Failed(Outcome.FAILED.exit_code, f"BrokenPipeError: {error}", error)
    except typer.TyperException as error:
        if error.format_message().startswith("Usage:"):  # without arguments typer raises the help as an error
            print(error.format_message(), file=sys.stderr)
            return Outcome.WRONG_INPUT.exit_code
        failed = _Failed(Outcome.WRONG_INPUT.exit_code, _usage(error), error)
    except Exception as error:
        failed = _failed(error)
    if debug and failed.error:
        traceback.print_exception(failed.error)
    failed.print(as_json)
    return failed.code


class _Failed(NamedTuple):
    """How a command failed: its exit code, the line that says why, and the error, if there was one."""

    code: int
    line: str
    error: BaseException | None = None

    def print(self, as_json: bool) -> None:
        """Print the line, or one line for each problem of an InputError, on standard error.

        Secrets are removed, because terminals are copied into logs and into questions to others.
        """
        lines = (
            [str(line) for line in self.error.each()] if isinstance(self.error, InputError) else [self.line]
        )
        with contextlib.suppress(OSError):  # printing itself may be what failed
            for line in lines:
                print(f"orchestrator: {redact_message(line)}", file=sys.stderr)
            if as_json:
                print(json.dumps({"exit_code": self.code, "line": redact_message(self.line)}), flush=True)


def _failed(error: Exception) -> _Failed:
    """Return the exit code and the line for an error: wrong input, or anything else."""
    refused = error if isinstance(error, InputError) else _refused(error)
    if refused:
        return _Failed(Outcome.WRONG_INPUT.exit_code, str(refused), refused)
    line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return _Failed(Outcome.FAILED.exit_code, line, error)


def _is_unread(stream: IO[str]) -> bool:
    """Whether a stream is a pipe that its reader has closed, as after `| head`."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):
        return False


def _refused(error: Exception) -> InputError | None:
    """The message for a file or a store that this user may not read, and that no check has covered."""
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        path = str(error.filename or "a file")
        return InputError(f"{error.strerror or error}", path, "check its permissions, or give another")
    if isinstance(error, FileNotFoundError) and _is_nowhere():
        return InputError("the current folder has been removed", "", "change to one that is there")
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        hint = "set those of the store, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        return InputError(" ".join(str(error).split()), "the object store", hint)
    return None


def _is_nowhere() -> bool:
    """Whether the current folder of this process has been removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _usage(error: typer.TyperException) -> str:
    """The problem with the arguments of a command, and how to get its help."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "orchestrator"
    return f"{' '.join(error.format_message().split()).rstrip('.')}; see `{command} --help`"
