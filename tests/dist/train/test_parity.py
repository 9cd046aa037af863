"""Every layout trains the same model: losses, gradient norms and final state equal those of one process.

The layouts are enumerated from `Layout`, and few are chosen in which every feature and every pair of features is
found that any legal layout has: every dimension alone on two ranks, two dimensions on four, three on eight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import MODELS, WIDE, Results, check_equal, cover, layouts_of, reference_of, worst

from cluster.workers.process_gang import ProcessGang
from orchestrator.parallel.layout import AXES, Layout

SHORT, LONG = 4, 10
"""Optimiser steps."""


def cases_of(model: str, world: int, steps: int, size: int = 2) -> list[dict[str, Any]]:
    """A case for each layout of a cover of pairs (or of `size`), among those that cut one axis on two ranks, two
    on four and three on eight."""
    together = {2: 1, 4: 2, 8: 3}[world]
    layouts = [layout for layout in layouts_of(model, world) if dimensions(layout) == together]
    fields = {"name": model, **MODELS[model], "steps": steps}
    return [
        {**fields, "layout": layout.to_json(), "id": f"{model} {layout} {steps}"}
        for layout in cover(layouts, size)
    ]


def dimensions(layout: Layout) -> int:
    """How many of the axes are cut."""
    return sum(getattr(layout, axis) > 1 for axis in AXES)


def wide(**layout: Any) -> dict[str, Any]:
    """A case of the model that is scaled beside a narrower one."""
    found = Layout(**{"micro_batch": 2, **layout})
    return {**WIDE, "name": "wide", "steps": SHORT, "layout": found.to_json(), "id": f"wide {found} {SHORT}"}


def deep(batch: int = 8, **layout: Any) -> dict[str, Any]:
    """A case of a model with layers enough for several stages per rank, and for cuts that are not even."""
    found = Layout(**{**PIPED, **layout})
    changes = {"layers": 8, "hidden": 16, "heads": 2, "intermediate": 32}
    return {
        "name": f"deep, {batch}", "model": "gpt-tiny", "changes": changes, "steps": SHORT, "layout": found.to_json(),
        "train": {"global_batch": batch}, "id": f"deep {found} {batch} {SHORT}",
    }  # fmt: skip


def some(model: str, *layouts: Layout) -> list[dict[str, Any]]:
    """Cases of the default suite: `FULL` has all layouts. On two ranks `test_dropout` has ZeRO 1 and 2, cut sequences,
    ZB-V pipelines and experts; `test_resharding` walks through layouts of four."""
    fields = {"name": model, **MODELS[model], "steps": SHORT}
    return [{**fields, "layout": found.to_json(), "id": f"{model} {found} {SHORT}"} for found in layouts]


EXPERT, PIPED = {"dp": 2, "ep": 2, "micro_batch": 2}, {"pp": 2, "micro_batch": 2}
QUICK = {
    2: [
        wide(tp=2),
        *some("decoder", *(Layout(dp=2, zero=zero, micro_batch=2) for zero in (0, 3))),
        *some("decoder", Layout(cp=2, zero=3, micro_batch=2), Layout(tp=2, micro_batch=2)),
        *some("moe", Layout(**EXPERT, zero=3)),
        *some("capped", Layout(cp=2, micro_batch=2)),
        *some("documents", Layout(cp=2, micro_batch=2)),
        *some("pair", Layout(tp=2, micro_batch=2)),
        *some("two-streams", Layout(**PIPED, schedule="zbv")),
        deep(batch=6, schedule="interleaved", virtual=4, recompute="full", recompute_layers=1),
    ],
    4: [
        *some("decoder", Layout(**PIPED, dp=2, zero=3, schedule="zero_bubble")),
        *some("decoder", Layout(**PIPED, tp=2, sequence=True, schedule="zero_bubble")),
        *some("decoder", Layout(cp=2, dp=2, zero=3, shard=2, micro_batch=1)),
        *some("moe", Layout(dp=4, ep=2, zero=3, shard=2, micro_batch=1)),
        *some("sinks", Layout(**EXPERT, tp=2)),
        *some("moe", Layout(dp=2, tp=2, zero=3, sequence=True, micro_batch=2)),
    ],
}
"""At four ranks what no other module has: `test_resharding` walks through a dozen layouts of four, each compared with
one process; `test_routing` has routers under every axis, and `test_dropout` recomputation."""
LATER = {
    2: [
        *some("shared-gate", Layout(tp=2, sequence=True, micro_batch=2)),
        deep(first_less=2, last_less=3, recompute="selective", recompute_layers=2),
        *some("capped", Layout(tp=2, sequence=True, micro_batch=2)),
        *some("whole-norms", Layout(tp=2, sequence=True, micro_batch=2)),
        *some("sinks", Layout(cp=2, micro_batch=2)),
        *some("sparse", Layout(cp=2, zero=1, micro_batch=2)),
        *some("encoder", Layout(tp=2, sequence=True, micro_batch=2)),
        *some("disentangled", Layout(tp=2, sequence=True, micro_batch=2)),
        *some("two-streams", Layout(tp=2, sequence=True, micro_batch=2)),
        *some("distances", Layout(tp=2, sequence=True, micro_batch=2)),
        *some("summary", Layout(**PIPED, schedule="zbv")),
        deep(schedule="zero_bubble", virtual=3, first_less=1, last_less=0),
        deep(schedule="interleaved", virtual=5, first_less=1, last_less=1),
        *(deep(batch=6, schedule=schedule) for schedule in ("zero_bubble", "zbv")),
        *(deep(batch=2, schedule=schedule) for schedule in ("interleaved", "zero_bubble", "zbv")),
    ],
    4: [
        *(deep(batch=batch, pp=4, schedule="interleaved") for batch in (6, 20)),
        *(deep(batch=batch, pp=4, schedule="zero_bubble") for batch in (6, 20)),
        *some("decoder", Layout(pp=4, first_less=2, last_less=2, micro_batch=2)),
        *some("decoder", Layout(dp=4, zero=2, shard=2, micro_batch=1)),
        *some("moe", Layout(dp=4, ep=2, zero=2, micro_batch=1, recompute="selective")),
    ],
}
"""The long suite runs these. Each layout divides the parts that only its model has."""
FULL = {
    2: [
        *(case for model in MODELS for case in cases_of(model, 2, LONG)),
        *(
            wide(**way)
            for way in ({"pp": 2}, {"dp": 2, "ep": 2}, *({"dp": 2, "zero": zero} for zero in (1, 3)))
        ),
    ],
    4: [case for model in MODELS for case in cases_of(model, 4, LONG)],
    8: [case for model in ("decoder", "moe", "pair") for case in cases_of(model, 8, LONG)],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, gang: ProcessGang) -> Results:
    return Results(tmp_path_factory.mktemp("parity"), gang)


def check(
    results: Results, world: int, case: dict[str, Any], cases: list[dict[str, Any]], timeout: float
) -> None:
    """All cases of a world share one start, which the first test makes."""
    alone = {r["id"]: r for r in map(reference_of, cases)}
    results.run(1, list(alone.values()), timeout)
    results.run(world, cases, timeout)
    check_equal(results.of(case), results.of(reference_of(case)))


@pytest.mark.contract
@pytest.mark.parametrize("case", QUICK[2], ids=lambda case: case["id"])
def test_two_ranks_train_what_one_trains(results: Results, case: dict[str, Any]) -> None:
    check(results, 2, case, QUICK[2], 280)


@pytest.mark.contract
@pytest.mark.parametrize("case", QUICK[4], ids=lambda case: case["id"])
def test_four_ranks_train_what_one_trains(results: Results, case: dict[str, Any]) -> None:
    check(results, 4, case, QUICK[4], 280)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "case"), [(world, case) for world, cases in LATER.items() for case in cases],
    ids=lambda value: value["id"] if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_more_models_train_what_one_process_trains(
    results: Results, world: int, case: dict[str, Any]
) -> None:
    check(results, world, case, LATER[world], 280)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", sorted(FULL))
def test_every_pair_of_features_trains_what_one_process_trains(
    results: Results, world: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cases = FULL[world]
    alone = {r["id"]: r for r in map(reference_of, cases)}
    results.run(1, list(alone.values()), 1200)
    results.run(world, cases, 3500)
    rows = ["| layout | losses | gradient norms | weights |", "|---|---|---|---|"]
    for case in cases:
        apart = worst(results.of(case), results.of(reference_of(case)))
        rows.append(f"| {case['id']} | " + " | ".join(f"{value:.1e}" for value in apart) + " |")
    table = "\n".join(rows)
    Path(tmp_path_factory.getbasetemp() / f"parity-{world}.md").write_text(table + "\n")
    print(table)
    for case in cases:
        check_equal(results.of(case), results.of(reference_of(case)))
