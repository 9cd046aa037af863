"""How a world of ranks is divided: degrees, the coordinate of every rank, and what is legal.

Standard library only, so that the job file, the planner and the controller decide without torch or ray.
Rank order (slowest to fastest): pp, dp, cp, tp. Ranks of one tensor group are neighbours, so they land on
one node, where bandwidth is highest (Narayanan et al., 2021, PTD-P, section 3.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

AXES = ("pp", "dp", "cp", "tp")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
TWO_STAGES = ("interleaved", "zero_bubble", "zbv")
"""Schedules under which each rank runs two stages."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that layout and memory depend on, all per model unless said otherwise."""

    parameters: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feedforward: int
    vocabulary: int
    sequence_length: int
    experts: int = 0
    flops_per_token: float = 0.0


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. `ep` borrows data ranks; `dp` is every data-parallel rank, sharded or not."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 0
    micro_batch: int = 1
    recompute: str = "none"
    engine: str = "torch"
    schedule: str = "1f1b"
    sequence: bool = False

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def stages(self) -> int:
        """Number of pipeline stages: two a rank under schedules that interleave them."""
        return self.pp * (2 if self.pp > 1 and self.schedule in TWO_STAGES else 1)

    def stages_of(self, place: int) -> list[int]:
        """The stages that a rank at that place on the pipeline axis runs, in order.

        ZB-V runs the second half of the stages back to the first rank (Qi et al., 2024, section 6).
        """
        if self.stages == self.pp:
            return [place]
        return [place, self.stages - 1 - place if self.schedule == "zbv" else self.pp + place]

    def place_of(self, stage: int) -> int:
        """The place on the pipeline axis that runs a stage."""
        return next(place for place in range(self.pp) if stage in self.stages_of(place))

    def coordinate(self, rank: int) -> dict[str, int]:
        """The place of `rank` on every axis."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return {axis: place[axis] for axis in AXES}

    def rank(self, **place: int) -> int:
        """The rank at a coordinate; axes not given are 0."""
        number = 0
        for axis in AXES:
            number = number * getattr(self, axis) + place.get(axis, 0)
        return number

    def groups(self, axis: str) -> Iterator[list[int]]:
        """The groups of ranks that differ only in their place on `axis`."""
        for rank in range(self.world):
            place = self.coordinate(rank)
            if place[axis] == 0:
                yield [self.rank(**{**place, axis: i}) for i in range(getattr(self, axis))]

    def accumulation(self, global_batch: int) -> int:
        """Micro-batches that each data-parallel rank computes in a step."""
        return global_batch // (self.dp * self.micro_batch)

    def problems(self, shape: ModelShape, global_batch: int) -> list[str]:
        """Every rule that this layout breaks for that model, in words with the mend; empty if it is legal."""
        found = []

        def must_divide(degree: int, size: int, axis: str, what: str) -> None:
            if size % degree:
                fits = ", ".join(str(d) for d in divisors(size))
                found.append(f"{axis} {degree} does not divide the model's {size} {what}; choose {axis} from {fits}")

        must_divide(self.tp, shape.heads, "tp", "attention heads")
        must_divide(self.tp, shape.kv_heads, "tp", "key-value heads")
        must_divide(self.tp, shape.feedforward, "tp", "feed-forward columns")
        if self.pp > max(shape.layers, 1):
            found.append(f"pp {self.pp} is more than the model's {shape.layers} layers; choose pp up to {shape.layers}")
        must_divide(2 * self.cp if self.cp > 1 else 1, shape.sequence_length, "2 x cp", "positions in a sequence")
        if self.ep > 1 and not shape.experts:
            found.append(f"ep {self.ep} needs experts, and this model is dense; set ep to 1")
        elif self.ep > 1:
            must_divide(self.ep, shape.experts, "ep", "experts")
        if self.dp % self.ep:
            found.append(f"ep {self.ep} does not divide the {self.dp} data-parallel ranks it borrows; lower ep")
        if global_batch % (self.dp * self.micro_batch):
            found.append(
                f"global_batch {global_batch} is not a multiple of {self.dp} data-parallel ranks x "
                f"micro-batch {self.micro_batch}; choose a width or micro-batch that divides it"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """The layout as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Layout:
        """The layout that `to_json` wrote."""
        return cls(**data)

    def __str__(self) -> str:
        degrees = [f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1 or axis == "dp"]
        extra = [f"ep{self.ep}"] if self.ep > 1 else []
        return " ".join([*degrees, *extra, f"zero{self.zero}", f"mb{self.micro_batch}"])


def fit(degrees: Layout, workers: int, global_batch: int) -> Layout | None:
    """The widest data-parallel layout with these pp, cp, tp and ep degrees on at most `workers` ranks.

    The width is the largest that divides the global batch, so the batch never changes; a micro-batch that
    the narrower share of a rank no longer holds is cut to the largest that divides it. None if not one
    replica fits.
    """
    replica = degrees.pp * degrees.cp * degrees.tp
    for width in range(workers // replica, 0, -1):
        if global_batch % width or width % degrees.ep:
            continue
        share = global_batch // width
        micro = max(d for d in divisors(share) if d <= degrees.micro_batch)
        return dataclasses.replace(degrees, dp=width, micro_batch=micro)
    return None


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
