"""The program of a process that calls one reward: answers come in as JSON lines, numbers go out. A worker forks it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import Any

from cluster.workers.json_lines import Lines, line_of, write
from orchestrator.rewards.own_function import own_rule, problem_of
from orchestrator.rewards.rules import NoAnswer, Refused, Rule, as_reply, rule_of


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
