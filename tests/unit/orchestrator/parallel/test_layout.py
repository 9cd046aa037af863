"""Rank order, legality in words, and the enumeration of legal layouts."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.parallel.layout import BUCKET_BYTES, SCHEDULES, Layout, ModelShape, bucket_bytes, divisors
from orchestrator.parallel.legal_layouts import fit, legal, nearest
from orchestrator.planner.shape_of_model import model_shape
from workloads.model.presets import preset

DENSE = ModelShape(1000, 8, 64, 8, 4, 128, 100, 32, stages=8)
EXPERTS = dataclasses.replace(DENSE, experts=6, expert_feedforward=16)
WITH_LAYERS = dataclasses.replace(DENSE, bare_ends=False)


def test_a_tensor_group_is_neighbours_and_a_pipeline_reaches_farthest() -> None:
    layout = Layout(pp=2, dp=2, cp=2, tp=2)
    assert next(iter(layout.groups("tp"))) == [0, 1]
    assert next(iter(layout.groups("cp"))) == [0, 2]
    assert next(iter(layout.groups("dp"))) == [0, 4]
    assert next(iter(layout.groups("pp"))) == [0, 8]


@given(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.sampled_from([1, 4]), st.sampled_from([1, 2]))
def test_coordinates_and_ranks_are_inverse(pp: int, dp: int, cp: int, tp: int) -> None:
    layout = Layout(pp=pp, dp=dp, cp=cp, tp=tp)
    assert [layout.rank(**layout.coordinate(rank)) for rank in range(layout.world)] == list(
        range(layout.world)
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_is_run_by_one_place(schedule: str) -> None:
    layout = Layout(pp=4, schedule=schedule)
    numbers = [n for place in range(4) for n in layout.stages_of(place)]
    assert sorted(numbers) == list(range(layout.stages))
    assert all(number in layout.stages_of(layout.pipeline_rank_of(number)) for number in numbers)


def test_zbv_comes_back_to_the_first_rank() -> None:
    assert [Layout(pp=3, schedule="zbv").stages_of(place) for place in range(3)] == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize(
    ("layout", "shape", "words"),
    [
        (Layout(tp=3), DENSE, "tp 3 does not divide the model's 8 attention heads; choose tp from 1, 2, 4, 8"),
        (Layout(tp=8), DENSE, "tp 8 does not divide the model's 4 key-value heads"),
        (Layout(tp=4), dataclasses.replace(EXPERTS, expert_feedforward=6), "columns of an expert"),
        (Layout(tp=2), dataclasses.replace(DENSE, uneven_vocabulary=False, vocabulary=9), "vocabulary"),
        (Layout(pp=16), DENSE, "pp 16 makes 16 stages, but the model can be cut into 8; choose pp up to 8"),
        (Layout(pp=8, schedule="zbv"), DENSE, "makes 16 stages, 2 per rank under zbv"),
        (Layout(pp=2), dataclasses.replace(DENSE, stages=1, bare_ends=False), "choose pp up to 1"),
        (Layout(pp=9), WITH_LAYERS, "but the model can be cut into 8; choose pp up to 8"),
        (Layout(pp=10), DENSE, "choose pp up to 8, or set first_less and last_less to 1"),
        (Layout(pp=11, first_less=1, last_less=1), DENSE, "but the model can be cut into 8; choose pp up to 8"),
        (Layout(cp=3), DENSE, "2 x cp 6 does not divide the model's 32 positions"),
        (Layout(cp=2), dataclasses.replace(DENSE, no_context_split="it reads all"), "it reads all; set cp to 1"),
        (Layout(dp=2, ep=2), DENSE, "needs experts, but this model is dense"),
        (Layout(dp=4, ep=4), EXPERTS, "ep 4 does not divide the model's 6 experts"),
        (Layout(dp=4, ep=3), EXPERTS, "ep 3 does not divide the 4 data-parallel ranks it borrows"),
        (Layout(sequence=True), DENSE, "tp above 1; set sequence to false"),
        (
            Layout(tp=2, sequence=True),
            dataclasses.replace(DENSE, no_sequence_split="it reads all"),
            "it reads all; set sequence",
        ),
        (Layout(dp=17), DENSE, "global_batch 16 is not a multiple of 17 data-parallel ranks"),
        (Layout(micro_batch=3), DENSE, "16 is not a multiple of 1 data-parallel ranks x micro-batch 3; choose"),
        (
            Layout(dp=3),
            dataclasses.replace(DENSE, even_shares="it compares"),
            "is not a multiple of 3 data-parallel ranks x micro-batch 1 (it compares); choose",
        ),
        (Layout(dp=3, zero=1, engine="deepspeed"), DENSE, "(DeepSpeed counts the micro-batches"),
        (Layout(pp=4, micro_batch=8), DENSE, "needs at least pp 4 micro-batches, and there are 2"),
        (Layout(virtual=4), DENSE, "virtual 4 is for pipelines whose ranks interleave"),
        (Layout(pp=2, schedule="zbv", virtual=4), DENSE, "or leave virtual out"),
        (Layout(last_less=2), DENSE, "cut a pipeline, but pp is 1"),
        (Layout(pp=4, first_less=8), WITH_LAYERS, "leave stage 0 of 4 none of the 8 layers; lower them"),
        (
            Layout(pp=4, first_less=8),
            DENSE,
            "stage 1 of 4 none of the 8 layers, which only the first and the last may lack; lower them",
        ),
        (Layout(recompute_layers=2), DENSE, "recompute is none; set recompute to full"),
        (Layout(pp=3, schedule="interleaved"), DENSE, "5 rounds do not divide the 16 there are"),
    ],
)  # fmt: skip
def test_an_illegal_layout_names_the_rule_and_the_mend(layout: Layout, shape: ModelShape, words: str) -> None:
    problems = layout.problems(shape, 16)
    assert any(words in problem for problem in problems), problems
    assert all("; " in problem for problem in problems)


def test_only_the_first_and_the_last_stage_may_have_no_layer() -> None:
    for layout in (
        Layout(pp=4, first_less=4, last_less=4),
        Layout(pp=9),
        Layout(pp=10, first_less=1, last_less=1),
        Layout(pp=2, schedule="interleaved", virtual=5, first_less=1, last_less=1),
    ):
        assert layout.problems(DENSE, 20) == []
        assert layout.problems(WITH_LAYERS, 20)


@pytest.mark.parametrize("shape", [DENSE, EXPERTS])
@pytest.mark.parametrize("world", [1, 2, 4, 6])
def test_legal_layouts_fill_the_world_and_break_no_rule(shape: ModelShape, world: int) -> None:
    found = list(legal(shape, world, 12))
    assert found
    assert len(found) == len(set(found))
    assert all(layout.world == world and not layout.problems(shape, 12) for layout in found)


def test_legal_knows_every_dimension() -> None:
    found = list(legal(EXPERTS, 8, 16))
    for axis in ("pp", "dp", "cp", "tp", "ep"):
        assert any(getattr(layout, axis) == 2 for layout in found), axis
    assert {layout.zero for layout in found} == {0, 1, 2, 3}
    assert {layout.schedule for layout in found if layout.pp > 1} == set(SCHEDULES)
    assert {layout.sequence for layout in found} == {True, False}


def test_the_nearest_legal_layouts_keep_what_they_can() -> None:
    asked = Layout(pp=2, dp=2, zero=3, schedule="zbv", micro_batch=2)
    near = nearest(asked, DENSE, 16, lambda other: other.zero == 3)
    assert all(layout.zero < 3 for layout in near)
    assert all(not layout.problems(DENSE, 16) and layout.world == 4 for layout in near)
    assert near[0].pp == near[0].dp == 2


def test_fit_keeps_the_batch_and_cuts_the_micro_batch() -> None:
    """Asked for in torchft#186."""
    assert fit(Layout(micro_batch=8), 3, 16) == Layout(dp=2, micro_batch=8)
    assert fit(Layout(micro_batch=8), 4, 16) == Layout(dp=4, micro_batch=4)
    assert fit(Layout(tp=4), 3, 16) is None
    assert fit(Layout(ep=2), 3, 16) == Layout(dp=2, ep=2)


