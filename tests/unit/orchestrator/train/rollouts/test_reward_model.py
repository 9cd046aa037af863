"""Scores of a reward model: those of single passes, in batches that the number of ranks does not change."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from orchestrator.config.errors import InputError
from orchestrator.rewards.config import RewardSpec
from orchestrator.train.rollouts import reward_model as module
from orchestrator.train.rollouts.judge import Judge
from orchestrator.train.rollouts.prompts import Prompt
from orchestrator.train.rollouts.reward_model import RewardModel, batches
from orchestrator.train.rollouts.shares import Division
from workloads.hf.check.parity_table import random_state
from workloads.load import load
from workloads.model.answers import Drawn
from workloads.model.heads import ANSWER_ENDS
from workloads.workload import Vocabulary

SMALL = {"hidden": 32, "layers": 2, "heads": 4, "intermediate": 64}
TOGETHER, GROUP = 3, 4


def made(monkeypatch: pytest.MonkeyPatch, model: str, **changes: Any) -> RewardModel:
    workload = load(
        model, "reward", Vocabulary(60, eos=2, pad=0), changes=SMALL | changes, sequence_length=64
    )
    tokenizer = SimpleNamespace(get_vocab=dict)
    tokens: Any = SimpleNamespace(tokenizer=lambda: tokenizer)
    read = random_state(workload).__getitem__
    found = SimpleNamespace(tokens=tokens, workload=workload, read=read, scheme=None)
    monkeypatch.setattr(module, "model_of_run", lambda run, step: found)
    device: Any = SimpleNamespace(device=torch.device("cpu"), autocast=nullcontext, casting_once=nullcontext)
    return RewardModel("run@1", "rewards.0.model", tokens, device)


@torch.inference_mode()
def single(model: RewardModel, row: list[int]) -> float:
    scores = model._model({"tokens": torch.tensor([row]), ANSWER_ENDS: torch.tensor([[len(row) - 1]])})
    return float(scores.sentence)


def rows(count: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 40, (count,), generator=draw).tolist()
    return [torch.randint(3, 60, (length,), generator=draw).tolist() for length in lengths]


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("gpt-tiny", {}),
        ("qwen3-tiny", {"kv_heads": 2}),
        ("mixtral-tiny", {"kv_heads": 2, "moe": {"experts": 4, "intermediate": 32, "capacity_factor": 1.0}}),
    ],
)
def test_scores_are_those_of_single_passes(
    model: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", {"cpu": 128})
    judge = made(monkeypatch, model, **changes)
    found = judge.score(rows(12))
    assert found == pytest.approx([single(judge, row) for row in rows(12)], abs=1e-5)
    assert len({round(score, 4) for score in found}) > 6


def test_a_batch_has_like_lengths_and_at_most_so_many_tokens() -> None:
    assert list(batches([5, 9, 4, 30, 9, 5, 5, 5], 20)) == [[2, 0, 5, 6], [7, 1], [4], [3]]
    assert list(batches([5, 9, 4, 9, 5], 20, has_one_length=True)) == [[2], [0, 4], [1, 3]]
    assert list(batches([], 20)) == []


def test_the_number_of_ranks_changes_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """So scores have the same bits at every width. The last unit of seven prompts has one."""
    asked = rows(7 * GROUP)
    prompts = [Prompt(number, asked[number][:2], {}, 0) for number in range(7)]
    answers = [[Drawn(asked[GROUP * number + k], [], 0.0, True) for k in range(GROUP)] for number in range(7)]

    def scored(world: int) -> dict[tuple[int, ...], float]:
        seen: dict[tuple[int, ...], float] = {}
        for rank in range(world):
            division = Division(TOGETHER, GROUP, rank, world)
            (mine,) = division.shares([7], answers)
            judge = Judge(
                [RewardSpec.model_validate({"model": "run@1"})],
                decode=lambda ids: "",
                prompt_text=lambda ids: "",
                together=TOGETHER,
                models={"model": made(monkeypatch, "qwen3-tiny", kv_heads=2)},
            )
            for each in judge.score(0, [(prompts[number], drawn) for number, drawn in mine]):
                seen |= {tuple(answer.drawn.tokens): answer.rewards["model"] for answer in each}
            judge.close()
        return seen

    alone = scored(1)
    assert len(alone) == 7 * GROUP
    assert scored(2) == alone
    assert scored(3) == alone


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("way", "left"), [("zero", 0.0), ("skip", math.nan), ("stop", None)])
def test_a_score_that_is_not_finite_is_told_and_does_what_the_job_says(
    value: float, way: str, left: float | None, capfd: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def score(self, rows: list[list[int]]) -> list[float]:
            return [1.0, value]

    judge = Judge(
        [RewardSpec.model_validate({"model": "run@1", "on_error": way})],
        decode=lambda ids: "",
        prompt_text=lambda ids: "",
        together=TOGETHER,
        models={"model": cast("RewardModel", Broken())},
    )
    asked = [(Prompt(7, [1], {}, 0), [Drawn([2], [], 0.0, True), Drawn([3], [], 0.0, True)])]
    told = f"model returned {value} at prompt 7 (step 5, answer 1)"
    if left is None:
        with pytest.raises(InputError, match=re.escape(told)):
            judge.score(5, asked)
        return
    found = [answer.reward for answer in judge.score(5, asked)[0]]
    np.testing.assert_equal(found, [1.0, left])
    assert told in capfd.readouterr().err
