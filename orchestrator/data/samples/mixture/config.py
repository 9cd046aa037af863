"""The proportions of the sources, as an alternative to passes in an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

from pydantic import Field, model_validator

from orchestrator.config.strict import Positive, StrictModel

CLOSE = Fraction(1, 1000)
"""Tolerance for the sum of shares, because thirds have no exact decimal. Only proportions matter."""


def adds_up(shares: Sequence[float]) -> bool:
    """Return whether the decimals of the shares add up to 1."""
    total = sum((Fraction(str(share)) for share in shares), Fraction())
    return abs(total - 1) <= CLOSE


class MixturePhase(StrictModel):
    """The shares of the sources up to a step of the run."""

    until: Positive | None = Field(
        default=None, description="the step after which the next phase begins; leave unset in the last phase"
    )
    shares: list[float] = Field(
        description="each source's share of the tokens, in the order of data.sources; 0 leaves a source out"
    )


class MixtureSpec(StrictModel):
    """Proportions that follow from the sizes of the sources, or phases of given proportions."""

    alpha: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="a source's share is proportional to its number of tokens to this power, as XLM samples "
        "languages: 1 keeps the natural proportions, near 0 all sources are equal",
    )
    temperature: float | None = Field(
        default=None, ge=1.0, description="1 / alpha, as in T5: 1 keeps the natural proportions"
    )
    phases: list[MixturePhase] = Field(
        default_factory=list, description="shares that change at given steps, for a curriculum or annealing"
    )

    @property
    def power(self) -> Fraction:
        """Return alpha, from alpha or temperature."""
        return Fraction(str(self.alpha)) if self.alpha else 1 / Fraction(str(self.temperature or 1.0))

    @model_validator(mode="after")
    def is_of_one_kind(self) -> MixtureSpec:
        if (self.alpha is not None) + (self.temperature is not None) + bool(self.phases) != 1:
            raise ValueError("a mixture has one of alpha, temperature and phases; give that one")
        return self

    @model_validator(mode="after")
    def phases_follow_each_other(self) -> MixtureSpec:
        ends = [phase.until for phase in self.phases]
        set_ends = [end for end in ends[:-1] if end is not None]
        if ends and (ends[-1] is not None or len(set_ends) < len(ends) - 1):
            raise ValueError(
                "every phase but the last has an until; the last one holds to the end of the run"
            )
        if any(after <= before for before, after in itertools.pairwise(set_ends)):
            raise ValueError(f"the phases end at {set_ends}; put them in the order of their steps")
        return self

    def check_sources(self, count: int) -> None:
        """Raise ValueError if a phase does not have a share for each of `count` sources."""
        for number, phase in enumerate(self.phases):
            if len(phase.shares) != count:
                raise ValueError(
                    f"mixture.phases.{number} has {len(phase.shares)} shares for {count} sources; give one for each"
                )
            if min(phase.shares) < 0.0 or not adds_up(phase.shares):
                raise ValueError(
                    f"the shares of mixture.phases.{number} add up to {sum(phase.shares):g}; make it 1, "
                    "with no share below 0"
                )
        for source in range(count if self.phases else 0):
            if not any(phase.shares[source] for phase in self.phases):
                raise ValueError(
                    f"sources.{source} comes in no phase; leave the source out, or give it a share"
                )
