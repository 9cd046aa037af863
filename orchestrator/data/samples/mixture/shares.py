"""How often each source comes: from what a job file says, and the sizes of the sources, to whole weights of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction

from orchestrator.config.data import DataSpec
from orchestrator.data.samples.mixture.interleave import MOST

DIGITS = 40


@dataclass(frozen=True)
class Mixture:
    """What a job file says of the mixture of its sources.

    Attributes:
        phases: the position from which on each holds, ascending from 0, and each source's share of the tokens; None
            where the sizes decide.
        alpha: the power of a source's size that its share is proportional to, where the sizes decide.
        most: the passes that a source may make, None for any number.
        size: positions that the run has.
    """

    phases: tuple[tuple[int, tuple[Fraction, ...] | None], ...]
    alpha: Fraction
    most: tuple[Fraction | None, ...]
    size: int

    @classmethod
    def of(cls, data: DataSpec, global_batch: int, steps: int) -> Mixture | None:
        """The mixture of a job, None if its sources have weights in passes. A phase begins `global_batch` positions a
        step later, whatever was left out before."""
        if not data.is_mixed:
            return None
        asked = data.mixture
        alpha = Fraction(1)
        phases = [(0, tuple(s.share for s in data.sources))]
        if asked and asked.phases:
            starts = [0, *(phase.until * global_batch for phase in asked.phases if phase.until)]
            phases = [(start, tuple(phase.shares)) for start, phase in zip(starts, asked.phases, strict=True)]
        elif asked:
            alpha = asked.power
            phases = [(0, tuple(None for _ in data.sources))]
        exact = tuple((start, _exact(shares)) for start, shares in phases)
        most = tuple(None if s.max_passes is None else Fraction(str(s.max_passes)) for s in data.sources)
        return cls(exact, alpha, most, steps * global_batch)

    @property
    def by_size(self) -> bool:
        """Whether the sizes of the sources decide in some phase."""
        return any(shares is None for _, shares in self.phases)

    def weights(self, tokens: Sequence[int], samples: Sequence[int]) -> list[tuple[int, list[int]]]:
        """The first position of each phase, and the whole weights of the sources' samples in it, whose sources have
        so many tokens and samples."""
        means = [Fraction(t, n) if n else Fraction(1) for t, n in zip(tokens, samples, strict=True)]
        found = []
        for start, shares in self.phases:
            by_size = shares if shares is not None else powers(tokens, self.alpha)
            found.append((start, whole([s / mean for s, mean in zip(by_size, means, strict=True)])))
        return found


def powers(sizes: Sequence[int], alpha: Fraction) -> list[Fraction]:
    """sizes^alpha (Conneau and Lample, 2019, section 3.1), by decimal arithmetic: the same on every machine."""
    with localcontext() as context:
        context.prec = DIGITS
        power = Decimal(alpha.numerator) / Decimal(alpha.denominator)
        return [Fraction((power * Decimal(size).ln()).exp()) if size else Fraction(0) for size in sizes]


def whole(rates: Sequence[Fraction]) -> list[int]:
    """The smallest whole numbers in these proportions; to one part in 2^24 if those are larger. What is not 0 stays
    so."""
    scale = math.lcm(*(rate.denominator for rate in rates))
    found = [int(rate * scale) for rate in rates]
    common = math.gcd(*found)
    found = [number // common for number in found]
    total = sum(found)
    if total <= MOST:
        return found
    room = MOST - len(found)
    return [max(1, (2 * number * room + total) // (2 * total)) if number else 0 for number in found]


def _exact(shares: Sequence[float | None]) -> tuple[Fraction, ...] | None:
    """The decimals that the user wrote; None if there are none."""
    known = [Fraction(str(share)) for share in shares if share is not None]
    return tuple(known) if len(known) == len(shares) else None
