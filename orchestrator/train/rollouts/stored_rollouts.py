"""Rollouts of some steps as text in the run directory: `rollouts/step-N.jsonl`, a line for each answer.

They are for people. A background thread writes them, and storage that is silent or full never stops training.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.config.errors import InputError
from orchestrator.storage.backend import Backend
from orchestrator.storage.background_writer import BackgroundWriter
from orchestrator.storage.open_backend import open_backend
from orchestrator.storage.run_directory import REMOTE_TIMEOUT

if TYPE_CHECKING:  # it imports torch, and reports read what is kept
    from orchestrator.train.rollouts.rollout_data import Rollout

FOLDER = "rollouts"
CLOSING = 5.0
"""Maximum seconds to wait at the end for what is still being written."""


def file_of(step: int) -> str:
    """Return the name of the file with the rollouts of a step."""
    return f"step-{step:08d}.jsonl"


class KeptRollouts:
    """Writes rollouts to a run directory."""

    def __init__(self, run: str) -> None:
        self._folder = _folder(run)
        self._waiting: dict[str, str] = {}
        self._writer = BackgroundWriter(self._write)

    def add(self, step: int, texts: Sequence[str], rollout: Rollout) -> None:
        """Write the rollouts of a step soon. `texts` are those of the prompts.

        Args:
            step: number of the step.
            texts: of the prompts.
            rollout: what the step trains on.
        """
        lines = [json.dumps(line, ensure_ascii=False) for line in _lines(texts, rollout)]
        self._waiting[file_of(step)] = "\n".join(lines) + "\n"
        with contextlib.suppress(OSError):
            self._writer.request()

    def close(self) -> None:
        """Wait a moment for what is being written."""
        self._writer.close(CLOSING)

    def _write(self) -> None:
        while self._waiting:
            name, text = self._waiting.popitem()
            self._folder.replace(name, text.encode())


def _lines(texts: Sequence[str], rollout: Rollout) -> Iterator[dict[str, Any]]:
    for prompt, text, answers in zip(rollout.prompts, texts, rollout.answers, strict=True):
        for k, answer in enumerate(answers):
            yield {
                "prompt_number": prompt.number,
                "k": k,
                "prompt": text,
                "answer": answer.text,
                "tokens": len(answer.drawn.tokens),
                "version": rollout.version,
                "epoch": rollout.epoch,
                "ended": answer.drawn.ended,
                "reward": _number(answer.reward),
                "rewards": {name: _number(value) for name, value in answer.rewards.items()},
                "columns": prompt.columns,
            }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _folder(run: str) -> Backend:
    return open_backend(f"{run.rstrip('/')}/{FOLDER}", REMOTE_TIMEOUT)


def kept_steps(run: str) -> list[int]:
    """Return the steps whose rollouts a run has kept, ascending."""
    names = _folder(run).list()
    numbers = (name.removeprefix("step-").removesuffix(".jsonl") for name in names if name.endswith(".jsonl"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def read_kept(run: str, step: int | None = None) -> tuple[int, list[dict[str, Any]]]:
    """Return a step and its kept rollouts; of the last step that has any, if none is named.

    Raises InputError if there are none, or if the file is damaged.

    Args:
        run: the run directory.
        step: the step; None for the last one that has any.

    Raises:
        InputError: no rollouts were kept, none of this step, or the file is damaged.
    """
    steps = kept_steps(run)
    if not steps:
        raise InputError("has kept no rollouts", run, "rollout.keep_every says which steps are kept")
    if step is not None and step not in steps:
        shown = ", ".join(map(str, steps[-8:]))
        hint = f"rollout.keep_every says which steps are kept; the last ones are {shown}"
        raise InputError(f"has kept no rollouts of step {step}", run, hint)
    chosen = steps[-1] if step is None else step
    text = _folder(run).read(file_of(chosen)).decode(errors="replace")
    try:
        # An answer may contain other line separators, such as U+2028, which JSON does not escape.
        return chosen, [json.loads(line) for line in text.split("\n") if line]
    except ValueError:
        raise InputError(
            f"has damaged rollouts of step {chosen}",
            run,
            f"name another step, or remove {FOLDER}/{file_of(chosen)}",
        ) from None
