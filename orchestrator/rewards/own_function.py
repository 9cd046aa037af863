"""A reward that is a function of the user's own."""

from __future__ import annotations

import inspect
import os
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.rewards.rules import Refused, Rule
from workloads.errors import WorkloadError
from workloads.own.object_reference import CannotImport, load


def own_rule(reward: Mapping[str, Any]) -> Rule:
    """Return the function that scores an answer by own code. Raises Refused if it is not there."""
    name = reward["own"]
    try:
        function = load(name)
    except WorkloadError as error:
        problem, _, hint = str(error).rpartition("; ")
        if isinstance(error, CannotImport):
            hint += ", or raise the reward's memory"
        raise Refused(problem, hint) from None
    if not callable(function):
        raise Refused(f"{name} is not a function", "name one as module:function")
    arguments = _arguments(function)

    def score(answer: Mapping[str, Any]) -> Any:
        seed(f"{answer['step']}/{answer['prompt_number']}/{answer['k']}")
        return function(**arguments(answer))

    return score


def _arguments(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function from an answer to the keyword arguments that `function` takes."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function in C may not say
        parameters = []
    takes_all = not parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    needed = {
        parameter.name
        for parameter in parameters
        if parameter.name in named and parameter.default is parameter.empty
    }

    def arguments(answer: Mapping[str, Any]) -> dict[str, Any]:
        columns = answer["columns"]
        available = {**columns, "prompt": answer["prompt"], "answer": answer["text"]}
        if "columns" in named:
            available["columns"] = dict(columns)
        if missing := sorted(needed - available.keys()):
            raise Refused(
                f"{getattr(function, '__name__', function)} takes {missing[0]}, which is not a column of the "
                f"prompts (they have: {', '.join(sorted(columns)) or 'none'})",
                "rename the argument, or name the column in data.sources.field",
            )
        return available if takes_all else {key: value for key, value in available.items() if key in named}

    return arguments


def seed(number: str) -> None:
    """Seed the usual generators by the number of an answer, so that a function that draws gives the same again."""
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(random.getrandbits(32))
        random.seed(number)


def problem_of(error: BaseException) -> str:
    """Return one line about an error of the user's code: its class, its message and where it was raised."""
    location = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename != __file__:
            location = f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno})"
        trace = trace.tb_next
    text = " ".join(str(error).split())[:300]
    return f"raised {type(error).__name__}{f': {text}' if text else ''}{location}"
