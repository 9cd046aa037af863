"""Signatures of what a rank sends to other ranks and receives from them, in order.

Two ranks that compute the same micro-batches from the same weights send the same. If they do not, the first message
that differs tells who computed wrongly: the rank that sent it, because everything it had received until then was equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

WIDTH = 1024
"""Columns of the matrix as which a tensor is projected."""
AT_ONCE = 2**24
"""Words of a tensor on a GPU that are hashed at once; each takes 16 bytes meanwhile."""
ODD = 0x9E3779B1
"""2^32 / golden ratio (Knuth, 1998, section 6.4): multiples of it are spread evenly over the 32-bit numbers."""


@dataclass(frozen=True)
class Message:
    """The signature of one message.

    Attributes:
        sent: whether this rank computed it. If not, other ranks did.
        bits: a hash of its bits; 0 if they are not compared.
        norm: its Euclidean norm; 0 if the bits are compared.
        projection: its inner product with a fixed vector of signs. A change of one element changes it by as much.
    """

    sent: bool
    bits: int = 0
    norm: float = 0.0
    projection: float = 0.0

    def is_like(self, other: Message, tolerance: float) -> bool:
        """Whether both are signatures of the same message.

        Args:
            other: the other signature.
            tolerance: 0 to compare bits. Else the norm and the projection may differ by this share of the norm.
        """
        if self.sent != other.sent or self.bits != other.bits:
            return False
        if not (math.isfinite(self.norm) and math.isfinite(other.norm)):  # as where fp16 overflows
            return self.norm == other.norm or (math.isnan(self.norm) and math.isnan(other.norm))
        # A share of the norm: sums of the same numbers in another order differ by rounding, which grows with the norm.
        limit = tolerance * max(self.norm, other.norm)
        return abs(self.norm - other.norm) <= limit and abs(self.projection - other.projection) <= limit


Record = list[Message]
"""The messages of a rank in one pass, in order."""


class Witness:
    """Keeps the signatures of messages between `begin` and `take`, and does nothing at other times.

    Attributes:
        sums_gradients: whether replicas sum their gradients. They do at all times but in a pass whose gradients nobody
            uses: what a rank gives to the sum is recorded there, and the sum is left out.
    """

    def __init__(self) -> None:
        self.sums_gradients = True
        self._is_recording = False
        self._exact = True
        self._messages: list[tuple[bool, int | Tensor]] = []

    def begin(self, exact: bool, sums_gradients: bool = True) -> None:
        """Start a record.

        Args:
            exact: whether bits are recorded; else norms and projections.
            sums_gradients: see the class.
        """
        self.sums_gradients = sums_gradients
        self._is_recording = True
        self._exact = exact
        self._messages = []

    def sent(self, tensor: Tensor) -> None:
        """Record a tensor that this rank has computed and that leaves it, or is a result."""
        self._keep(tensor, sent=True)

    def received(self, tensor: Tensor) -> None:
        """Record a tensor that other ranks have computed, or a sum to which they have added."""
        self._keep(tensor, sent=False)

    def take(self) -> Record:
        """Stop, and return the messages since `begin`."""
        self.sums_gradients = True
        self._is_recording = False
        messages, self._messages = self._messages, []
        if self._exact:
            return [Message(sent, bits=int(value)) for sent, value in messages]
        measures = (
            torch.stack([value for _, value in messages if isinstance(value, Tensor)]).tolist()
            if messages
            else []
        )
        pairs = zip(messages, measures, strict=True)
        return [Message(sent, norm=measure[0], projection=measure[1]) for (sent, _), measure in pairs]

    @torch.no_grad()
    def _keep(self, tensor: Tensor, sent: bool) -> None:
        # Within compiled code nothing is recorded: a changed program would have other bits.
        if torch.compiler.is_compiling() or not self._is_recording:
            return
        value = bits_of(tensor) if self._exact else projection_of(tensor)
        self._messages.append((sent, value))


def bits_of(tensor: Tensor) -> int | Tensor:
    """Return a 64-bit hash of a tensor's bits: a number on a CPU, a scalar tensor on a GPU, which does not wait.

    On a GPU it is a sum of the 32-bit words, each times an odd number of its own, so that any single wrong word changes
    it and the order of the additions does not.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data) >> 1
    return words_sum(flat)


def words_sum(flat: Tensor) -> Tensor:
    """Return the weighted sum of the 32-bit words of a flat tensor, int64."""
    octets = flat.view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, part in enumerate(octets.split(4 * AT_ONCE)):
        if odd := -len(part) % 4:
            part = torch.cat((part, part.new_zeros(odd)))
        words = part.view(torch.int32).to(torch.int64)
        first = number * AT_ONCE
        weights = torch.arange(first, first + len(words), device=flat.device).mul_(2 * ODD).add_(1)
        total += words.mul_(weights).sum()
    return total


def projection_of(tensor: Tensor) -> Tensor:
    """Return the norm of a tensor and its projection on a vector of signs, fp64 [2], on its device."""
    flat = tensor.detach().reshape(-1).float()
    signs = _signs(WIDTH, flat.device)
    row_count = len(flat) // WIDTH
    tail = flat[row_count * WIDTH :]
    by_row = torch.cat(
        (flat[: row_count * WIDTH].view(-1, WIDTH) @ signs, (tail * signs[: len(tail)]).sum()[None])
    )
    # Rows in fp32, their sum in fp64: the vector of signs is the outer product of two short ones and is never made
    # whole.
    projection = torch.dot(by_row.double(), _signs(len(by_row), flat.device).double())
    return torch.stack((torch.linalg.vector_norm(flat, dtype=torch.float64), projection))


def _signs(count: int, device: torch.device) -> Tensor:
    """Return fixed signs without a pattern, fp32 [count]: a bit of each number's hash."""
    # Squaring mixes low bits into high ones; a bit of the product alone would repeat along the columns.
    mixed = torch.arange(1, count + 1, device=device) * ODD & 0xFFFFFFFF
    return ((mixed * mixed >> 31) & 1).float().mul_(2).sub_(1)


def to_rows(record: Iterable[Message]) -> list[list[float]]:
    """Return a record as numbers, for a message: the inverse of `from_rows`."""
    return [[int(m.sent), m.bits, m.norm, m.projection] for m in record]


def from_rows(rows: Iterable[Iterable[float]]) -> Record:
    """Restore a record."""
    return [Message(bool(sent), int(bits), norm, projection) for sent, bits, norm, projection in rows]
