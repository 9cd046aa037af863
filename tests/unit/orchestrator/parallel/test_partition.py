"""Which part of a tensor a rank holds."""

import itertools
from collections.abc import Container
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from orchestrator.parallel.layout import Layout
from orchestrator.parallel.mesh import Mesh, ProcessGroup
from orchestrator.parallel.partition import cut_of
from workloads.load import load
from workloads.workload import Vocabulary, Workload

VOCABULARY = Vocabulary(101, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5)


class Coordinate:
    """What cutting asks of a mesh, for one rank, without process groups."""

    def __init__(self, layout: Layout, tp: int, ep: int) -> None:
        self.layout = layout
        self.tp = ProcessGroup(tuple(range(layout.tp)), tp, None)
        self.expert = ProcessGroup(tuple(range(layout.ep)), ep, None)


def workload(model: str, **changes: Any) -> Workload:
    objective = "masked_lm" if model.startswith("bert") else "causal_lm"
    sizes = {"hidden": 32, "heads": 4, "intermediate": 64, "layers": 2, **changes}
    return load(model, objective, VOCABULARY, changes=sizes, sequence_length=16)


def parts(
    shapes: Any, styles: Any, layout: Layout, name: str, stacks: Container[str] = ()
) -> list[tuple[Any, bool]]:
    """Each rank's cut of a tensor, and whether the rank holds what no other does."""
    found = []
    for tp, ep in itertools.product(range(layout.tp), range(layout.ep)):
        cut = cut_of(name, shapes[name], styles, cast(Mesh, Coordinate(layout, tp, ep)), stacks)
        mine = (cut.over_tp or tp == 0) and (cut.expert or ep == 0)
        found.append((cut, mine))
    return found


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("model", ["gpt-tiny", "qwen3-tiny", "bert-tiny", "mixtral-tiny", "deepseek-v3-tiny"])
def test_the_parts_that_ranks_stand_for_tile_every_tensor(model: str, sequence: bool) -> None:
    changes = {"kv_heads": 2} if model in ("qwen3-tiny", "mixtral-tiny") else {}
    plain = workload(model, **changes)
    layout = Layout(tp=2, dp=2, ep=2, sequence=sequence)
    for name, shape in plain.shapes.items():
        times = torch.zeros(shape)
        for cut, mine in parts(plain.shapes, plain.sharding(), layout, name):
            times[cut.slices()] += mine
        assert bool((times == 1).all()), name


def test_a_vocabulary_that_does_not_divide_is_cut_unevenly() -> None:
    plain = workload("gpt-tiny")
    rows = [cut.extent[0] for cut, _ in parts(plain.shapes, plain.sharding(), Layout(tp=4), "tokens.weight")]
    assert rows == [25, 25, 25, 26]


def test_experts_are_cut_over_both_groups() -> None:
    plain = workload("mixtral-tiny", kv_heads=2)
    cuts = dict.fromkeys(("gate", "down"), (0,))
    for leaf in cuts:
        name = f"layers.0.feedforward.experts.{leaf}"
        cuts[leaf] = parts(plain.shapes, plain.sharding(), Layout(tp=2, dp=2, ep=2), name)[0][0].extent
    whole = plain.shapes["layers.0.feedforward.experts.gate"]
    assert cuts["gate"] == (whole[0] // 2, whole[1] // 2, whole[2])
    assert cuts["down"] == (whole[0] // 2, whole[2], whole[1] // 2)


def test_biases_of_experts_are_no_matrices_and_that_of_the_sum_is_whole() -> None:
    plain = workload("mixtral-tiny", kv_heads=2, moe={"bias": True})
    found = {}
    for leaf in ("up", "up_bias", "down", "down_bias"):
        name = f"layers.0.feedforward.experts.{leaf}"
        cut, _ = parts(plain.shapes, plain.sharding(), Layout(tp=2, dp=2, ep=2), name, plain.stacks)[0]
        found[leaf] = (cut.matrix, cut.partial, cut.over_tp, cut.extent)
    experts, inner, hidden = plain.shapes["layers.0.feedforward.experts.up"]
    assert found == {
        "up": (True, False, True, (experts // 2, inner // 2, hidden)),
        "up_bias": (False, False, True, (experts // 2, inner // 2)),
        "down": (True, False, True, (experts // 2, hidden, inner // 2)),
        "down_bias": (False, False, False, (experts // 2, hidden)),
    }


@pytest.mark.parametrize(("sequence", "partial"), [(False, False), (True, True)])
def test_norms_on_slices_of_the_sequence_see_part_of_the_gradient(sequence: bool, partial: bool) -> None:
    plain = workload("gpt-tiny")
    for name in ("layers.0.attention_norm.weight", "norm.bias", "layers.1.attention.output.bias"):
        cut, _ = parts(plain.shapes, plain.sharding(), Layout(tp=2, sequence=sequence), name)[0]
        assert cut.partial is partial, name
        assert cut.extent == tuple(plain.shapes[name])


def test_one_rank_holds_everything() -> None:
    plain = workload("mixtral-tiny", kv_heads=2)
    whole: dict[str, Tensor] = {n: torch.empty(s) for n, s in plain.shapes.items()}
    for name in whole:
        ((cut, _),) = parts(plain.shapes, plain.sharding(), Layout(), name)
        assert cut.extent == tuple(whole[name].shape)
        assert not cut.over_tp
        assert not cut.partial
