from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Callable

import pytest
from botocore.exceptions import EndpointConnectionError

from orchestrator.config.errors import InputError, Unreachable
from orchestrator.data.prepare.part_tasks import encode_error, grouped, raise_error, run_rows


@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        (InputError("is not a text", "a.txt", "convert it"), InputError, "a.txt: is not a text; convert it"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/cache/1.bin"),
            InputError,
            "/cache/1.bin: cannot be used on a worker's node (No space left on device); free space",
        ),
        (
            FileNotFoundError("bucket/a"),
            InputError,
            "bucket/a: cannot be used on a worker's node (No such file",
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


def test_groups_have_every_row_once_and_the_last_are_small() -> None:
    for count, workers, together in itertools.product((0, 1, 7, 65, 1000), (1, 2, 16), (1, 5, 16)):
        found = grouped(count, workers, together)
        assert [number for group in found for number in group] == list(range(count))
        sizes = [len(group) for group in found]
        assert sizes == sorted(sizes, reverse=True)
        assert all(size <= together for size in sizes)
        assert sizes[-workers:] == [1] * min(count, workers)
    assert [len(group) for group in grouped(65, 2, 10)] == [10, 10, 10, 8, 6, 5, 4, 3, 2, 1, 1, 1, 1, 1, 1, 1]


def test_rows_are_done_in_order_and_the_rest_of_one_beside_the_next() -> None:
    done: list[str] = []
    second_began = threading.Event()

    def task(row: dict[str, int]) -> Callable[[], None] | None:
        number = row["n"]
        if number == 1:
            second_began.set()

        def rest() -> None:
            assert number or second_began.wait(10)
            if number == 3:
                raise InputError("is wrong", "3", "fix it")
            done.append(f"rest {number}")

        done.append(f"task {number}")
        return None if number == 2 else rest

    rows = [{"n": number} for number in range(6)]
    assert run_rows(task, "cache", rows[:3]) == (3, "")
    assert sorted(done) == ["rest 0", "rest 1", "task 0", "task 1", "task 2"]
    done.clear()
    many, error = run_rows(task, "cache", rows[1:])
    assert (many, "is wrong" in error) == (2, True)
    assert "rest 4" not in done
    assert run_rows(task, "cache", []) == (0, "")


def test_a_row_that_fails_ends_its_group_after_what_was_begun() -> None:
    def task(row: dict[str, int]) -> Callable[[], None]:
        if row["n"] == 1:
            raise InputError("is wrong", "1", "fix it")
        return lambda: time.sleep(0.05)

    many, error = run_rows(task, "cache", [{"n": number} for number in range(4)])
    assert (many, "is wrong" in error) == (1, True)
