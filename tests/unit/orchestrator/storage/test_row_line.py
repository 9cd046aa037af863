"""A line of rows: what was written comes back, what was altered or is not a row does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.storage.row_line import EVALS, EVENTS, METRICS, TRIALS, decode, encode

ROW = {"step": 7, "attempt": 2, "time": 1.7e9, "step_seconds": 0.5, "loss": 0.1, "saves": [], "layout": "dp1"}

values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(row=st.dictionaries(st.text().filter(lambda key: key != "crc32"), values, max_size=5))
def test_what_was_written_comes_back(row: dict[str, Any]) -> None:
    line = encode(row)
    assert (line.count(b"\n"), decode(line[:-1])) == (1, row)
    assert json.loads(line) == {**row, "crc32": json.loads(line)["crc32"]}, "plain JSON for everybody else"
    assert decode(json.dumps(row).encode()) == row, "as versions before wrote it"


@settings(max_examples=300)
@given(bit=st.integers(0, 8 * (len(encode(ROW)) - 1) - 1))
def test_no_flipped_bit_makes_another_row(bit: int) -> None:
    line = bytearray(encode(ROW)[:-1])
    line[bit // 8] ^= 1 << bit % 8
    for found in [decode(part, METRICS) for part in bytes(line).split(b"\n")]:
        assert found in (None, ROW)


@pytest.mark.parametrize(
    "line",
    [
        "3", "null", '"step"', "[]", "[{}]", "{}", "NaN", '{"step": 1}', "[" * 100_000, '{"step": ' + "9" * 5000 + "}",
        json.dumps({**ROW, "step": "7"}), json.dumps({**ROW, "step": True}), json.dumps({**ROW, "step": 7.0}),
        json.dumps({**ROW, "time": None}), json.dumps({**ROW, "time": float("inf")}),
        json.dumps({**ROW, "time": 10**400}),
        json.dumps({**ROW, "step_seconds": {}}), json.dumps({**ROW, "samples": 3}), "\0" * 40, "\ufffd", "{}}",
    ],
)  # fmt: skip
def test_json_that_is_no_row_is_none(line: str) -> None:
    assert decode(line.encode(), METRICS) is None


def test_bytes_that_are_no_text_are_no_row() -> None:
    assert decode(b"\xff\xfe{}", METRICS) is None
    assert decode(b"\x00" * 9 + json.dumps(ROW).encode(), METRICS) is None


def test_each_file_has_rows_of_its_own() -> None:
    event = {"time": 1.0, "attempt": 1, "phase": "stop", "skipped": None, "first_fault": "died", "more": {}}
    assert decode(json.dumps(event).encode(), EVENTS) == event
    assert decode(json.dumps({**event, "skipped": "here"}).encode(), EVENTS) is None
    assert decode(json.dumps(event).encode(), METRICS) is None
    assert (
        decode(json.dumps({"trial": "0000", "event": "drawn", "time": 1, "config": []}).encode(), TRIALS)
        is None
    )
    assert decode(b'{"anything": 1}', "rejected.jsonl") == {"anything": 1}
    evaluation = {"step": 4, "attempt": 1, "time": 1.0, "sets": {"validation": {"loss": 2.5}}}
    assert decode(json.dumps(evaluation).encode(), EVALS) == evaluation
    assert decode(json.dumps({**evaluation, "sets": None}).encode(), EVALS) is None
