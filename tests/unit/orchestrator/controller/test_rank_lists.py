"""Lists by rank in stored rows, for gangs of many sizes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.controller.run_files import LISTED, RankLists


def row(step: int, world: int, attempt: int = 1, memory: int = 0) -> dict[str, Any]:
    """A row of so many ranks; with their peaks if `memory` is not 0."""
    peaks = {"memory_bytes_by_rank": [memory] * world} if memory else {}
    return {"step": step, "attempt": attempt, "busy_seconds": [0.5] * world, **peaks}


@pytest.mark.parametrize("world", [1, 8, LISTED])
def test_rows_of_gangs_up_to_a_size_stay_as_they_are(world: int) -> None:
    lists = RankLists()
    given = [row(step, world, memory=1 + step % 3) for step in range(1, 9)]
    assert [lists.thin(each) for each in given] == given


def test_a_row_has_so_many_numbers_in_the_mean_however_many_ranks_there_are() -> None:
    """Bytes do not grow with the ranks: those of 16,384 are at most twice those of LISTED."""
    steps, size = 1024, {}
    for world in (LISTED, 4096, 16_384):
        lists = RankLists()
        stored = [lists.thin(row(step, world, memory=10**9 + step)) for step in range(1, steps + 1)]
        size[world] = sum(len(json.dumps(each)) for each in stored)
        assert [each["step"] for each in stored] == list(range(1, steps + 1))
    assert size[16_384] < 2 * size[LISTED]
    assert size[4096] < 2 * size[LISTED]


def test_peaks_that_changed_between_wait_for_the_next_row_with_lists() -> None:
    lists, world = RankLists(), 4 * LISTED
    stored = [lists.thin(row(step, world, memory=5 * (step == 2))) for step in range(1, 9)]
    assert [each["step"] for each in stored if "busy_seconds" in each] == [1, 4, 8]
    assert [each["step"] for each in stored if "memory_bytes_by_rank" in each] == [4]
    assert stored[3]["memory_bytes_by_rank"] == [5] * world


def test_the_first_row_of_an_attempt_has_its_own_lists() -> None:
    """Those that wait belong to the ranks before it."""
    lists = RankLists()
    lists.thin(row(1, 4 * LISTED))
    lists.thin(row(2, 4 * LISTED, memory=5))
    assert lists.thin(row(2, 2 * LISTED, attempt=2)) == row(2, 2 * LISTED, attempt=2)
