"""Space for a commit on the disk of a run directory."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from jobs import job

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.launch.machine_checks import check_space
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.host_memory import state_bytes
from orchestrator.prune.config import PruneSpec

SHAPE = ModelShape(1_000_000, 8, 64, 8, 8, 256, 1000, 64)


def spec(optimizer: str = "adamw", ema: float | None = None, **resources: object) -> JobSpec:
    average = {"ema": ema} if ema else None
    changes = {"train": {"optimizer": {"name": optimizer}}, "checkpoint": {"every": 2, "average": average}}
    return parse(job("none.txt") | {"resources": {"workers": 1, **resources}} | _over(changes))


def _over(changes: dict[str, dict[str, object]]) -> dict[str, object]:
    whole = job("none.txt")
    return {key: dict(whole.get(key) or {}) | changed for key, changed in changes.items()}


def test_the_bytes_are_those_of_weights_moments_and_the_moving_average() -> None:
    assert state_bytes((asked := spec()).train.optimizer, asked.checkpoint.ema, SHAPE) == 12e6
    assert state_bytes((asked := spec(ema=0.99)).train.optimizer, asked.checkpoint.ema, SHAPE) == 16e6
    assert state_bytes((asked := spec("lion")).train.optimizer, asked.checkpoint.ema, SHAPE) == 8e6
    for method, wanted in (("magnitude", 13e6), ("movement", 21e6)):  # a mask is a byte a weight
        pruned = PruneSpec.model_validate(
            {"sparsity": 0.5, "steps": [1, 2], "method": method}
        ).bytes_per_parameter
        asked = spec()
        found = state_bytes(asked.train.optimizer, asked.checkpoint.ema, SHAPE, pruned=pruned)
        assert found == wanted
    adapted = dataclasses.replace(SHAPE, trained_share=0.01)
    assert state_bytes(spec().train.optimizer, spec().checkpoint.ema, adapted) == 12e4


def test_an_own_optimiser_keeps_as_much_as_adamw_or_nothing() -> None:
    """Of memory the most is taken; for want of space nothing is refused that may need none."""
    own = spec("mine.py:Plain")
    assert state_bytes(own.train.optimizer, own.checkpoint.ema, SHAPE) == 12e6
    assert state_bytes(own.train.optimizer, own.checkpoint.ema, SHAPE, as_lower_bound=True) == 4e6
    assert (
        state_bytes((asked := spec()).train.optimizer, asked.checkpoint.ema, SHAPE, as_lower_bound=True)
        == 12e6
    )


def check(asked: JobSpec, folder: object) -> None:
    least = state_bytes(asked.train.optimizer, asked.checkpoint.ema, SHAPE, as_lower_bound=True)
    check_space(asked.resources, least, str(folder))


def test_a_disk_without_room_for_a_commit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def usage(folder: str) -> object:
        asked.append(str(folder))
        return shutil._ntuple_diskusage(10**9, 10**9 - free, free)  # type: ignore[attr-defined]

    monkeypatch.setattr(shutil, "disk_usage", usage)
    free = 11_900_000
    with pytest.raises(InputError, match=r"takes 12\.0 MB, and its disk has 11\.9 MB free") as found:
        check(spec(), str(tmp_path / "not" / "there"))
    assert asked == [str(tmp_path)]
    assert "must_fit: false" in str(found.value)
    check(spec(must_fit=False), str(tmp_path))
    check(spec("lion"), str(tmp_path))
    check(spec(), "s3://bucket/run")
    free = 12_100_000
    check(spec(), str(tmp_path))
