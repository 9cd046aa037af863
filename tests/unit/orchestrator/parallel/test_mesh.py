"""The groups of a layout, on one rank of a group that sends nothing."""

from __future__ import annotations

from unittest import mock

import torch.distributed as dist
from rendezvous import recorded

from orchestrator.parallel.device import COLLECTIVE_TIMEOUT
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.mesh import Mesh


def test_groups_of_some_ranks_wait_as_long_as_that_of_all() -> None:
    with recorded(1, 8), mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        mesh = Mesh(Layout(pp=2, dp=2, tp=2))
    assert (mesh.tp.ranks, mesh.data.ranks, mesh.pp.ranks) == ((0, 1), (1, 3), (1, 5))
    assert len(made.call_args_list) == 12
    assert {call.args[1] for call in made.call_args_list} == {COLLECTIVE_TIMEOUT}
