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
        what, _, hint = str(error).rpartition("; ")
        if isinstance(error, CannotImport):
            hint += ", or raise the reward's memory"
        raise Refused(what, hint) from None
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
    takes_all = not parameters or any(each.kind is each.VAR_KEYWORD for each in parameters)
    named = {each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)}
    needed = {each.name for each in parameters if each.name in named and each.default is each.empty}

    def arguments(answer: Mapping[str, Any]) -> dict[str, Any]:
        columns = answer["columns"]
        given = {**columns, "prompt": answer["prompt"], "answer": answer["text"]}
        if "columns" in named:
            given["columns"] = dict(columns)
        if missing := sorted(needed - given.keys()):
            raise Refused(
                f"{getattr(function, '__name__', function)} takes {missing[0]}, which is not a column of the "
                f"prompts (they have: {', '.join(sorted(columns)) or 'none'})",
                "rename the argument, or name the column in data.sources.field",
            )
        return given if takes_all else {key: value for key, value in given.items() if key in named}

    return arguments


def seed(number: str) -> None:
    """Seed the usual generators by the number of an answer, so that a function that draws gives the same again."""
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(random.getrandbits(32))
        random.seed(number)


def problem_of(error: BaseException) -> str:
    """Return one line about an error of the user's code: its class, its message and where it was raised."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename != __file__:
            place = f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno})"
        trace = trace.tb_next
    text = " ".join(str(error).split())[:300]
    return f"raised {type(error).__name__}{f': {text}' if text else ''}{place}"
