from __future__ import annotations

import errno

import pytest
from botocore.exceptions import EndpointConnectionError

from orchestrator.data.part_tasks import encode_error, raise_error
from orchestrator.job.errors import InputError, Unreachable


@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        (InputError("is no text", "a.txt", "convert it"), InputError, "a.txt: is no text; convert it"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/cache/1.bin"),
            InputError,
            "/cache/1.bin: cannot be used on a worker's node (No space left on device); make room",
        ),
        (
            TimeoutError("s3://b/c: pipe_file had not ended after 30 s"),
            Unreachable,
            "s3://b/c: pipe_file had not",
        ),
        (EndpointConnectionError(endpoint_url="http://x"), Unreachable, "Could not connect to the endpoint"),
    ],
)
def test_an_error_of_a_task_is_one_line_and_keeps_whether_it_may_pass(
    error: Exception, kind: type[InputError], line: str
) -> None:
    with pytest.raises(InputError) as found:
        raise_error(encode_error(error, "cache"))
    assert type(found.value) is kind
    assert line in str(found.value)


def test_an_error_of_the_program_is_raised_as_it_is() -> None:
    with pytest.raises(KeyError):
        encode_error(KeyError("sep"), "cache")
    raise_error("")
