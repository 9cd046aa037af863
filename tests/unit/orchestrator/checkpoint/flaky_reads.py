"""A store whose first read returns a wrong bit."""

from __future__ import annotations

import pytest

from orchestrator.checkpoint.commit_store import Store


def flip_first_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flip a bit of what the store's first read returns. Return the list of the paths that are read."""
    real = store.backend.read_into
    calls: list[str] = []

    def flaky(path: str, offset: int, target: memoryview) -> int:
        count = real(path, offset, target)
        calls.append(path)
        if len(calls) == 1:
            target[0] ^= 1
        return count

    monkeypatch.setattr(store.backend, "read_into", flaky)
    return calls
