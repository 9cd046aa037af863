"""Commands that installed packages add to the program.

A command is an entry point. Its name is the words that call it, joined by dots; its object is a function, as typer
takes it, or a `typer.Typer` with several:

    [project.entry-points."training_orchestrator.commands"]
    "cluster.render" = "orchestrator.extensions.render.commands:app"

The module is imported whenever the program starts, so it imports what is heavy within its functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint

import typer

from orchestrator.config.errors import InputError
from orchestrator.config.extensions import GROUP, points

KIND = "commands"
ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Settings of a command that takes every argument."""


def add_commands(app: typer.Typer) -> None:
    """Add the commands of all installed packages. One that has no place is a note on standard error."""
    for point in points(KIND):
        *words, name = point.name.split(".")
        parent = _group(app, words)
        if parent is None or name in _names(parent):
            problem = f"needs the command group {' '.join(words)!r}" if parent is None else "is taken"
            print(f"note: {GROUP}{KIND} {point.name} of {_package(point)} {problem}", file=sys.stderr)
            continue
        try:
            command = point.load()
        except Exception as error:  # of a package that may be anyone's: the other commands do not need it
            parent.command(name, context_settings=ANY_ARGUMENTS)(_broken(point, error))
            continue
        if isinstance(command, typer.Typer):
            parent.add_typer(command, name=name)
        else:
            parent.command(name)(command)


def _broken(point: EntryPoint, error: Exception) -> Callable[[], None]:
    """Return a command that says why the one of an entry point cannot be loaded."""
    reason = f"cannot be loaded ({type(error).__name__}: {' '.join(str(error).split())})"

    def command() -> None:
        hint = f"reinstall or remove {_package(point)}"
        raise InputError(reason, f"{GROUP}{KIND} {point.name} = {point.value}", hint)

    command.__doc__ = f"It {reason}."
    return command


def _group(app: typer.Typer, words: list[str]) -> typer.Typer | None:
    """Return the group of commands that these words call; None if there is no such group."""
    for word in words:
        inner = [group.typer_instance for group in app.registered_groups if group.name == word]
        if not inner or inner[0] is None:
            return None
        app = inner[0]
    return app


def _names(app: typer.Typer) -> set[str]:
    """Return the names of the commands and groups of a group."""
    functions = (
        command.name or command.callback.__name__.replace("_", "-")
        for command in app.registered_commands
        if command.callback
    )
    return {*functions, *(str(group.name) for group in app.registered_groups)}


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "an unknown package"
