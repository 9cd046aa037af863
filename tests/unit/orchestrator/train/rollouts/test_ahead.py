"""Answers that were generated ahead, through a commit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.pieces import full_piece
from orchestrator.train.rollouts.ahead import Ahead, NextRollout, Pending
from orchestrator.train.rollouts.prompts import Prompt
from orchestrator.train.rollouts.shares import Division, covered
from workloads.model.answers import Drawn


def commit(store: Store, step: int, pieces: list[Any]) -> None:
    model = full_piece("model.w", torch.ones(2))
    records = store.write_shard(step, 0, [model, *pieces])
    store.publish(step, records, {"position": 0, "receipt": "0" * 32})


def test_a_commit_returns_them_to_the_bit(tmp_path: Path) -> None:
    log_p = torch.randn(3).tolist()  # fp32 numbers
    answers = [
        [Drawn([5, 0, 70_000], log_p, 1 / 3, True), Drawn([9], [-0.25], 0.1, False)],
        [Drawn([1, 1], [-(2.0**-100), -80.0], 0.0, True), Drawn([3, 2, 1], log_p[::-1], 2.0, False)],
    ]
    ahead = Ahead(7, [-(2**63), 2**63 - 1], answers)
    store = Store(str(tmp_path))
    commit(store, 8, ahead.pieces(4))
    commit(store, 9, [])
    assert Ahead.read(store.reader(store.manifest(8))) == ahead
    assert Ahead.read(store.reader(store.manifest(9))) is None
    shapes = [(piece.name, piece.shape) for piece in ahead.pieces(4)]
    shorter = dataclasses.replace(ahead, answers=[[answers[0][1]] * 2] * 2)
    assert [(piece.name, piece.shape) for piece in shorter.pieces(4)] == shapes


def prompts(*numbers: int) -> list[Prompt]:
    return [Prompt(number, [number, number], {}, digest=1000 + number) for number in numbers]


def answer(prompt: Prompt, k: int) -> Drawn:
    return Drawn([prompt.number, k], [-0.5, -0.25], 0.5, True)


def test_every_rank_gets_its_share_of_what_all_ranks_have_asked_for() -> None:
    """Two steps of five prompts, in units of two: three ranks ask, and two train on it."""
    steps = [prompts(*range(10, 15)), prompts(*range(15, 20))]
    asked = Pending.of(3, steps)
    shares = []
    for rank in range(3):
        division = Division(together=2, group=2, rank=rank, world=3)
        units = division.ahead(steps)
        by_tokens = {tuple(each.tokens): each for step in steps for each in step}
        made = [
            [
                [answer(by_tokens[tuple(tokens)], number % 2) for number in numbers]
                for tokens, numbers in zip(*unit[:2], strict=True)
            ]
            for unit in units
        ]
        shares.append(division.share(asked.steps, made))
    ahead = Ahead.of(asked, shares)
    assert ahead.answers == [[answer(prompt, k) for k in (0, 1)] for step in steps for prompt in step]
    found = [Division(2, 2, rank, 2).shares(asked.steps, ahead.answers) for rank in (0, 1)]
    assert [[number for number, _ in of_step] for of_step in found[0]] == [[0, 1, 4], [0, 1, 4]]
    assert [[number for number, _ in of_step] for of_step in found[1]] == [[2, 3], [2, 3]]
    assert found[1][1] == [(n, [answer(steps[1][n], k) for k in (0, 1)]) for n in (2, 3)]


def test_answers_to_other_prompts_are_dropped() -> None:
    """Samples are skipped after an instability, so that the rollout has others than those that were asked for."""
    coming = NextRollout(2, 1, 4, is_writer=True)
    ahead = Ahead(1, [1004, 1005], [[answer(prompt, 0)] for prompt in prompts(4, 5)])
    assert coming.state() == []
    coming.ready = ahead
    assert len(coming.state()) == 6
    sizes = [
        [(piece.name, piece.data.dtype, piece.shape) for piece in each]
        for each in (coming.state(), coming.room())
    ]
    assert sizes[0] == sizes[1]
    assert NextRollout(0, 1, 4, is_writer=True).room() == []
    assert coming.take([prompts(8, 9)]) is None
    assert coming.take([prompts(4, 5)]) is None, "they are forgotten"
    coming.ready = ahead
    assert coming.take([prompts(4), prompts(5)]) == ahead
    assert coming.state() == []
    other = NextRollout(2, 1, 4, is_writer=False)
    other.ready = ahead
    assert other.state() == other.room() == []


def test_units_that_workers_generate_at_once_overlap_once() -> None:
    assert covered([(2.0, 3.0), (0.5, 1.0), (0.0, 1.5), (2.5, 4.0), (2.5, 3.5)]) == 1.5 + 2.0
    assert covered([]) == 0.0