def test_copies_of_what_is_sharded_have_whole_experts_and_sequences() -> None:
    assert Layout(dp=8, zero=3, shard=4).problems(DENSE, 16) == []
    assert "zero is 1" in Layout(dp=8, zero=1, shard=4).problems(DENSE, 16)[0]
    assert "does not divide" in Layout(dp=8, zero=3, shard=3).problems(DENSE, 24)[0]
    assert "must be a multiple of ep x cp = 4" in Layout(dp=4, cp=4, zero=3, shard=2).problems(DENSE, 16)[0]
    assert (
        "torch engine supports shard"
        in Layout(dp=8, zero=3, shard=4, engine="deepspeed").problems(DENSE, 16)[0]
    )


@pytest.mark.parametrize(("workers", "shard"), [(16, 8), (12, 6), (8, 0), (5, 0), (10, 5), (1, 0)])
def test_fit_divides_a_copy_over_as_many_as_there_can_be(workers: int, shard: int) -> None:
    found = fit(Layout(zero=3, shard=8), workers, 720 * 16)
    assert found is not None
    assert (found.dp, found.shard, found.sharded) == (workers, shard, shard or workers)


def test_fit_gives_every_rank_as_many_virtual_shards() -> None:
    assert fit(Layout(micro_batch=3), 6, 24, virtual_shards=8) == Layout(dp=4, micro_batch=3)
    assert fit(Layout(micro_batch=3), 3, 24, virtual_shards=8) == Layout(dp=2, micro_batch=3)


