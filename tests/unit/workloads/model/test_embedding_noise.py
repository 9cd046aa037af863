"""NEFTune: noise on token embeddings by the paper's formula, the same however a batch is cut."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch

from workloads.errors import WorkloadError
from workloads.load import load
from workloads.model.dropout import KEYS, PLACES, ROW_TOKENS, noisy, row_keys
from workloads.workload import Vocabulary

ALPHA, ROWS, LENGTH = 5.0, 6, 40


def made(model: str = "gpt-tiny", alpha: float = ALPHA) -> tuple[Any, Any]:
    changes = {"hidden": 64, "layers": 1, "heads": 2, "intermediate": 32}
    workload = load(
        model,
        "causal_lm",
        Vocabulary(60, eos=0),
        changes=changes,
        embedding_noise=alpha,
        sequence_length=LENGTH,
    )
    network = workload.build()
    network.load_state_dict({name: workload.initial(name, 0) for name in workload.shapes})
    return workload, network


def test_the_noise_is_uniform_and_as_large_as_the_paper_says() -> None:
    """emb(X) + alpha / sqrt(L d) x Uniform(-1, 1); L without padding, as in the authors' code."""
    _, network = made()
    padding = torch.arange(LENGTH) < torch.tensor([[LENGTH], [10]] * 3)
    batch = {KEYS: row_keys(1, 0, ROWS), "padding": padding}
    found = noisy(network.train(), torch.zeros(ROWS, LENGTH, 64), batch)
    for row, tokens in enumerate(padding.sum(1).tolist()):
        most = ALPHA / sqrt(tokens * 64)
        drawn = found[row] / most
        assert -1.0 <= drawn.min() < -0.99
        assert 0.99 < drawn.max() < 1.0
        assert drawn.mean().item() == pytest.approx(0.0, abs=0.05)
        assert drawn.std().item() == pytest.approx(1 / sqrt(3), rel=0.03)
    assert (found[0] != found[2]).all(-1).all()
    assert not noisy(network.eval(), torch.zeros(ROWS, LENGTH, 64), batch).any()


def test_the_noise_does_not_depend_on_the_layout() -> None:
    _, network = made()
    batch = {KEYS: row_keys(1, 10, ROWS), ROW_TOKENS: torch.full((ROWS,), LENGTH)}
    whole = noisy(network.train(), torch.zeros(ROWS, LENGTH, 64), batch)
    part = {name: entry[2:4] for name, entry in batch.items()}
    places = torch.tensor([3, 4, 30, 39])
    cut = noisy(network, torch.zeros(2, 4, 64), part | {PLACES: places.expand(2, -1)})
    assert torch.equal(cut, whole[2:4][:, places])


def test_losses_change_in_training_alone() -> None:
    tokens = torch.randint(0, 60, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "labels": tokens, KEYS: row_keys(1, 0, ROWS)}
    losses = {}
    for alpha in (0.0, ALPHA):
        workload, network = made(alpha=alpha)
        losses[alpha] = [workload.loss(network.train(on), batch).total.item() for on in (True, False)]
    assert losses[ALPHA][0] != losses[0.0][0]
    assert losses[ALPHA][1] == losses[0.0][1]


def test_two_stacks_are_refused() -> None:
    with pytest.raises(WorkloadError, match="t5-tiny is neither; set it to 0"):
        load(
            "t5-tiny",
            "span_corruption",
            Vocabulary(200, eos=0, sentinels=tuple(range(100, 200))),
            embedding_noise=1.0,
            sequence_length=32,
        )
