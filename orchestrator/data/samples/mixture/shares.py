"""Weights of sources: from the job file and the sizes of the sources to integer weights of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction

from orchestrator.data.config import DataSpec
from orchestrator.data.samples.mixture.interleave import MOST
from orchestrator.train.config import Reading

DIGITS = 40


@dataclass(frozen=True)
class Mixture:
    """The mixture of sources in a job file.

    Attributes:
        phases: the first position of each phase, ascending from 0, and each source's share of the tokens; None if the
            sizes decide.
        alpha: if the sizes decide, a source's share is proportional to its size to this power.
        most: maximum passes over each source; None for no limit.
        size: number of positions of the run.
    """

    phases: tuple[tuple[int, tuple[Fraction, ...] | None], ...]
    alpha: Fraction
    most: tuple[Fraction | None, ...]
    size: int

    @classmethod
    def of(cls, data: DataSpec, reading: Reading, steps: int) -> Mixture | None:
        """Return the mixture of a job; None if its sources have weights in passes.

        A phase begins after the samples that the steps before it read, regardless of skipped ones.
        """
        if not data.is_mixed:
            return None
        mixture = data.mixture
        alpha = Fraction(1)
        phases = [(0, tuple(s.share for s in data.sources))]
        if mixture and mixture.phases:
            untils = (phase.until for phase in mixture.phases if phase.until)
            starts = [0, *map(reading.samples_before, untils)]
            phases = [
                (start, tuple(phase.shares)) for start, phase in zip(starts, mixture.phases, strict=True)
            ]
        elif mixture:
            alpha = mixture.power
            phases = [(0, tuple(None for _ in data.sources))]
        exact = tuple((start, _exact(shares)) for start, shares in phases)
        max_passes = tuple(
            None if s.max_passes is None else Fraction(str(s.max_passes)) for s in data.sources
        )
        return cls(exact, alpha, max_passes, reading.samples_before(steps))

    @property
    def by_size(self) -> bool:
        """Whether the sizes of the sources decide in some phase."""
        return any(shares is None for _, shares in self.phases)

    def weights(self, tokens: Sequence[int], samples: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Return the first position of each phase, and the integer weights of the sources' samples in it.

        `tokens` and `samples` are the sizes of the sources.
        """
        means = [Fraction(t, n) if n else Fraction(1) for t, n in zip(tokens, samples, strict=True)]
        weights = []
        for start, shares in self.phases:
            by_size = shares if shares is not None else powers(tokens, self.alpha)
            weights.append(
                (start, integer_shares([s / mean for s, mean in zip(by_size, means, strict=True)]))
            )
        return weights


def powers(sizes: Sequence[int], alpha: Fraction) -> list[Fraction]:
    """Return sizes^alpha (Conneau and Lample, 2019, section 3.1) in decimal arithmetic, which is the same on every
    machine.
    """
    with localcontext() as context:
        context.prec = DIGITS
        power = Decimal(alpha.numerator) / Decimal(alpha.denominator)
        return [Fraction((power * Decimal(size).ln()).exp()) if size else Fraction(0) for size in sizes]


def integer_shares(rates: Sequence[Fraction]) -> list[int]:
    """Return the smallest integers in these proportions, or, if their sum exceeds 2^24, integers accurate to one part
    in 2^24. Positive rates stay positive.
    """
    scale = math.lcm(*(rate.denominator for rate in rates))
    weights = [int(rate * scale) for rate in rates]
    common = math.gcd(*weights)
    weights = [number // common for number in weights]
    total = sum(weights)
    if total <= MOST:
        return weights
    room = MOST - len(weights)
    return [max(1, (2 * number * room + total) // (2 * total)) if number else 0 for number in weights]


def _exact(shares: Sequence[float | None]) -> tuple[Fraction, ...] | None:
    """Return the decimals that the user wrote; None unless all are given."""
    fractions = [Fraction(str(share)) for share in shares if share is not None]
    return tuple(fractions) if len(fractions) == len(shares) else None
