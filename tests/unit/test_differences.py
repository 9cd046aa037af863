"""The page of differences: its tests exist, its versions are those that are installed, and it is up to date."""

from __future__ import annotations

import re

import differences
from differences import ROOT


def test_the_page_is_what_the_table_says() -> None:
    """`python tests/differences.py` writes it."""
    assert differences.PAGE.read_text() == differences.page()


def test_there_are_enough_rows_and_no_two_are_alike() -> None:
    found = [row.does for row in differences.rows()]
    assert len(found) == len(set(found)) >= 40


def test_every_named_test_is_there() -> None:
    named = [test for row in differences.rows() for test in row.tests]
    assert all(row.tests for row in differences.rows())
    assert differences.missing(named) == []
    assert differences.missing([f"{named[0]}_not"]) == [f"{named[0]}_not"]


def test_every_named_finding_is_there() -> None:
    named = [row.source for row in differences.rows() if row.source.startswith("findings/")]
    assert named
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_a_version_is_the_pinned_one_or_said_to_be_another() -> None:
    pinned = differences.pinned()
    for row in differences.rows():
        assert row.version or row.library in pinned, row
        assert row.version != pinned.get(row.library), "leave out what constraints.txt says"
        said = re.findall(r"\b\d+\.\d+\.\d+\b", row.does + row.ours)
        assert set(said) <= {pinned.get(row.library)}, row
