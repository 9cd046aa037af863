"""The names of runs among others."""

from __future__ import annotations

import pytest

from orchestrator.observe.formatting import run_name, trial_name


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
