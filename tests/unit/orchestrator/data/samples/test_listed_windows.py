from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.data.samples import windows
from orchestrator.data.samples.windows import NAMES, window_chunks
from orchestrator.data.store.tokens import Tokens
from workloads.workload import Windowing

UNITS = ("record", "records", "document", "documents")


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    cuts=st.sets(st.integers(0, 30)),
    window=st.integers(1, 50),
    unit=st.sampled_from(UNITS),
)
def test_samples_do_not_depend_on_how_the_documents_come(
    sizes: list[int], cuts: set[int], window: int, unit: str
) -> None:
    ends, windowing = np.cumsum(np.array(sizes) + 1), Windowing(unit, window, window)  # type: ignore[arg-type]
    whole = list(window_chunks([ends], windowing))
    parts = list(window_chunks(np.split(ends, sorted(cuts & set(range(len(ends))))), windowing))
    for name in NAMES:
        one, other = (np.concatenate([getattr(part, name) for part in found]) for found in (parts, whole))
        assert np.array_equal(one, other)
    assert sum(part.documents for part in parts) == sum(part.documents for part in whole)


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30), window=st.integers(1, 50))
def test_records_are_joined_while_they_have_room(sizes: list[int], window: int) -> None:
    ends = np.cumsum(np.array(sizes) + 1)
    expected, begin = [], 0
    while begin < len(sizes):
        after = begin + 1
        while after < len(sizes) and sum(sizes[begin : after + 1]) <= window:
            after += 1
        expected.append((int(ends[begin - 1]) if begin else 0, int(ends[after - 1]) - 1))
        begin = after
    found = list(window_chunks([ends], Windowing("records", window, window)))  # type: ignore[arg-type]
    assert [(a, b) for part in found for a, b in zip(part.starts, part.stops, strict=True)] == expected


@pytest.mark.parametrize("unit", UNITS)
def test_what_is_on_disk_is_what_is_in_memory_and_damage_is_mended(
    unit: str, prepare_here: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"{'word ' * (n % 17)}end {n}.\n<|endoftext|>\n" for n in range(60))
    uri = prepare_here([text * 3])
    windowing = Windowing(unit, 20, 20)  # type: ignore[arg-type]
    held = windows.windows_of(Tokens.open(uri), 0, windowing)
    monkeypatch.setattr(windows, "MANY", 0)
    for _ in range(2):
        mapped = windows.windows_of(Tokens.open(uri), 0, windowing)
        assert isinstance(mapped.starts, np.memmap)
        for name in NAMES:
            assert np.array_equal(getattr(mapped, name), getattr(held, name))
        assert (mapped.documents, mapped.tokens) == (held.documents, held.tokens)
        assert [mapped.siblings(n) for n in range(9)] == [held.siblings(n) for n in range(9)]
        (file,) = Path(uri).glob("windows/*/000000.stops")
        file.write_bytes(file.read_bytes()[::-1])