@given(st.integers(1, 500))
def test_divisors(number: int) -> None:
    assert list(divisors(number)) == [d for d in range(1, number + 1) if number % d == 0]


def test_a_layout_survives_json() -> None:
    layout = Layout(pp=2, dp=2, tp=2, zero=1, schedule="zbv", sequence=True, recompute="full")
    assert Layout.from_json(layout.to_json()) == layout
    assert str(Layout(dp=4, zero=3, shard=2)) == "dp4 shard2 zero3 mb1"
    assert str(layout) == "pp2 dp2 tp2 zbv sequence recompute-full zero1 mb1"


def test_a_class_that_is_run_as_it_is_says_so() -> None:
    shape = dataclasses.replace(DENSE, no_model_split="its class is run as it is")
    for axis, what in (("tp", "tensors"), ("pp", "layers"), ("cp", "the sequence"), ("ep", "experts")):
        (line, *_) = Layout(dp=2, **{axis: 2}).problems(shape, 8)
        assert line == f"{axis} 2 divides {what}, and its class is run as it is; set {axis} to 1"
    assert Layout(dp=2).problems(shape, 8) == []


def test_tensor_parallelism_divides_the_heads_of_a_generator_too() -> None:
    """ELECTRA's small one has a single head."""
    small, base = (model_shape(preset(f"electra-{size}"), 128) for size in ("small", "base"))
    assert Layout(tp=2).problems(small, 8) == [
        "tp 2 does not divide the model's 1 attention heads of the generator; choose tp from 1"
    ]
    assert Layout(tp=2).problems(base, 8) == []


def test_every_rank_sums_a_mebibyte_of_a_bucket_at_least() -> None:
    assert [bucket_bytes(ranks) for ranks in (1, 25, 2048)] == [BUCKET_BYTES, BUCKET_BYTES, 2048 * 2**20]
