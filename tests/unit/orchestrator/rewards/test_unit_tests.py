"""Which code of an answer is run, and which tests a column has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.rewards.rules import NoAnswer
from orchestrator.rewards.unit_tests import code_of, column_tests, remove


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nand\n```\ny = 2\n```\n", "x = 1\n"),
        ("```py\nx = 1", "x = 1"),
        ("````\nx = '''\n```\n'''\n````\nend", "x = '''\n```\n'''\n"),
        ("a ```x``` b", "a ```x``` b"),
    ],
)
def test_the_first_block_is_the_code(text: str, code: str) -> None:
    assert code_of(text) == code


@pytest.mark.parametrize(
    ("column", "tests"),
    [
        (["assert a", "x = 1\nassert b\nassert c"], ["assert a", "x = 1\nassert b\nassert c"]),
        ("assert a\nassert b == 1", ["assert a", "assert b == 1"]),
        ("import x\nassert a\ny = 1\nassert b", ["import x\nassert a", "y = 1\nassert b"]),
        ("assert a\ncheck(f)", ["assert a", "check(f)"]),
        ("assert a\ny = 1", ["assert a"]),
        ("for i in range(3):\n    assert f(i)", ["for i in range(3):\n    assert f(i)"]),
    ],
)
def test_each_assert_is_a_test(column: Any, tests: list[str]) -> None:
    assert column_tests(column) == tests


@pytest.mark.parametrize(
    ("column", "told"),
    [
        ("def check(f):\n    assert f(1)", "have no assert and call nothing"),
        ("", "have no assert"),
        ("assert (", "are not Python"),
        (f"assert {'-' * 600}1", "nested too deeply"),
        (3, "neither a string nor a list of strings"),
        ([], "neither a string nor a list of strings"),
        ([1], "neither a string nor a list of strings"),
    ],
)
def test_a_column_without_tests_is_told(column: Any, told: str) -> None:
    with pytest.raises(NoAnswer, match=told):
        column_tests(column)


def test_a_folder_is_removed_and_nothing_that_it_points_to(tmp_path: Path) -> None:
    other, folder = tmp_path / "other", tmp_path / "folder"
    for each in (other, folder / "locked" / "deep"):
        each.mkdir(parents=True)
    (folder / "link").symlink_to(other)
    other.chmod(0o500)
    (folder / "locked").chmod(0)
    remove(str(folder))
    assert not folder.exists()
    assert other.stat().st_mode & 0o777 == 0o500
