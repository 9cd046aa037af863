"""The bytes of all tensors that are alive, by what they are for; of real tensors and of fake ones alike."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from orchestrator.planner.step_trace import CATEGORIES


class HeldBytes:
    """Follows storages from the operator that makes them to their end, by weak references.

    What is counted is the memory that tensors name: several views of one storage count once. What a kernel takes for a
    moment within itself, what an allocator rounds up or keeps, and what libraries hold is not.

    Attributes:
        peak, at_peak: the most since `begin_peak`, and its parts.
    """

    def __init__(self) -> None:
        self.now = dict.fromkeys(CATEGORIES, 0)
        self.total = self.peak = 0
        self.at_peak = dict(self.now)
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, str]] = {}

    def begin_peak(self) -> None:
        """Forget the peak so far."""
        self.peak, self.at_peak = self.total, dict(self.now)

    def add(self, tensor: Tensor, category: str) -> None:
        """Count the tensor's storage from now on, if it is not counted yet."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        key = storage._cdata
        self._known[key] = (weakref.ref(storage, lambda _: self._end(key)), 0, category)
        self._set(key, storage.nbytes(), category)

    def resized(self, storage: torch.UntypedStorage, category: str) -> None:
        """A counted storage has another size: sharded parameters are gathered into one, and freed, so."""
        if storage._cdata in self._known:
            self._set(storage._cdata, storage.nbytes(), category)

    def move(self, tensors: Iterable[Tensor], category: str) -> None:
        """These tensors are for something else than was thought; a peak that stands now is of the new categories."""
        is_at_peak = self.total == self.peak
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._known:
                self._set(key, self._known[key][1], category)
            else:
                self.add(tensor, category)
        if is_at_peak:
            self.at_peak = dict(self.now)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """These tensors are elsewhere, and count no more."""
        for tensor in tensors:
            self.add(tensor, "other")
            key = tensor.untyped_storage()._cdata
            self._set(key, 0, self._known[key][2])

    def pass_by(self, size: int, category: str) -> None:
        """Count so many bytes that are held only for as long as an operator takes."""
        if self.total + size > self.peak:
            self.peak, self.at_peak = self.total + size, dict(self.now)
            self.at_peak[category] += size

    def category(self, tensor: Tensor) -> str:
        """What the tensor is for; empty if it is not counted."""
        found = self._known.get(tensor.untyped_storage()._cdata)
        return found[2] if found else ""

    def _set(self, key: int, size: int, category: str) -> None:
        reference, before, was = self._known[key]
        self._known[key] = (reference, size, category)
        self.now[was] -= before
        self.now[category] += size
        self.total += size - before
        self._look()

    def _end(self, key: int) -> None:
        _, size, category = self._known.pop(key)
        self.now[category] -= size
        self.total -= size

    def _look(self) -> None:
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.now)
