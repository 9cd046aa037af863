"""What the rows of a run tell of its ranks beside the step: their memory and machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster.workers.machine import this_machine
from orchestrator.parallel.device import peak_memory
from workloads.model.kernels import noting


class RankRecord:
    """Memory, see `peak_memory`, which was `before` the model was built; the kernels of attention."""

    def __init__(self, before: int) -> None:
        self._before = before
        self._told: tuple[int, ...] = ()
        self._kernels: set[str] = set()

    @contextmanager
    def first_step(self) -> Iterator[None]:
        """Around every step: of the first it notes by which kernels attention is computed."""
        if self._told:
            yield
            return
        with noting() as self._kernels:
            yield

    @property
    def memory(self) -> int:
        """Bytes that this rank has needed at most."""
        return peak_memory(self._before)

    def row(self, memory: tuple[int, ...]) -> dict[str, Any]:
        """What a row tells, given the bytes of all ranks: of each where they have changed, and first of all on which
        machine this rank is, and which kernels of attention it has."""
        found: dict[str, Any] = {"memory_bytes": memory[0]}
        if not self._told:
            found["machine"] = this_machine()
            found["attention_kernels"] = sorted(self._kernels)
        if memory != self._told:
            found["memory_bytes_by_rank"] = self._told = memory
        return found
