"""The search passes over layouts by rules and by a bound: none that is legal is much faster than the chosen one."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
from nvidia_steps import CLOUD
from published_steps import PTDP_1, PTDP_2, REPORT, SEQUENCE, TORCHTITAN, Published
from thin import every

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.parallel.engine_rules import engine_problems
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.parallel.legal_layouts import legal
from orchestrator.planner.candidates import (
    MICRO_BATCHES,
    SAFE_SHARE,
    SEARCHED_VIRTUAL,
    LayoutEstimates,
    all_degrees,
)
from orchestrator.planner.choose_layout import plan, predict
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device import Machine
from orchestrator.planner.device_profile import Profile, load
from orchestrator.planner.memory import MEMORY_SHARE, peak_bytes
from orchestrator.planner.search import MIN_CANDIDATES, TIE
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.planner.simulation.step import ends_in_layers
from workloads.describe import describe

CASES = [
    (model, machine, workers, batch)
    for model, machine in (
        ("gpt2", "t4"),
        ("gpt2", "h100"),
        ("llama-3-8b", "a100-80"),
        ("mixtral-8x7b", "h200"),
        ("bert-base", "cpu-core"),
    )
    for workers, batch in ((1, 8), (6, 24), (8, 64), (24, 48))
]


def job(model: str, gpu: int, batch: int) -> JobSpec:
    document: dict[str, Any] = {
        "name": "cases",
        "workload": {"model": model, "objective": "masked_lm" if model.startswith("bert") else "causal_lm"},
        "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 512},
        "train": {"steps": 100, "global_batch": batch, "precision": "fp16" if gpu else "fp32"},
        "resources": {"workers": {"min": 1, "max": 64}, "per_worker": {"gpu": gpu}},
    }
    return parse(document)


def here(profile: Profile, spec: JobSpec) -> Machine:
    """A worker on a host with memory enough for all that is offloaded."""
    return dataclasses.replace(profile.machine(spec.train.precision), host_memory=math.inf)


def every_layout(shape: ModelShape, workers: int, batch: int) -> Iterator[Layout]:
    """Every legal layout on up to so many workers: all widths, schedules, recomputations, offloads and engines."""
    recomputes = ("none",) if shape.no_recompute else ("none", "selective", "full")
    engines = (("torch", "none"), ("torch", "optimizer"), ("deepspeed", "none"), ("deepspeed", "parameters"))
    for world in range(1, workers + 1):
        for layout in legal(shape, world, batch, [m for m in MICRO_BATCHES if m <= batch]):
            # a rank alone has nothing to shard, but DeepSpeed can offload it
            zeros = (layout.zero,) if layout.dp * layout.cp > 1 else range(4)
            for recompute, (engine, offload), zero in itertools.product(recomputes, engines, zeros):
                options = {"recompute": recompute, "engine": engine, "offload": offload, "zero": zero}
                other = dataclasses.replace(layout, **options)
                if not other.problems(shape, batch):
                    yield other


SMALL = [(model, device, 4, 12) for model, device in dict.fromkeys(case[:2] for case in CASES)]
SMALL += [("gpt2", "t4", 5, 8), ("llama-3-8b", "a100-80", 7, 16), ("bert-base", "cpu-core", 7, 24)]
SMALL += [
    pytest.param(case, marks=[pytest.mark.slow] if case[2] > 4 else []) for case in CASES if case[2] < 24
]


@pytest.mark.parametrize("case", every(3, SMALL), ids=str)
def test_no_legal_layout_is_much_faster_than_the_chosen_one(case: tuple[str, str, int, int]) -> None:
    """Brute force over all that is legal, by no rule of the search."""
    model, device, workers, batch = case
    profile = load(device)
    spec = job(model, int(profile.kind == "cuda"), batch)
    machine, shape = here(profile, spec), model_shape(describe(model), 512)
    offered = machine.memory * MEMORY_SHARE
    least = min(
        (
            predict(demand_of(spec), shape, layout, machine).seconds
            for layout in every_layout(shape, workers, batch)
            if not engine_problems(spec.train, spec.workload, spec.resources.per_worker.gpu, layout)
            and peak_bytes(demand_of(spec), shape, layout) <= offered
        ),
        default=None,
    )
    if least is None:
        with pytest.raises(InputError):
            plan(demand_of(spec), shape, workers, machine)
        return
    assert plan(demand_of(spec), shape, workers, machine).chosen.seconds <= least * (1 + TIE)


@pytest.mark.parametrize(
    "case",
    every(
        3,
        (
            pytest.param(case, marks=pytest.mark.slow)
            if case[2] == 24 and case[0] != "mixtral-8x7b"
            else case
            for case in CASES
        ),
    ),
    ids=str,
)
def test_the_best_are_those_of_brute_force(case: tuple[str, str, int, int]) -> None:
    model, device, workers, batch = case
    profile = load(device)
    spec = job(model, int(profile.kind == "cuda"), batch)
    machine = here(profile, spec)
    shape = model_shape(describe(model), 512)
    offered = machine.memory * MEMORY_SHARE

    program = demand_of(spec).program
    room = LayoutEstimates(
        lambda layout: peak_bytes(demand_of(spec), shape, layout) / offered,
        lambda layout: ends_in_layers(shape, layout, machine, program),
    )
    every = [
        predict(demand_of(spec), shape, layout, machine).seconds
        for degrees in all_degrees(demand_of(spec), shape, workers, machine.per_node, lambda _: None, room)
        for family in degrees.families()
        for layout in family.layouts()
        if not layout.problems(shape, batch)
        and not engine_problems(spec.train, spec.workload, spec.resources.per_worker.gpu, layout)
        and not room.is_tight(layout)
    ]
    if not every:
        with pytest.raises(InputError):
            plan(demand_of(spec), shape, workers, machine)
        return
    found = plan(demand_of(spec), shape, workers, machine)
    seconds = sorted(c.seconds for c in found.candidates)
    assert seconds[:MIN_CANDIDATES] == pytest.approx(sorted(every)[:MIN_CANDIDATES])
    assert found.chosen.seconds <= min(every) * (1 + TIE)
    assert len(found.candidates) >= MIN_CANDIDATES or len(found.candidates) == len(every)
    assert len(found.candidates) + found.passed_over <= len(every)


def test_rows_that_are_cut_are_shorter_in_small_micro_batches_and_need_the_memory_of_full_ones() -> None:
    """By brute force: a bound that took the rows of a large micro-batch would pass over the best layout."""
    profile, batch = load("cpu-core"), 24
    spec = job("bert-base", 0, batch)
    machine, full = here(profile, spec), model_shape(describe("bert-base"), 512)
    lengths = ((1, 40.0), (2, 60.0), (3, 70.0), (4, 110.0), (8, 300.0), (24, 500.0))
    cut = dataclasses.replace(full, row_tokens=lengths)
    demand = demand_of(spec)
    least = min(
        predict(demand, cut, layout, machine).seconds
        for layout in every_layout(cut, 2, batch)
        if not engine_problems(spec.train, spec.workload, spec.resources.per_worker.gpu, layout)
    )
    found, before = (plan(demand, shape, 2, machine) for shape in (cut, full))
    assert found.chosen.seconds <= least * (1 + TIE)
    assert found.chosen.seconds < before.chosen.seconds / 5
    assert found.row_tokens == dict(lengths)[found.chosen.layout.micro_batch] < 100
    assert before.row_tokens is None
    for layout in (Layout(micro_batch=8), Layout(pp=2, micro_batch=4)):
        cut_rows, full_rows = (predict(demand, shape, layout, machine) for shape in (cut, full))
        assert cut_rows.memory == full_rows.memory, "a micro-batch may have a full row"
        # A pipeline's rows keep their length.
        assert (cut_rows.seconds == full_rows.seconds) == (layout.pp > 1)
    longer = [
        predict(demand, full_at, Layout(micro_batch=8), machine).seconds
        for full_at in (
            model_shape(describe("bert-base"), 300),
            dataclasses.replace(full, row_tokens=((1, 300.0),)),
        )
    ]
    assert longer[1] == pytest.approx(longer[0], rel=0.01)


@pytest.mark.parametrize(
    ("workers", "batch"), every(2, [(5, 8), (7, 24), (13, 64), (33, 64), (63, 1024)], unpack=True)
)
def test_one_worker_more_is_never_worse(workers: int, batch: int) -> None:
    """Whatever number of them the degrees divide."""
    machine, shape = load("h100").machine("bf16"), model_shape(describe("llama-3-8b"), 4096)
    spec = job("llama-3-8b", 1, batch)
    least = min(
        plan(demand_of(spec), shape, few, machine, False).chosen.seconds
        for few in range(workers - 2, workers)
    )
    assert plan(demand_of(spec), shape, workers, machine, False).chosen.seconds <= least * (1 + TIE)


@pytest.mark.slow
def test_no_cut_and_no_part_of_recomputed_layers_is_much_faster_than_the_chosen_ones() -> None:
    """Brute force over every cut, number of stages per rank and number of recomputed layers, within so much memory as a
    trace may say less than the formula does."""
    batch, shape = 32 * PIPE.micro_batch, model_shape(describe("gemma-2-2b"), 512)
    spec = job("gemma-2-2b", 1, batch)
    most, least = (
        peak_bytes(demand_of(spec), shape, dataclasses.replace(PIPE, recompute=how))
        for how in ("none", "full")
    )
    chosen = []
    for share in (1.5, 0.8, 0.4, 0.25):
        offered = least + share * (most - least)
        machine = dataclasses.replace(load("h100").machine("fp16"), memory=offered / MEMORY_SHARE)
        found = plan(demand_of(_pinned(spec)), shape, 4, machine).chosen
        times = []
        for schedule, first, last, recompute in itertools.product(
            ("1f1b", "interleaved", "zbv"), range(3), range(12), ("none", "selective", "full")
        ):
            base = dataclasses.replace(
                PIPE, schedule=schedule, first_less=first, last_less=last, recompute=recompute
            )
            for virtual in (2, 3, SEARCHED_VIRTUAL, 6) if schedule == "interleaved" else (2,):
                for some in range(7) if recompute != "none" else (0,):
                    layout = dataclasses.replace(base, virtual=virtual, recompute_layers=some)
                    room = offered * (SAFE_SHARE if some else 1.0)
                    if (
                        not layout.problems(shape, batch)
                        and peak_bytes(demand_of(spec), shape, layout) <= room
                    ):
                        times.append(predict(demand_of(spec), shape, layout, machine).seconds)
        assert found.memory <= offered
        assert found.seconds <= min(times) * (1 + TIE)
        chosen.append(found.layout)
    assert any(layout.recompute_layers for layout in chosen)
    assert (chosen[0].first_less, chosen[0].last_less) != (0, 1)


PIPE = Layout(pp=4, micro_batch=16)


def _pinned(spec: JobSpec) -> JobSpec:
    pins: dict[str, Any] = {key: getattr(PIPE, key) for key in ("pp", "cp", "tp", "zero", "micro_batch")}
    pins |= {"engine": "torch", "offload": "none", "rest": "auto"}
    return parse(spec.model_dump(mode="json", exclude_unset=True) | {"parallel": pins})


QUICK, LONG = (
    [*PTDP_1[:4], *SEQUENCE[:4], *TORCHTITAN],
    [*PTDP_1[4:], *PTDP_2, *SEQUENCE[4:], *REPORT, *CLOUD[::4]],
)
CHOSEN_BY_OTHERS = [*QUICK, *(pytest.param(row, marks=pytest.mark.slow) for row in LONG)]


@pytest.mark.parametrize(
    "row", every(5, CHOSEN_BY_OTHERS), ids=lambda row: f"{row.name}, {row.layout.world} GPUs"
)
def test_layouts_that_others_have_chosen_are_found_or_beaten(row: Published) -> None:
    """By the predictions for this engine, of those that fit in its memory, which holds weights in fp32."""
    document = job("gpt2", 1, row.batch).model_dump(mode="json")
    document["train"] |= {"precision": "bf16", "compile": True}
    document["data"]["sequence_length"] = row.shape.sequence_length
    document["resources"]["workers"]["max"] = row.layout.world
    spec, machine = parse(document), load(row.machine).machine("bf16")
    found = plan(demand_of(spec), row.shape, row.layout.world, machine, must_fit=False)
    theirs = predict(demand_of(spec), row.shape, row.layout, machine)
    if theirs.memory <= machine.memory * MEMORY_SHARE:
        assert found.fits
        assert found.chosen.seconds <= theirs.seconds * (1 + TIE)
