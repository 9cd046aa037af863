"""What a rank compares of an update in 8 bits with a replica. Whole verified steps are in `tests/dist/train`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.optim.build import OptimizerContext, build_optimizer
from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.kinds import MOMENTS_IN_8_BITS
from orchestrator.parallel.mesh import ProcessGroup
from orchestrator.parallel.parameter_shard import ParameterShard, boxes_of
from orchestrator.parallel.partition import Cut
from orchestrator.parallel.witness import Record
from orchestrator.train.engines.update_again import UpdateAgain

SPEC = OptimizerSpec(name="adamw_8bit", lr=0.01)
SHAPE = (24, 300)
WHOLE = Cut(SHAPE, (0, 0), SHAPE)
HALF = Cut(SHAPE, (0, 0), (24, 150), over_tp=True)
"""The left half of the columns, whose blocks of 256 and 44 numbers are cut through."""


class Noted:
    """A `StepCheck` that keeps what is compared with the replica of rank 1."""

    giver = taker = 1

    def __init__(self, exact: bool) -> None:
        self.exact = exact
        self.copies: Record = []

    def gradients(self, record: Record) -> None:
        raise AssertionError("an update has no gradients to compare")

    def update(self, copies: Record, own: Record, others: Record) -> None:
        assert (own, others) == ([], [])
        self.copies = copies


def compared(cut: Cut, *, exact: bool = True, peer: float = 1.0, error: float = 0.0) -> Record:
    """Return what a rank compares of an update.

    Args:
        cut: its part of the parameter.
        exact: whether bits are compared.
        peer: factor by which a tensor-parallel peer makes the scales of common blocks wrong.
        error: what this rank adds to its gradient.
    """
    generator = torch.Generator().manual_seed(1)
    start, gradients = (torch.randn(SHAPE, generator=generator)[cut.slices()].contiguous() for _ in range(2))
    parameter = nn.Parameter(start)
    parameter.grad = gradients + error
    boxes = boxes_of(cut, 0, parameter.numel())
    shard = ParameterShard("p", cut, parameter, boxes, ProcessGroup((0, 1), 0, None), True, True)

    def make(shards: Any) -> torch.optim.Optimizer:
        context = OptimizerContext(
            spec=SPEC,
            shards=shards,
            norms=lambda parts: [],
            in_8_bits={"p"},
            maxima=lambda blocks, values: values * peer,
        )
        return build_optimizer(context)

    again = UpdateAgain(
        [shard],
        {"p": cut},
        spec=SPEC,
        slots=lambda name: MOMENTS_IN_8_BITS,
        build=make,
        device=torch.device("cpu"),
    )
    check = Noted(exact)
    again.step(make([shard]), 0.01, check)
    return check.copies


@pytest.mark.parametrize("exact", [True, False])
def test_a_scale_that_a_peer_made_wrong_blames_no_other_rank(exact: bool) -> None:
    right = compared(HALF, exact=exact)
    assert len(right) == 1  # the weights
    assert compared(HALF, exact=exact, peer=2.0) == right
    assert compared(HALF, exact=exact, error=0.5) != right


def test_codes_and_scales_of_whole_blocks_are_compared() -> None:
    right = compared(WHOLE)
    assert len(right) == 5
    wrong = compared(WHOLE, error=0.5)
    assert [a == b for a, b in zip(right, wrong, strict=True)] == [False] * 5


def test_codes_are_compared_by_bits_alone() -> None:
    assert len(compared(WHOLE, exact=False)) == 3  # the weights and the scales
