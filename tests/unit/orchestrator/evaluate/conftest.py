"""What tests of tasks share."""

from __future__ import annotations

import socket
from typing import Any

import pytest


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for an address or connects fails."""

    def refuse(*arguments: Any, **more: Any) -> Any:
        raise AssertionError(f"asks the network for {arguments}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
