"""What a user is told is one line."""

from __future__ import annotations

import pytest

from orchestrator.config.errors import Absent, InputError, Problems


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InputError("is wrong"), "is wrong"),
        (InputError("is wrong", "job.yaml: a"), "job.yaml: a: is wrong"),
        (InputError("is wrong", "job.yaml: a", "fix it"), "job.yaml: a: is wrong; fix it"),
        (InputError("is wrong", hint="fix it"), "is wrong; fix it"),
        (InputError("is\n  very\twrong", "a\nb", "fix\nit"), "a b: is very wrong; fix it"),
    ],
)
def test_an_input_error_is_one_line(error: InputError, line: str) -> None:
    assert str(error) == line


def test_its_parts_can_be_read() -> None:
    error = InputError("is wrong", "here", "fix it")
    assert (error.what, error.where, error.hint) == ("is wrong", "here", "fix it")


def _raised(*errors: InputError) -> InputError:
    problems = Problems()
    for error in errors:
        with problems.noted():
            raise error
    with pytest.raises(InputError) as found:
        problems.raise_noted()
    return found.value


def test_the_only_problem_is_raised_as_it_was_found() -> None:
    error = Absent("is not there", "here")
    assert _raised(error) is error


def test_all_problems_are_raised_with_the_first() -> None:
    first, second, third = (InputError(what) for what in ("a", "b", "c"))
    found = _raised(first, InputError("b", others=[third]))
    assert [str(each) for each in found.each()] == ["a", "b", "c"]
    assert str(found) == "a (and 2 more)"
    assert second.each() == [second]
