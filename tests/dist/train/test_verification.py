"""Steps that are computed again: a rank that computes wrongly is found and named, and no other is blamed."""

from __future__ import annotations

from typing import Any

import pytest
from harness import MODELS, finished

from cluster.workers.process_gang import ProcessGang
from orchestrator.parallel.layout import Layout

BITWISE = {"determinism": "bitwise", "virtual_shards": 4}
KINDS = ("product", "gradient", "update")


def trial(model: str = "decoder", **changes: Any) -> dict[str, Any]:
    """A trial of three steps, of which the second is verified."""
    found = {"id": str(changes), **MODELS[model], "steps": 3, "verify": {"every": 2}, **changes}
    found["layout"] = Layout(**{"micro_batch": 2, **changes["layout"]}).to_json()
    return found


def outcomes(gang: ProcessGang, world: int, trials: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What every rank returned of each trial."""
    by_rank = finished(world, {"trials": trials}, "rank_verified:main", gang)
    return [list(each) for each in zip(*by_rank, strict=True)]


def check(
    gang: ProcessGang, world: int, layouts: list[tuple[str, dict[str, Any]]]
) -> list[list[dict[str, Any]]]:
    """Under each layout: no alarm and the same bits without a fault; and with each kind of fault on some rank, all
    ranks name that one. Returns what every rank returned of each trial."""
    trials = []
    for number, (model, fields) in enumerate(layouts):
        plain = {"model": model, **fields}
        trials += [trial(**plain), trial(**{**plain, "verify": None})]
        trials += [
            trial(
                **plain,
                flaw={"kind": kind, "rank": (number + place) % world, "step": 1, "seed": 7 * number + place},
            )
            for place, kind in enumerate(KINDS)
        ]
    found = outcomes(gang, world, trials)
    for asked, each in zip(trials, found, strict=True):
        said = {(one["found"], tuple(one["ranks"])) for one in each}
        blamed = (2, (asked["flaw"]["rank"],)) if "flaw" in asked else (None, ())
        assert said == {blamed}, (asked, [one["error"] for one in each])
    for first in range(0, len(trials), 2 + len(KINDS)):
        for verified, not_verified in zip(found[first], found[first + 1], strict=True):
            assert verified["verified"] == 2
            assert verified["losses"] == not_verified["losses"]
            assert verified["state"] == not_verified["state"]
    return found


def test_two_ranks(gang: ProcessGang) -> None:
    """With two replicas a test of their devices decides which is wrong. Gradients that nobody uses are not summed."""
    found = check(
        gang,
        2,
        [
            ("decoder", {"layout": {"dp": 2}, "train": BITWISE}),
            ("decoder", {"layout": {"dp": 2, "zero": 3}}),
        ],
    )
    assert all(one["sums"] == 0 for each in found for one in each)


def test_the_one_who_spoilt_a_tensor_parallel_group_is_named(gang: ProcessGang) -> None:
    check(gang, 4, [("decoder", {"layout": {"dp": 2, "tp": 2}})])


def test_the_same_rank_finds_no_error_that_stays(gang: ProcessGang) -> None:
    """What the guide says of `by: same`; and no false alarm in a layout without replicas."""
    again = {"verify": {"every": 2, "by": "same"}}
    flaw = {"kind": "product", "rank": 1, "step": 1, "seed": 3}
    trials = [
        trial(**again, layout={"dp": 2}, flaw=flaw),
        trial(layout={"tp": 2}),
        trial(**again, layout={"pp": 2}),
        trial(**again, layout={"dp": 2}, objective="kto"),  # its baseline is computed anew
    ]
    for each in outcomes(gang, 2, trials):
        assert [(one["found"], one["verified"]) for one in each] == [(None, 2), (None, 2)]


@pytest.mark.slow
def test_moments_in_8_bits_whose_blocks_are_cut(gang: ProcessGang) -> None:
    wide = {"changes": {**MODELS["decoder"]["changes"], "hidden": 96, "intermediate": 320}}
    check(gang, 4, [("decoder", {"layout": {"dp": 2, "tp": 2}, **wide, "optimizer": {"name": "adamw_8bit"}})])


@pytest.mark.slow
def test_every_axis(gang: ProcessGang) -> None:
    check(
        gang,
        2,
        [
            ("decoder", {"layout": {"dp": 2, "zero": 1}}),
            ("moe", {"layout": {"dp": 2, "zero": 2}}),
        ],
    )
    check(
        gang,
        4,
        [
            ("decoder", {"layout": {"dp": 4}, "train": BITWISE}),
            ("decoder", {"layout": {"dp": 4, "zero": 3}}),
            ("modern", {"layout": {"dp": 2, "tp": 2, "sequence": True}, "tolerant": True}),
            ("decoder", {"layout": {"dp": 2, "pp": 2, "zero": 1}}),
            ("decoder", {"layout": {"dp": 2, "pp": 2, "schedule": "zbv"}}),
            ("moe", {"layout": {"dp": 4, "ep": 2, "zero": 2}}),
            ("decoder", {"layout": {"dp": 2, "cp": 2, "zero": 3}}),
            ("decoder", {"layout": {"dp": 4, "zero": 3, "shard": 2, "micro_batch": 1}}),
        ],
    )
