"""How the ranks divide the prompts of a step: into units, and the units among all ranks, whatever the layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeAlias

from orchestrator.train.rollouts.prompts import Prompt
from orchestrator.train.rollouts.sampler import Unit
from workloads.model.answers import Drawn

Share: TypeAlias = list[tuple[int, list[Drawn]]]
"""One rank's share of the answers to prompts: the number of each of its prompts among them, with its answers."""


@dataclass(frozen=True)
class Division:
    """The units of one rank.

    Attributes:
        together: prompts of a unit.
        group: answers to each prompt.
        rank, world: the rank's number, and how many there are.
    """

    together: int
    group: int
    rank: int
    world: int

    def numbers(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the numbers of the answers to each prompt in training, see `Unit`."""
        return [[prompt.number * self.group + k for k in range(self.group)] for prompt in prompts]

    def units(
        self, prompts: Sequence[Prompt], numbers: Sequence[list[int]], is_greedy: bool = False
    ) -> list[Unit]:
        """Return this rank's units. `numbers` are those of the answers to each prompt."""
        return [
            Unit([prompts[n].tokens for n in place], [numbers[n] for n in place], is_greedy)
            for place in self._places(len(prompts))
        ]

    def ahead(self, steps: Sequence[Sequence[Prompt]]) -> list[Unit]:
        """Return this rank's units of several steps, which are asked for together."""
        return [unit for prompts in steps for unit in self.units(prompts, self.numbers(prompts))]

    def share(self, steps: Sequence[int], made: Iterable[list[list[Drawn]]]) -> Share:
        """Return this rank's share of the answers to the prompts of some steps.

        Args:
            steps: the number of prompts of each step.
            made: the answers of this rank's units of all steps.
        """
        firsts = [sum(steps[:number]) for number in range(len(steps))]
        numbers = [
            first + number
            for first, count in zip(firsts, steps, strict=True)
            for number in chain.from_iterable(self._places(count))
        ]
        return list(zip(numbers, chain.from_iterable(made), strict=True))

    def shares(self, steps: Sequence[int], answers: Iterable[list[Drawn]]) -> list[Share]:
        """Return this rank's share of the answers to the prompts of each step, of all `answers` in order."""
        left = iter(answers)
        of_steps = [list(islice(left, count)) for count in steps]
        return [
            [(number, each[number]) for number in chain.from_iterable(self._places(len(each)))]
            for each in of_steps
        ]

    def _places(self, prompts: int) -> list[range]:
        """Return the numbers of the prompts of each unit, of so many prompts."""
        starts = range(self.rank * self.together, prompts, self.world * self.together)
        return [range(first, min(first + self.together, prompts)) for first in starts]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans, given by begin and end."""
    whole = 0.0
    reached = -math.inf
    for begin, end in sorted(spans):
        whole += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return whole
