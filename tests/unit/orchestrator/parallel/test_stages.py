"""Which layers the stages of a pipeline have: the planner and the engine ask the same function."""

from __future__ import annotations

import pytest

from orchestrator.parallel.layout import Layout
from orchestrator.parallel.stage_models import plain_stage, stages_with
from orchestrator.parallel.stages import layers_by_stage, layers_of
from workloads.load import load
from workloads.workload import Vocabulary


def test_each_stage_begins_where_the_one_before_ends_and_has_a_layer() -> None:
    for layers in (1, 2, 3, 5, 7, 8, 24, 105):
        for stages in range(1, min(layers, 9) + 1):
            found = [layers_of(layers, stage, stages) for stage in range(stages)]
            assert [start for start, _ in found] == [sum(n for _, n in found[:k]) for k in range(stages)]
            assert sum(count for _, count in found) == layers
            counts = [count for _, count in found]
            assert 1 <= min(counts) <= max(counts) <= min(counts) + 1
            assert counts[-1] <= min(counts) + (layers % stages == 0)


def test_the_stages_hold_all_layers() -> None:
    for layers in (1, 7, 24, 105):
        for stages in (1, 2, 3, 7, 8):
            assert sum(layers_of(layers, stage, stages)[1] for stage in range(stages)) == layers


def test_the_last_stage_has_a_layer_though_there_are_fewer_than_stages() -> None:
    assert [layers_of(2, stage, 4) for stage in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_what_embedding_and_head_count_as_is_taken_from_the_first_and_the_last_stage() -> None:
    for first, last, counts in ((0, 1, [8, 8, 8, 8]), (0, 3, [8, 9, 9, 6]), (2, 2, [7, 9, 9, 7])):
        layout = Layout(pp=4, first_less=first, last_less=last)
        found = [layout.layers_of(32, stage) for stage in range(4)]
        assert [count for _, count in found] == counts
        assert [start for start, _ in found] == [sum(counts[:stage]) for stage in range(4)]


def test_embedding_and_head_may_be_stages_of_their_own() -> None:
    for layers, stages in ((126, 128), (1, 3), (8, 4)):
        each = layers // (stages - 2)
        assert layers_by_stage(layers, stages, each, each) == (0, *[each] * (stages - 2), 0)
    assert layers_by_stage(7, 8) == (1, 1, 1, 1, 1, 1, 1, 0)


@pytest.mark.parametrize("layers", [3, 4, 5])
def test_the_engine_cuts_there(layers: int) -> None:
    sizes = {"hidden": 8, "layers": layers, "heads": 2, "intermediate": 8, "vocab_size": 32}
    workload = load("gpt-tiny", "causal_lm", Vocabulary(32, eos=0), changes=sizes, sequence_length=8)
    for number in range(2):
        names = [name for name, _ in plain_stage(workload, Layout(pp=2), number).named_parameters()]
        held = sorted({int(name.split(".")[1]) for name in names if name.startswith("layers.")})
        start, count = layers_of(layers, number, 2)
        assert held == list(range(start, start + count))


@pytest.mark.parametrize(
    ("model", "objective", "stages"),
    [("gpt-tiny", "causal_lm", 4), ("llama-tiny", "causal_lm", 2), ("bert-tiny", "masked_lm", 2),
     ("t5-tiny", "span_corruption", 4), ("deepseek-v3-tiny", "causal_lm", 2)],
)  # fmt: skip
def test_what_stages_hold_a_parameter_is_what_they_are_made_with(
    model: str, objective: str, stages: int
) -> None:
    """Which is found without making them."""
    tokens = Vocabulary(200, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5, sentinels=tuple(range(60, 160)))
    workload, layout = load(model, objective, tokens, sequence_length=8), Layout(pp=stages)
    made: dict[str, list[int]] = {}
    for number in range(stages):
        for name, _ in plain_stage(workload, layout, number).named_parameters():
            made.setdefault(name, []).append(number)
    assert stages_with(workload, layout) == made
    assert stages_with(workload, Layout()) == {}
