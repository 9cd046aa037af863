"""Some of the rollouts that a run has kept, for its report: prompts, answers and their rewards."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.train.rollouts.stored_rollouts import kept_steps, read_kept

STEPS_SHOWN = 4
"""Steps: the first that is kept, the last and some between."""
PROMPTS_SHOWN = 3
"""Prompts of a step."""
LONGEST = 600
"""Characters of a text that are shown."""


def rollouts_shown(run: str) -> list[dict[str, Any]]:
    """Return some kept rollouts of the run at a URI, oldest first: of each step the first prompts, and of each prompt
    the answers with the largest and the smallest reward. Leaves out steps whose file is damaged.
    """
    kept = kept_steps(run)
    parts = max(min(len(kept), STEPS_SHOWN) - 1, 1)
    chosen = [kept[round(part * (len(kept) - 1) / parts)] for part in range(min(len(kept), STEPS_SHOWN))]
    shown = []
    for step in chosen:
        with contextlib.suppress(InputError):  # a damaged file costs its step, not the report
            shown.append({"step": step, "prompts": _prompts(read_kept(run, step)[1])})
    return shown


def _prompts(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups = [list(group) for _, group in itertools.groupby(lines, lambda line: line["prompt_number"])]
    return [
        {"prompt": _text(group[0]["prompt"]), "answers": _extremes(group)} for group in groups[:PROMPTS_SHOWN]
    ]


def _extremes(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers with the largest and the smallest reward; one if all are equal. Answers without a reward come
    last.
    """
    ordered = sorted(group, key=lambda line: (line["reward"] is None, -(line["reward"] or 0.0)))
    shown = [ordered[0]] if ordered[0]["reward"] == ordered[-1]["reward"] else [ordered[0], ordered[-1]]
    return [
        {"text": _text(line["answer"]), "reward": line["reward"], "tokens": line["tokens"]} for line in shown
    ]


def _text(text: str) -> str:
    """Return a text in one line, with line ends shown as a sign."""
    shown = text.replace("\n", "↵ ")
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]} …"
