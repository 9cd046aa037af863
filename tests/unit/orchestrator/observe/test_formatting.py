"""The names of runs among others, and values as text."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.observe.formatting import run_name, short, trial_name, value_text


@pytest.mark.parametrize(
    ("job", "folder", "name"),
    [
        ("text", "text", "text"),
        ("text", "b", "b"),
        ("chain-pretrain", "pretrain", "chain-pretrain"),
        ("search2-0000-1", "0000-1", "search2-0000-1"),
        ("context", "text", "text"),
    ],
)
def test_a_run_is_called_by_its_directory_where_its_job_is_not_named_after_it(
    job: str, folder: str, name: str
) -> None:
    assert run_name(job, folder) == name


@pytest.mark.parametrize(
    ("search", "name"),
    [
        ("wide", "wide-0003"),
        ("_my search/ü", "my-search---0003"),
        ("ü", "search-0003"),
        ("a" * 70, "a" * 50 + "-0003"),
    ],
)
def test_trials_are_named_after_their_search(search: str, name: str) -> None:
    assert trial_name(search, "0003") == name


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (0.000123456, "0.0001235"),
        ("adamw", "adamw"),
        ({"weights": "int8", "group": "row"}, "{weights: int8, group: row}"),
        ([1, 2], "[1, 2]"),
    ],
)
def test_a_value_of_a_job_is_shown_as_a_job_file_has_it(value: Any, text: str) -> None:
    assert short(value) == text


def test_a_metric_that_counts_is_shown_exactly() -> None:
    assert [value_text(number) for number in (309_728.0, 999.0, 5.678812, 1234.5678)] == [
        "309,728",
        "999",
        "5.6788",
        "1234.6",
    ]
