"""Data-parallel ranks that do not divide the micro-batches of a step train what one process trains."""

from __future__ import annotations

from typing import Any

import pytest
from harness import MODELS, Results, check_equal, reference_of, shape_of
from test_fine_tuning import TASKS

from cluster.workers.process_gang import ProcessGang
from orchestrator.config.records import REWARDED
from orchestrator.parallel.layout import Layout

DENSE = [name for name in MODELS if not shape_of(name).even_shares]
TRAINED = [
    name
    for name, task in TASKS.items()
    if task["objective"] not in {*REWARDED, "sentence_embeddings"} and not task.get("changes", {}).get("moe")
]


def case_of(name: str, **layout: Any) -> dict[str, Any]:
    """Eight samples in micro-batches of one or two, over three replicas."""
    found = Layout(**{"dp": 3, "micro_batch": 2, **layout})
    return {
        **{**MODELS, **TASKS}[name],
        "name": name,
        "steps": 3,
        "layout": found.to_json(),
        "id": f"{name} {found}",
    }


QUICK = [
    *(case_of("decoder", zero=zero) for zero in range(4)),
    case_of("encoder", zero=2, micro_batch=1),
    case_of("kto", zero=3),
    case_of("number", micro_batch=1),
]
REST = {
    3: [
        *(case_of(name, zero=zero, micro_batch=1 + zero % 2) for name in DENSE for zero in (1, 2, 3)),
        *(case_of(name, zero=zero) for name in TRAINED for zero in (0, 3)),
    ],
    6: [
        *(
            case_of("decoder", zero=3, **split)
            for split in ({"tp": 2, "sequence": True}, {"pp": 2}, {"cp": 2})
        ),
        case_of("decoder", pp=2, micro_batch=1, schedule="zbv"),
        case_of("pair", tp=2, zero=1),
        case_of("dpo", pp=2, micro_batch=1),
        case_of("talk", cp=2, zero=2),
    ],
}


def check(results: Results, world: int, cases: list[dict[str, Any]], timeout: float) -> None:
    results.run(1, list({r["id"]: r for r in map(reference_of, cases)}.values()), timeout)
    results.run(world, cases, timeout)
    for case in cases:
        check_equal(results.of(case), results.of(reference_of(case)))


def test_three_ranks_share_four_micro_batches(
    gang: ProcessGang, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(Results(tmp_path_factory.mktemp("uneven"), gang), 3, QUICK, 280)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", REST)
def test_every_objective_and_other_axes(
    world: int, gang: ProcessGang, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(Results(tmp_path_factory.mktemp("uneven"), gang), world, REST[world], 3000)
