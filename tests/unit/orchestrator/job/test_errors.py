"""What a user is told is one line."""

from __future__ import annotations

import pytest

from orchestrator.job.errors import InputError


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
