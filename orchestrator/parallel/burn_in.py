"""Tests of a device by computations whose results are known to the last bit.

Products of small whole numbers are exact in any dtype and any order of additions, so a single wrong bit is an error of
the device. The tests cannot show that a device is sound: an error may need other data, or a warmer device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

SIZE = 256
"""Rows and columns of the matrices that are multiplied."""
LARGEST = 8
"""Factors are whole numbers up to this one. Their sums stay below 2^24, where fp32 has every whole number."""
PATTERNS = (0x00, 0xFF, 0x55, 0xAA)
"""Octets that memory is filled with: no bit, all bits, and every second one."""
AT_ONCE = 2**26
"""Bytes of memory that are compared at once."""
ELEMENTS = 2**16
"""Numbers of each rank in a collective."""


def unchanged(result: Tensor) -> Tensor:
    """Return a result unchanged. Tests of this module pass a function that makes it wrong."""
    return result


def products(device: torch.device, seed: int, bend: Callable[[Tensor], Tensor] = unchanged) -> list[str]:
    """Multiply matrices in each dtype of training, and return a line for each product with a wrong bit.

    Args:
        device: where to multiply.
        seed: of the factors.
        bend: an injected fault, applied to the product.
    """
    draw = torch.Generator().manual_seed(seed)
    left, right = (
        torch.randint(-LARGEST, LARGEST + 1, (SIZE, SIZE), generator=draw, dtype=torch.int64)
        for _ in range(2)
    )
    exact = left @ right
    wrong = []
    # By default a product may add parts of its sums in 16 bits, which are not exact.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        product = bend(left.to(device, dtype) @ right.to(device, dtype)).cpu()
        if count := int((product != exact.to(torch.float32).to(dtype)).sum()):
            wrong.append(
                f"matrix multiplication in {str(dtype).removeprefix('torch.')}: {count} wrong elements"
            )
    return wrong


def updates(device: torch.device, seed: int, bend: Callable[[Tensor], Tensor] = unchanged) -> list[str]:
    """Apply the elementwise operations of an optimizer, and return a line if any number is wrong.

    Args: as in `products`.
    """
    draw = torch.Generator().manual_seed(seed)
    integers = torch.randint(1, 1000, (SIZE * SIZE,), generator=draw, dtype=torch.int64)
    x = integers.to(device, torch.float32)
    # Squares, roots, quotients and halves of these whole numbers are exact in fp32: each step below gives back `x`.
    result = bend((((x * x).sqrt() * 4 + x - x) / 2 * x / x) * 0.5).cpu()
    count = int((result != integers.to(torch.float32)).sum())
    return [f"elementwise update: {count} wrong elements"] if count else []


def memory(device: torch.device, size: int, seed: int) -> list[str]:
    """Fill memory with patterns, its own addresses and random bits, read it again, and return a line per wrong part.

    Args:
        device: whose memory to test.
        size: its bytes.
        seed: of the random bits.

    Raises:
        RuntimeError: the memory cannot be allocated.
    """
    octets = torch.empty(size // 8 * 8, dtype=torch.uint8, device=device)
    wrong = []
    for pattern in PATTERNS:
        octets.fill_(pattern)
        count = sum(int((part != pattern).sum()) for part in octets.split(AT_ONCE))
        if count:
            wrong.append(f"{count} octets of memory do not keep the pattern {pattern:#04x}")
    words = octets.view(torch.int64)
    for name, fill in (("their address", _addresses), ("random bits", _random)):
        for number, part in enumerate(words.split(AT_ONCE // 8)):
            fill(part, number, seed)
        count = 0
        for number, part in enumerate(words.split(AT_ONCE // 8)):
            expected = torch.empty_like(part)
            fill(expected, number, seed)
            count += int((part != expected).sum())
        if count:
            wrong.append(f"{count} words of memory do not keep {name}")
    return wrong


def _addresses(part: Tensor, number: int, _: int) -> None:
    first = number * (AT_ONCE // 8)
    torch.arange(first, first + len(part), out=part)


def _random(part: Tensor, number: int, seed: int) -> None:
    draw = torch.Generator(part.device).manual_seed(seed + number)
    part.random_(generator=draw)


def collectives(device: torch.device, seed: int) -> list[str]:
    """Run the collectives of training over all ranks, and return a line for each with a wrong result on this rank.

    The numbers are whole, so that every order of additions gives the same sum.

    Args:
        device: this rank's device.
        seed: of the numbers.
    """
    rank = dist.get_rank()
    world = dist.get_world_size()
    parts = [_numbers(seed, source) for source in range(world)]
    mine = parts[rank].to(device)
    total = sum(parts[1:], parts[0])
    slices = [part.chunk(world)[rank] for part in parts]

    def checks() -> Iterator[tuple[str, Tensor, Tensor]]:
        result = mine.clone()
        dist.all_reduce(result)
        yield "all-reduce", result, total
        result = mine.new_empty(world * len(mine))
        dist.all_gather_single(result, mine)
        yield "all-gather", result, torch.cat(parts)
        result = mine.new_empty(len(mine) // world)
        dist.reduce_scatter_single(result, mine.clone())
        yield "reduce-scatter", result, total.chunk(world)[rank]
        result = torch.empty_like(mine)
        dist.all_to_all_single(result, mine)
        yield "all-to-all", result, torch.cat(slices)

    return [
        f"{name} over {world} ranks: {int((result.cpu() != expected).sum())} wrong elements on rank {rank}"
        for name, result, expected in checks()
        if not torch.equal(result.cpu(), expected)
    ]


def _numbers(seed: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    world = dist.get_world_size()
    return torch.randint(-1000, 1001, (ELEMENTS // world * world,), generator=draw).to(torch.float32)
