"""The program of a process that calls one reward: answers come in as JSON lines, numbers go out. A worker forks it."""

from __future__ import annotations

import inspect
import math
import os
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

from cluster.workers.json_lines import Lines, line_of, write
from orchestrator.rewards.rules import NoAnswer, Refused, Rule, as_reply, rule_of
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


def serve(reward: Mapping[str, Any], requests: int, replies: int) -> None:
    """Score the answers that come over `requests` until it is closed. Never returns."""
    pid = os.getpid()
    # The worker has sent the output to the log of the process that asks; each line arrives even if this is killed.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    outcome: dict[str, Any] = {"ready": True}
    rule: Rule | None = None
    try:
        rule = own_rule(reward) if reward["own"] else rule_of(reward)
    except Refused as refused:
        outcome = as_reply(refused)
    except BaseException as error:
        outcome = {"refused": problem_of(error), "hint": "fix it, or raise the reward's memory"}
    lines = Lines(requests)
    write(replies, line_of(outcome))
    while rule is not None and (answer := lines.wait()) is not None:
        outcome = scored(rule, answer)
        if os.getpid() != pid:  # a copy that the function has forked and not ended
            os._exit(0)
        write(replies, line_of(outcome))
        if "ends" in outcome:
            break
    os._exit(0)


def scored(rule: Rule, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of an answer, or the problem."""
    try:
        return checked(rule(answer))
    except (Refused, NoAnswer) as error:
        return as_reply(error)
    except MemoryError:
        # What it has taken may be lost for the next answer, which must not depend on this one.
        return {"problem": "needs more than its memory limit", "ends": True, "limit": True}
    except BaseException as error:  # SystemExit too
        return {"problem": problem_of(error)}


def checked(value: Any) -> dict[str, Any]:
    """Return the value if it is a finite number, or the problem."""
    if value is None or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return {"problem": f"returned {_shown(value)}, which is not a number"}
    number = float(value)
    return {"value": number} if math.isfinite(number) else {"problem": f"returned {number}"}


def _shown(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__} {' '.join(repr(value).split())[:60]}"
