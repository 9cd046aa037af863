"""A step that is skipped because its gradients overflowed leaves nothing to the next one, under any layout, and a run
that goes on from a commit before or after it has the same bits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import MODELS, Results, same_bits

from cluster.workers.process_gang import ProcessGang

STEPS, SKIPPED = 5, 2
MODEL = {
    **MODELS["latent"],
    "name": "latent",
    "steps": STEPS,
    "train": {"precision": "fp16"},
    "average": {"ema": 0.5},
}
QUICK: dict[str, dict[str, Any]] = {"pp": {"pp": 2, "schedule": "zbv"}}
SLOW: dict[str, dict[str, Any]] = {
    "ep": {"dp": 2, "ep": 2},
    "zero3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "1f1b": {"pp": 2},
    "deepspeed1": {"dp": 2, "zero": 1, "engine": "deepspeed"},
    "deepspeed3": {"dp": 2, "zero": 3, "engine": "deepspeed"},
}
LAYOUTS = QUICK | SLOW
LAST = {"pp": 0}
"""The rank that takes the loss, where it is not the second."""


def whole(name: str) -> dict[str, Any]:
    layout = {"micro_batch": 2, **LAYOUTS[name]}
    return {**MODEL, "overflow": [[LAST.get(name, 1), SKIPPED]], "layout": layout, "id": f"skip-{name}"}


def legs(name: str, at: int) -> list[dict[str, Any]]:
    """The same run with an end and a new beginning after `at` steps."""
    first = {**whole(name), "steps": at, "commit": True, "id": f"skip-{name}-{at}"}
    return [first, {**whole(name), "steps": STEPS - at, "restore": first["id"], "id": f"skip-{name}-on-{at}"}]


def check(results: Results, names: Iterable[str]) -> None:
    cases = [case for name in names for case in (whole(name), *legs(name, SKIPPED), *legs(name, SKIPPED + 1))]
    results.run(2, cases)
    for name in names:
        for at in (SKIPPED, SKIPPED + 1):
            check_resume(*(results.of(case) for case in (whole(name), *legs(name, at))))
        check_skip(*(results.of(legs(name, at)[0])["state"] for at in (SKIPPED, SKIPPED + 1)))


def check_resume(reference: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> None:
    joined = {key: first[key] + second[key] for key in ("losses", "norms", "extras")}
    assert [extra["skipped"] for extra in reference["extras"]] == [step == SKIPPED for step in range(STEPS)]
    assert joined["extras"] == reference["extras"]
    same_bits(joined | {"state": second["state"]}, reference)


def check_skip(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Nothing but the scale changes."""
    changed = {key for key, tensor in before.items() if not torch.equal(tensor, after[key])}
    assert changed == {"optim.loss_scale", "optim.good_steps"}
    assert after["optim.loss_scale"] == before["optim.loss_scale"] / 2


def test_a_skipped_step_leaves_nothing_and_a_resume_beside_it_has_the_same_bits(
    tmp_path: Path, gang: ProcessGang
) -> None:
    check(Results(tmp_path, gang), QUICK)


@pytest.mark.slow
def test_so_it_is_under_other_layouts(tmp_path: Path, gang: ProcessGang) -> None:
    check(Results(tmp_path, gang), SLOW)
