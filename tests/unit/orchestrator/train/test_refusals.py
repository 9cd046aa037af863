"""What the planner refuses in a job that asks for a layout by hand, and what it chooses by itself."""

from typing import Any

import pytest

from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.choose_layout import plan
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device import Machine
from orchestrator.planner.shape_of_model import model_shape
from workloads.describe import describe

MACHINE = Machine(16e9, 1e11)


def shape_of(model: str = "gpt-tiny", **changes: Any) -> ModelShape:
    return model_shape(describe(model, changes, 4096), 128)


def chosen(workers: int, shape: ModelShape | None = None, gpu: int = 0, **job: Any) -> Layout:
    train = {"steps": 10, "global_batch": 16, **job.pop("train", {})}
    document = {
        "name": "a",
        "workload": {"model": "gpt-tiny"},
        "data": {"sources": [{"uri": "x"}], "tokenizer": "t", "sequence_length": 128},
        "train": train,
        "resources": {"workers": {"min": 1, "max": workers}, "per_worker": {"gpu": gpu}},
        **job,
    }
    return plan(demand_of(parse(document)), shape or shape_of(), workers, MACHINE).chosen.layout


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_small_models_train_plainly_data_parallel(workers: int) -> None:
    layout = chosen(workers)
    assert (layout.dp, layout.world, layout.zero, layout.recompute) == (workers, workers, 0, "none")


def test_a_layout_by_hand_is_taken_whole() -> None:
    asked = {
        "pp": 2,
        "tp": 2,
        "zero": 2,
        "schedule": "gpipe",
        "sequence": True,
        "recompute": "selective",
        "micro_batch": 2,
    }
    assert chosen(8, parallel=asked) == Layout(
        pp=2, dp=2, tp=2, zero=2, micro_batch=2, recompute="selective", schedule="gpipe", sequence=True
    )


def test_an_illegal_one_names_the_rule_and_the_nearest_legal_ones() -> None:
    with pytest.raises(InputError) as error:
        chosen(8, parallel={"pp": 4, "tp": 2, "schedule": "zbv"})
    line = str(error.value)
    assert "pp 4 makes 8 stages, 2 per rank under zbv, but the model can be cut into 4" in line
    assert "the nearest legal layouts are pp4 dp1 tp2 1f1b" in line


@pytest.mark.parametrize(
    ("parallel", "train", "words"),
    [
        ({"pp": 2, "schedule": "zero_bubble"}, {"compile": True}, "which compiled blocks cannot"),
        ({"offload": "optimizer"}, {}, "workers have no GPU; set offload to none"),
        ({"tp": 2}, {"determinism": "bitwise"}, "tp 2 changes the order of sums; set tp to 1"),
        ({"zero": 1}, {"determinism": "bitwise"}, "set zero to 0"),
        ({"micro_batch": 4}, {"determinism": "bitwise"}, "leave micro_batch out or set it to 2"),
    ],
)  # fmt: skip
def test_what_a_job_cannot_have_together(parallel: dict[str, Any], train: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        chosen(2, parallel=parallel, train=train)


@pytest.mark.parametrize(("workers", "width"), [(1, 1), (2, 2), (3, 2), (5, 4), (8, 8)])
def test_bitwise_takes_widths_that_divide_the_virtual_shards(workers: int, width: int) -> None:
    layout = chosen(workers, train={"determinism": "bitwise"})
    assert (layout.dp, layout.micro_batch, layout.zero) == (width, 2, 0)


@pytest.mark.parametrize("shards", [3, 6, 32])
def test_virtual_shards_are_a_power_of_two_within_the_batch(shards: int) -> None:
    with pytest.raises(InputError, match="must be a power of two that divides global_batch 16"):
        chosen(1, train={"determinism": "bitwise", "virtual_shards": shards})


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("t5-tiny", "the decoder attends to the full encoder output"),
        ("bert-tiny", "a sentence head reads one token of the full sequence"),
        ("electra-tiny", "the discriminator's loss is a mean over the full sequence"),
    ],
)
def test_models_whose_sequence_cannot_be_split_say_why(model: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        chosen(2, shape_of(model), parallel={"cp": 2})
